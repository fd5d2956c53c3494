"""Tokenizers: of a Hugging Face folder, or the project's own, of single characters.

Nothing is downloaded and no code from a folder is run.
"""

import pathlib
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrl_llm.data.errors import DataError

Message = Mapping[str, str]  # role, content

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")

ROLE_TOKENS = ("<system>", "<user>", "<assistant>", "<tool>")
# 8 special tokens and 96 characters: a vocabulary of 104 splits over 2, 4 and 8 devices.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<bos>", *ROLE_TOKENS)
CHARACTERS = ("\n", *map(chr, range(ord(" "), ord("~") + 1)))
CHARACTER_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each printable ASCII character and the newline.

    Its chat template begins every message with a token for its role and ends it with `<eos>`. Any
    other character becomes `<unk>`.
    """
    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    # Byte-pair encoding without merges leaves single characters.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        bos_token="<bos>",
        additional_special_tokens=list(ROLE_TOKENS),
        clean_up_tokenization_spaces=False,
        chat_template=CHARACTER_TEMPLATE,
    )


def load_tokenizer(path: str, chat_template: str = "") -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a local Hugging Face folder; of "", that of characters.

    `chat_template` is a file with a Jinja template that replaces the tokenizer's own, unless it is
    "".

    Raises:
      DataError: The folder or a file is missing or broken, or there is no end-of-sequence token.
    """
    tokenizer = _of_folder(path) if path else character_tokenizer()
    if chat_template:
        try:
            tokenizer.chat_template = pathlib.Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat template {chat_template!r}: cannot be read: {error}") from error
    return tokenizer


def _of_folder(path: str) -> PreTrainedTokenizerBase:
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise DataError(
            f"tokenizer {path!r}: no such folder; give a local folder with tokenizer.json"
            " (nothing is downloaded)"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise DataError(
            f"tokenizer {path!r}: no tokenizer file in this folder; it needs one of"
            f" {', '.join(TOKENIZER_FILES)}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library raises many kinds, bare Exception among them
        message = f"cannot be read: {type(error).__name__}: {error}"
        raise DataError(f"tokenizer {path!r}: {message}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"tokenizer {path!r}: no end-of-sequence token, so no response could end;"
            " set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def render_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[Message]],
    chat_template: bool = True,
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Returns the tokens and the text of each prompt, ready for the model to continue.

    With `chat_template` the tokenizer's template formats the messages and begins the assistant's
    turn; else their contents are joined by newlines, with the special tokens that the tokenizer
    puts around plain text.

    Raises:
      DataError: The tokenizer has no template, or its template refuses a prompt.
    """
    texts = prompt_texts(tokenizer, prompts, chat_template)
    return prompt_tokens(tokenizer, texts, chat_template), texts


def prompt_texts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[Message]], chat_template: bool
) -> list[str]:
    """Returns the text of each prompt; see `render_prompts`."""
    if not chat_template:
        return ["\n".join(message["content"] for message in prompt) for prompt in prompts]
    if prompts and not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template; set model.chat_template to a Jinja file,"
            " or data.chat_template=False for plain text"
        )
    texts = []
    for prompt in prompts:
        messages = [dict(message) for message in prompt]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # Jinja's, or what the template itself raises
            raise DataError(
                f"the chat template refuses {str(messages)[:200]}: {type(error).__name__}: {error}"
            ) from error
        texts.append(str(text))
    return texts


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], chat_template: bool
) -> list[tuple[int, ...]]:
    """Returns the tokens of each text that `prompt_texts` gave."""
    if not texts:
        return []
    # A template writes the special tokens itself.
    encoded = tokenizer(list(texts), add_special_tokens=not chat_template)["input_ids"]
    return [tuple(tokens) for tokens in encoded]
