"""Tokenizers: of a Hugging Face folder, or the project's own, of single characters.

Nothing is downloaded and no code from a folder is run.
"""

import json
import math
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrl_llm.data.errors import DataError

Message = Mapping[str, Any]  # role, content, and what else a template reads

EMPTY: Mapping[str, Any] = types.MappingProxyType({})

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

ROLE_TOKENS = ("<system>", "<user>", "<assistant>", "<tool>")
# 8 special tokens and 96 characters: a vocabulary of 104 splits over 2, 4 and 8 devices.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<bos>", *ROLE_TOKENS)
CHARACTERS = ("\n", *map(chr, range(ord(" "), ord("~") + 1)))
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")  # with images
CHARACTER_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}<system>{{ tool.function.name }}"
    "({{ (tool.function.parameters or {}).properties | join(', ') }}){{ eos_token }}{% endfor %}"
    "{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Parts of a tokenizer that drop nothing but white space.
_KEEPING = frozenset(
    ["Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel", "Metaspace", "Digits", "UnicodeScripts"]
)
_KEEPING |= {"FixedLength", "WhitespaceSplit", "Whitespace", "BertPreTokenizer"}


_PLAIN_CONTENT = "{{ message['content'] }}"
_CONTENT_OF_PARTS = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
)


def character_tokenizer(images: bool = False, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each printable ASCII character and the newline.

    Its chat template begins every message with a token for its role and ends it with `<eos>`. Of
    tools it shows the names, with those of their arguments, and writes calls as Llama 3 does. Any
    other character becomes `<unk>`. With `images` contents may have parts of images, written as
    Qwen2.5-VL writes them. Each of `words` is one token; of two that begin alike, the longer one is
    taken. Unused tokens make the vocabulary a multiple of eight.

    Raises:
      DataError: If one of `words` is a token already.
    """
    more = IMAGE_TOKENS if images else ()
    names = (*SPECIAL_TOKENS, *CHARACTERS, *more)
    if known := sorted({*words} & {*names}):
        raise DataError(f"config.model.words: {known[0]!r} is a token already; leave it out")
    names += tuple(words)
    unused = tuple(f"<unused{number}>" for number in range(-len(names) % 8))
    vocabulary = {token: index for index, token in enumerate((*names, *unused))}
    template = CHARACTER_TEMPLATE
    if images:
        template = template.replace(_PLAIN_CONTENT, _CONTENT_OF_PARTS)
    # Byte-pair encoding without merges leaves single characters.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        bos_token="<bos>",
        additional_special_tokens=[*ROLE_TOKENS, *more, *unused],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )
    tokenizer.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    return tokenizer


def load_tokenizer(
    path: str, chat_template: str = "", images: bool = False, words: Sequence[str] = ()
) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a local Hugging Face folder; of "", that of characters.

    `images` says whether that of characters has tokens for them; `words` are tokens of it too.

    `chat_template`, unless "", is a file with a Jinja template that replaces the tokenizer's own.
    A file that is missing or broken, or no end-of-sequence token, is a DataError.
    """
    tokenizer = _of_folder(path) if path else character_tokenizer(images, words)
    if chat_template:
        try:
            tokenizer.chat_template = pathlib.Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat template {chat_template!r}: cannot be read: {error}") from error
    return tokenizer


def _of_folder(path: str) -> PreTrainedTokenizerBase:
    folder, where = pathlib.Path(path), f"tokenizer {path!r}"
    if not folder.is_dir():
        remedy = "give a local folder with tokenizer.json (nothing is downloaded)"
        raise DataError(f"{where}: no such folder; {remedy}")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        known = ", ".join(TOKENIZER_FILES)
        raise DataError(f"{where}: no tokenizer file in this folder; it needs one of {known}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library raises many kinds, bare Exception among them
        raise DataError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        rule = "no end-of-sequence token, so no response could end"
        raise DataError(f"{where}: {rule}; set eos_token in its tokenizer_config.json")
    return tokenizer


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any] = EMPTY,
    **kwargs: Any,
) -> Any:
    """Returns what the chat template makes of messages; a DataError if there is none or it refuses.

    `options` are `tools` and other variables of the template, `kwargs` of `apply_chat_template`.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; set model.chat_template to a Jinja file,"
            " or data.chat_template=False for plain text"
        )
    given = [dict(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(given, **options, **kwargs)
    except Exception as error:  # Jinja's, or what the template itself raises
        raise DataError(
            f"the chat template refuses {str(given)[:200]}: {type(error).__name__}: {error}"
        ) from error


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    chat_template: bool = True,
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Returns the tokens and the text of each prompt, as `prompt_text` writes it."""
    texts = [prompt_text(tokenizer, prompt, chat_template) for prompt in prompts]
    return prompt_tokens(tokenizer, texts, chat_template), texts


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Message],
    chat_template: bool = True,
    options: Mapping[str, Any] = EMPTY,
) -> str:
    """Returns the text of a prompt, ready for the model to continue.

    With `chat_template` the tokenizer's template formats the messages and begins the assistant's
    turn. Else the contents are joined by newlines, and `prompt_tokens` adds the special tokens that
    the tokenizer puts around plain text.
    """
    if not chat_template:
        if any(isinstance(message.get("content"), list) for message in prompt):
            raise DataError("images need a chat template; set data.chat_template=True")
        return "\n".join(message.get("content", "") for message in prompt)
    return str(rendered(tokenizer, prompt, options, tokenize=False, add_generation_prompt=True))


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], chat_template: bool
) -> list[tuple[int, ...]]:
    """Returns the tokens of each text that `prompt_text` gave."""
    if not texts:
        return []
    # A template writes the special tokens itself.
    encoded = tokenizer(list(texts), add_special_tokens=not chat_template)["input_ids"]
    return [tuple(tokens) for tokens in encoded]


