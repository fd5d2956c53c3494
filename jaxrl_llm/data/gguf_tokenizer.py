"""Tokenizers of GGUF files: token lists, plus the names of splits that llama.cpp has in code."""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Split
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer_folder import PROBES, probes_with_tokens

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
_ADDED_SCORE = -1000.0  # of tokens that no merge makes
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


def to_fields(tokenizer: Any, vocab_size: int, end_token_ids: Sequence[int] = ()) -> dict[str, Any]:
    """The fields of a GGUF file that describe a tokenizer; the inverse of `from_fields`.

    They are read back, and the result must encode texts as the tokenizer does. Texts are compared
    in Unicode's composed form (NFC), which some tokenizers make and llama.cpp leaves to the caller.

    Args:
      vocab_size: Rows of the embedding; ids without a token become unused tokens.
      end_token_ids: Tokens that end a response; those beyond the tokenizer's end of sequence become
        end of turn and end of message.

    Raises:
      DataError: If llama.cpp has no such tokenizer, or would encode texts otherwise.
    """
    where = "the tokenizer in GGUF"
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    described = json.loads(backend.to_str()) if backend is not None else {"model": {}}
    model = described["model"]
    is_byte_level = '"ByteLevel"' in json.dumps(described.get("pre_tokenizer"))
    if model.get("type") != "BPE" or not (is_byte_level or model.get("byte_fallback")):
        raise DataError(
            f"{where}: llama.cpp reads byte-level BPE and SentencePiece-style BPE with byte"
            f" fallback, this one is {model.get('type', type(tokenizer).__name__)} of characters"
            " or words; export with --format=hf"
        )
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if is_byte_level else "llama",
        "tokenizer.ggml.pre": _split_name(backend, where) if is_byte_level else "default",
        **_token_table(tokenizer, vocab_size, model, is_byte_level),
        **_special_ids(tokenizer, end_token_ids, where),
    }
    if not is_byte_level:
        encoding: Any = backend
        pieces = tokenizer.convert_ids_to_tokens(encoding.encode("a", add_special_tokens=False).ids)
        fields["tokenizer.ggml.add_space_prefix"] = pieces[0].startswith("▁")
    if isinstance(tokenizer.chat_template, str):
        fields["tokenizer.chat_template"] = tokenizer.chat_template
    _check_read_back(tokenizer, fields, where)
    return fields


def _split_name(backend: Any, where: str) -> str:
    """llama.cpp's name of a pre-tokenizer, by how it splits texts."""
    candidates = {name: pre_tokenizers.Sequence(steps) for name, steps in _SPLITS.items()}
    texts = [_composed(text) for text in PROBES]

    def splits(pre_tokenizer: Any) -> list[list[str]]:
        return [[word for word, _ in pre_tokenizer.pre_tokenize_str(text)] for text in texts]

    expected = splits(backend.pre_tokenizer)
    for name, candidate in candidates.items():
        if splits(candidate) == expected:
            return name
    raise DataError(
        f"{where}: it splits texts into words as none of {', '.join(_SPLITS)}; export with"
        " --format=hf, and convert the folder with llama.cpp's convert_hf_to_gguf.py"
    )


def _token_table(
    tokenizer: Any, vocab_size: int, model: Mapping[str, Any], is_byte_level: bool
) -> dict[str, Any]:
    """Tokens, their types, and merges or scores."""
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges, start=1):
        scores.setdefault(left + right, float(-rank))
    single_score = float(-len(merges) - 1)
    tokens, types, token_scores = [], [], []
    for index in range(vocab_size):
        text = texts.get(index, f"[PAD{index}]")
        kind, score = _NORMAL, scores.get(text, single_score)
        if index not in texts:
            kind, score = _UNUSED, _ADDED_SCORE
        elif not is_byte_level and text == model.get("unk_token"):
            kind, score = _UNKNOWN, _ADDED_SCORE
        elif index in added:
            kind = _CONTROL if added[index].special or _looks_special(text) else _USER_DEFINED
            score = _ADDED_SCORE
        elif not is_byte_level and len(text) == 6 and text.startswith("<0x"):
            kind = _BYTE
        tokens.append(text)
        types.append(kind)
        token_scores.append(score)
    table: dict[str, Any] = {"tokens": tokens, "token_type": types}
    if is_byte_level:
        table["merges"] = [" ".join(pair) for pair in merges]
    else:
        table["scores"] = token_scores
    return {f"tokenizer.ggml.{key}": value for key, value in table.items()}


def _looks_special(text: str) -> bool:
    """Whether llama.cpp's converter takes an added token for a control token by its marks."""
    return (text.startswith("<|") and text.endswith("|>")) or text in ("<pad>", "<mask>")


def _special_ids(tokenizer: Any, end_token_ids: Sequence[int], where: str) -> dict[str, Any]:
    """Ids of the special tokens, and those that plain texts begin and end with."""
    fields: dict[str, Any] = {}
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = getattr(tokenizer, f"{role}_token_id")
        if index is not None:
            fields[f"{key}_token_id"] = index
    more_ends = [index for index in end_token_ids if index != tokenizer.eos_token_id]
    # llama.cpp also ends a response at tokens that it knows by their text, <|im_end|> for one.
    fields |= {f"{key}_token_id": i for key, i in zip(("eot", "eom"), more_ends, strict=False)}
    plain = tokenizer.backend_tokenizer.encode("a", add_special_tokens=False).ids
    ids = tokenizer.backend_tokenizer.encode("a", add_special_tokens=True).ids
    before = ids[: len(ids) - len(plain)] if ids[-len(plain) :] == plain else ids[:1]
    after = ids[len(before) + len(plain) :]
    if before not in ([], [tokenizer.bos_token_id]) or after not in ([], [tokenizer.eos_token_id]):
        raise DataError(
            f"{where}: it puts tokens {before} before and {after} after a text; llama.cpp only"
            " its bos_token and eos_token"
        )
    fields |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def _check_read_back(tokenizer: Any, fields: Mapping[str, Any], where: str) -> None:
    """Raises DataError if the fields give another encoding than the tokenizer."""
    backend = from_fields(fields, where).backend_tokenizer
    added = [
        token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    ]
    for probe in map(_composed, (*PROBES, *probes_with_tokens(added))):
        for with_special in (False, True):
            ids = backend.encode(probe, add_special_tokens=with_special).ids
            expected = tokenizer.backend_tokenizer.encode(
                probe, add_special_tokens=with_special
            ).ids
            if ids != expected:
                raise DataError(
                    f"{where}: {probe!r} would become {ids[:8]}, it is {expected[:8]}; export with"
                    " --format=hf"
                )


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)
