"""Tokenizers: from a Hugging Face folder, or the built-in character-level one.

No code from a folder is run.
"""

import functools
import json
import math
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrl_llm.data import encoding, tokenizer_folder
from jaxrl_llm.data.chat import template_forms
from jaxrl_llm.data.chat.messages import joined_text
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.text import is_text

Message = Mapping[str, Any]  # role, content, and what else a template reads

EMPTY: Mapping[str, Any] = types.MappingProxyType({})

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

# Tokenizer components that drop nothing but white space.
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
    """A tokenizer with one token for each printable ASCII character and the newline.

    Its chat template begins every message with a role token and ends it with `<eos>`. It renders
    the names of tools and of their arguments, and tool calls in Llama 3's format. Any other
    character becomes `<unk>`. With `images` contents may have image parts, rendered as in
    Qwen2.5-VL. Each of `words` is one token; the longest match wins. Unused tokens pad the
    vocabulary to a multiple of eight.

    Raises:
      DataError: If one of `words` is a token already.
    """
    more = IMAGE_TOKENS if images else ()
    names = (*SPECIAL_TOKENS, *CHARACTERS, *more)
    if duplicates := sorted({*words} & {*names}):
        raise DataError(f"config.model.words: {duplicates[0]!r} is a token already; leave it out")
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
    path: str,
    chat_template: str = "",
    images: bool = False,
    words: Sequence[str] = (),
    special_tokens_in_messages: encoding.Treatment = "text",
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face folder; the character-level one if `path` is "".

    Args:
      chat_template: A file with a Jinja template that replaces the tokenizer's own; "": none.
      images: Whether the character-level tokenizer has image tokens.
      words: Additional tokens of the character-level tokenizer.
      special_tokens_in_messages: "text" or "tokens", see `encoding`.

    Raises:
      DataError: If a file is missing or broken, files contradict each other, or there is no
        end-of-sequence token.
    """
    tokenizer = tokenizer_folder.load(path) if path else character_tokenizer(images, words)
    encoding.set_treatment(tokenizer, special_tokens_in_messages)
    if chat_template:
        try:
            tokenizer.chat_template = pathlib.Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat template {chat_template!r}: cannot be read: {error}") from error
    return tokenizer


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any] = EMPTY,
    **kwargs: Any,
) -> Any:
    """Renders messages with the chat template; raises DataError if there is none or it refuses.

    Messages are converted to the forms that the template takes (`template_forms`), and special
    tokens spelled in them are put between guards (`encoding`). `options` are `tools` and other
    template variables, `kwargs` those of `apply_chat_template`.
    """
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; set model.chat_template to a Jinja file,"
            " or data.chat_template=False for plain text"
        )
    try:
        fitted = template_forms.fitted_messages(tokenizer, messages, options)
        try:
            return _apply_template(tokenizer, fitted, options, kwargs)
        except DataError:
            raise
        except Exception:
            # A template that shows calls only among others could not be asked for its form.
            with_text = template_forms.with_text_arguments(fitted)
            if with_text == fitted:
                raise
            return _apply_template(tokenizer, with_text, options, kwargs)
    except DataError:
        raise
    except Exception as error:  # Jinja's, or what the template itself raises
        refused = str([dict(message) for message in messages])[:200]
        problem = encoding.without_guards(f"{type(error).__name__}: {error}")
        raise DataError(f"the chat template refuses {refused}: {problem}") from error


def _apply_template(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Renders messages in the template's forms, with guards around special tokens."""
    chat = encoding.guarded(tokenizer, messages, options)
    if chat.plain_answers:  # the template itself may refuse an answer's text
        tokenizer.apply_chat_template(chat.plain_answers, **chat.options, tokenize=False)
    with_mask = chat.is_guarded and kwargs.get("return_assistant_tokens_mask")
    if with_mask and (encoded := encoding.encoded_chat(tokenizer, chat)):
        return encoded
    rendering = tokenizer.apply_chat_template(chat.messages, **chat.options, **kwargs)
    if isinstance(rendering, str):
        return encoding.with_restored_guards(rendering, chat)
    return rendering


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    chat_template: bool = True,
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Tokens and text of each prompt; see `prompt_text`."""
    texts = [prompt_text(tokenizer, prompt, chat_template) for prompt in prompts]
    tokens = prompt_tokens(tokenizer, texts, chat_template)
    return tokens, list(map(encoding.without_guards, texts))


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Message],
    chat_template: bool = True,
    options: Mapping[str, Any] = EMPTY,
) -> str:
    """The text of a prompt, ready for the model to continue.

    With `chat_template` the messages are rendered with the generation prompt, with guards around
    special tokens in messages (`encoding.without_guards`). Otherwise the contents are joined by
    newlines, and `prompt_tokens` adds the tokens that the tokenizer puts around plain text.
    """
    if not chat_template:
        text = "\n".join(map(_plain_text, prompt))
        if not is_text(text):
            raise DataError(f"{ascii(text)[:60]} contains a lone surrogate; remove it")
        return text
    return str(render_chat(tokenizer, prompt, options, tokenize=False, add_generation_prompt=True))


def _plain_text(message: Message) -> str:
    """The content of a message for a prompt without a template."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else joined_text(content)
    if text is None:
        raise DataError("images need a chat template; set data.chat_template=True")
    if message.get("tool_calls"):
        raise DataError("calls of tools need a chat template; set data.chat_template=True")
    return text


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], chat_template: bool
) -> list[tuple[int, ...]]:
    """Tokenizes texts of `prompt_text`."""
    if not texts:
        return []
    # A template writes the special tokens itself.
    if any(map(encoding.has_guards, texts)):
        encode = functools.partial(encoding.encode, tokenizer, add_special_tokens=False)
        return [tuple(encode(text)["input_ids"]) for text in texts]
    encoded = tokenizer(list(texts), add_special_tokens=not chat_template)["input_ids"]
    return [tuple(tokens) for tokens in encoded]