def token_bound(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """Returns a function from a text to a lower bound of its number of tokens, which is fast.

    It is 0 for a tokenizer that may drop characters, or whose tokens may stand for any number of
    them. Else a token has at most as many characters as the longest in the vocabulary. White space
    does not count: added tokens may take any amount of it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else None
    if described is None or not _model_keeps(described):
        return lambda text: 0
    shrinks = math.prod(map(_shrinks, _steps(described["normalizer"])))
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if not (longest and shrinks and all(map(_keeps, _steps(described["pre_tokenizer"])))):
        return lambda text: 0

    def bound(text: str) -> int:
        per_token = longest * (1 if text.isascii() else shrinks)
        return -(-_num_characters(text) // per_token)

    return bound


def _num_characters(text: str) -> int:  # without white space
    return sum(map(len, text.split()))


def _steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yields the normalizers or pre-tokenizers of a part, those of sequences one by one."""
    if part and part["type"] == "Sequence":
        for each in part.get("pretokenizers", part.get("normalizers", ())):
            yield from _steps(each)
    elif part:
        yield part


def _shrinks(normalizer: Mapping[str, Any]) -> int:
    """Returns the largest factor by which a normalizer may shorten a text; 0: any factor."""
    kind = normalizer["type"]
    if kind in ("NFC", "NFKC"):
        return 4  # characters at most that are composed into one
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return int(bool(pattern) and _num_characters(pattern) <= _num_characters(content))
    return int(kind in _KEEPING)


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Returns whether the split of a text into words drops nothing but white space."""
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in _KEEPING


def _model_keeps(described: Mapping[str, Any]) -> bool:
    """Returns whether every character becomes part of a token of the vocabulary."""
    model = described["model"]
    if model["type"] != "BPE":  # in others one token may stand for any unknown word
        return False
    before = *_steps(described["normalizer"]), *_steps(described["pre_tokenizer"])
    if any(step["type"] == "ByteLevel" for step in before):
        return all(character in model["vocab"] for character in ByteLevel.alphabet())
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return model.get("unk_token") is not None and not model.get("fuse_unk")
