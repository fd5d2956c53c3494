"""Tokenizers of GGUF files: token lists, plus the names of splits that llama.cpp has in code."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Split
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.errors import DataError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # types of tokens
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REMEDY = "give --tokenizer=FOLDER, a Hugging Face folder with the tokenizer of this model"


def _words(digits: int) -> list[Any]:
    pattern = Regex(_WORDS.replace("DIGITS", str(digits)))
    return [Split(pattern, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]


_GPT2 = [ByteLevel(add_prefix_space=False)]
# Pre-tokenizers by `tokenizer.ggml.pre`.
_SPLITS: Mapping[str, list[Any]] = {
    "gpt-2": _GPT2,
    "smollm": [Digits(individual_digits=True), *_GPT2],
    "llama-bpe": _words(digits=3),
    "qwen2": _words(digits=1),
    "deepseek-r1-qwen": _words(digits=1),
}


def from_fields(fields: Mapping[str, Any], where: str) -> PreTrainedTokenizerFast:
    """Builds the tokenizer described by the fields of a GGUF file, with its chat template.

    Raises:
      DataError: If it is missing, incomplete or of an unknown kind; begins with `where`.
    """
    settings = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    kind, tokens = settings.get("model"), settings.get("tokens")
    if kind not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise DataError(f"{where}: tokenizer.ggml.model is {kind!r}, known: {known}; {_REMEDY}")
    if not isinstance(tokens, list) or len(set(tokens)) < len(tokens):
        raise DataError(
            f"{where}: tokenizer.ggml.tokens is not a list of distinct strings; {_REMEDY}"
        )
    types = settings.get("token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise DataError(f"{where}: {len(tokens)} tokens have {len(types)} types; {_REMEDY}")

    vocabulary = {text: i for i, text in enumerate(tokens) if types[i] != _UNUSED}
    special = {}
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = settings.get(f"{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise DataError(f"{where}: {key}_token_id is {index} of {len(tokens)} tokens")
        if index is not None:
            special[f"{role}_token"] = tokens[index]
    if "eos_token" not in special:
        raise DataError(f"{where}: no end-of-sequence token, so no response could end; {_REMEDY}")

    backend, begins = _BACKENDS[kind](settings, vocabulary, where)
    backend.add_tokens(
        [
            AddedToken(text, special=kind != _USER_DEFINED, normalized=False)
            for text, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    before = ["bos_token"] if settings.get("add_bos_token", begins) else []
    after = ["eos_token"] if settings.get("add_eos_token", False) else []
    _add_around(backend, [special[k] for k in before], [special[k] for k in after])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def end_tokens(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of the tokens that end a response: end of sequence, of turn, of message."""
    ids = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(index for index in ids if index is not None))


def _byte_level(
    settings: Mapping[str, Any], vocabulary: dict[str, int], where: str
) -> tuple[Tokenizer, bool]:
    """A byte-level BPE tokenizer like GPT-2's, and whether texts begin with a BOS token."""
    split = str(settings.get("pre"))
    if split not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise DataError(f"{where}: tokenizer.ggml.pre is {split!r}, known: {known}; {_REMEDY}")
    llama3 = split == "llama-bpe"
    pairs = [tuple(merge.split(" ", 1)) for merge in settings.get("merges") or ()]
    backend = _bpe(where, vocab=vocabulary, merges=pairs, ignore_merges=llama3)
    backend.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[split])
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _sentence_piece(
    settings: Mapping[str, Any], vocabulary: dict[str, int], where: str
) -> tuple[Tokenizer, bool]:
    """A SentencePiece-style tokenizer like Llama 2's, with byte fallback; texts begin with BOS.

    The file has scores instead of merges: pairs merge in the order of the score of their result.
    """
    scores = settings.get("scores") or ()
    if len(scores) != len(settings["tokens"]):
        problem = f"{len(settings['tokens'])} tokens have {len(scores)} scores"
        raise DataError(f"{where}: {problem}; {_REMEDY}")
    pairs = [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocabulary, key=lambda piece: -scores[vocabulary[piece]])
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    unknown = settings["tokens"][settings.get("unknown_token_id", 0)]
    options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    backend = _bpe(where, vocab=vocabulary, merges=pairs, **options)
    prefix = "first" if settings.get("add_space_prefix", True) else "never"
    backend.pre_tokenizer = Metaspace(prepend_scheme=prefix, split=False)
    strip = [decoders.Strip(" ", left=1)] if prefix == "first" else []
    parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip
    backend.decoder = decoders.Sequence([*parts])
    return backend, True


_BACKENDS = {"gpt2": _byte_level, "llama": _sentence_piece}


def _bpe(where: str, **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(**options))
    except Exception as error:  # the library raises bare ones
        what = f"tokens and merges do not fit: {error}"
        raise DataError(f"{where}: {what}; {_REMEDY}") from error


def _add_around(backend: Tokenizer, before: Sequence[str], after: Sequence[str]) -> None:
    """Adds tokens around a plain text; chat templates write their own."""
    if before or after:
        ids = [(text, backend.token_to_id(text)) for text in {*before, *after}]
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=ids
        )