def token_bound(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """A fast function from a text to a lower bound on its number of tokens.

    The bound is 0 for a tokenizer that may drop characters or map any number of them to one token.
    Otherwise a token has at most as many characters as the longest entry of the vocabulary. White
    space does not count: added tokens may strip any amount of it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else None
    if described is None or not _keeps_all_characters(described):
        return lambda text: 0
    shrinks = math.prod(map(_shrink_factor, _flattened(described["normalizer"])))
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if not (longest and shrinks and all(map(_keeps_text, _flattened(described["pre_tokenizer"])))):
        return lambda text: 0

    def bound(text: str) -> int:
        per_token = longest * (1 if text.isascii() else shrinks)
        return -(-_num_characters(text) // per_token)

    return bound


def _num_characters(text: str) -> int:  # without white space
    return sum(map(len, text.split()))


def _flattened(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Flattens nested sequences of normalizers or pre-tokenizers."""
    if part and part["type"] == "Sequence":
        for each in part.get("pretokenizers", part.get("normalizers", ())):
            yield from _flattened(each)
    elif part:
        yield part


def _shrink_factor(normalizer: Mapping[str, Any]) -> int:
    """The largest factor by which a normalizer may shorten a text; 0: unbounded."""
    kind = normalizer["type"]
    if kind in ("NFC", "NFKC"):
        return 4  # characters at most that are composed into one
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return int(bool(pattern) and _num_characters(pattern) <= _num_characters(content))
    return int(kind in _KEEPING)


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer drops nothing but white space."""
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return pre_tokenizer["type"] in _KEEPING


def _keeps_all_characters(described: Mapping[str, Any]) -> bool:
    """Whether every character becomes part of a token of the vocabulary."""
    model = described["model"]
    if model["type"] != "BPE":  # in others one token may stand for any unknown word
        return False
    before = *_flattened(described["normalizer"]), *_flattened(described["pre_tokenizer"])
    if any(step["type"] == "ByteLevel" for step in before):
        return all(character in model["vocab"] for character in ByteLevel.alphabet())
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return model.get("unk_token") is not None and not model.get("fuse_unk")
