"""A lower bound of the tokens that a text has, without the seconds that tokenizing takes.

Where nothing can be proved of a tokenizer (it drops characters, or one token may stand for any
number of them) the bound is 0.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

# One character of canonically composed text is made of at most four.
_LARGEST_COMPOSITION = 4
_KEEP_ALL = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")


def token_bound(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """Returns the function from a text to a number of tokens that it has at least.

    Each token has at most as many characters as the longest in the vocabulary, if nothing drops or
    joins characters before. White space is not counted: added tokens may take any amount of it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: 0
    described = json.loads(backend.to_str())
    shrinks = _normalizer_shrinks(described["normalizer"])
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    kept = _pre_tokenizer_keeps(described["pre_tokenizer"])
    if not (longest and shrinks and kept and _model_keeps(described)):
        return lambda text: 0

    def bound(text: str) -> int:
        per_token = longest * (1 if text.isascii() else shrinks)
        return -(-_num_characters(text) // per_token)

    return bound


def _num_characters(text: str) -> int:
    """Returns how many characters are not white space."""
    return sum(map(len, text.split()))


def _normalizer_shrinks(normalizer: Mapping[str, Any] | None) -> int:
    """Returns by what factor a normalizer may shorten a text at most; 0: any."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        return math.prod(map(_normalizer_shrinks, normalizer["normalizers"]))
    if kind in ("NFC", "NFKC"):
        return _LARGEST_COMPOSITION
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return int(bool(pattern) and _num_characters(pattern) <= _num_characters(content))
    return int(kind in ("Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel"))


def _pre_tokenizer_keeps(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Returns whether no character but white space is dropped between the pieces of a text."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(map(_pre_tokenizer_keeps, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return kind in (*_KEEP_ALL, "WhitespaceSplit", "Whitespace", "BertPreTokenizer")


def _model_keeps(described: Mapping[str, Any]) -> bool:
    """Returns whether every character becomes a part of a token that the vocabulary names."""
    model = described["model"]
    if model["type"] != "BPE":  # others stand for any unknown word or run by one token
        return False
    if _has(described["pre_tokenizer"], "ByteLevel") or _has(described["normalizer"], "ByteLevel"):
        return all(character in model["vocab"] for character in ByteLevel.alphabet())
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return model.get("unk_token") is not None and not model.get("fuse_unk")


def _has(part: Mapping[str, Any] | None, kind: str) -> bool:
    if part is None:
        return False
    parts = part.get("pretokenizers", part.get("normalizers", ()))
    return part["type"] == kind or any(_has(each, kind) for each in parts)
