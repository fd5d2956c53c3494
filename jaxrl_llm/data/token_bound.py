"""A lower bound of a text's number of tokens, far faster than tokenizing.

It is 0 for a tokenizer that may drop characters, or whose tokens may stand for any number of them.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

# NFC and NFKC compose at most four characters into one.
_LARGEST_COMPOSITION = 4
_KEEP_ALL = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")


def token_bound(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """Returns a function from a text to a lower bound of its number of tokens.

    A token has at most as many characters as the longest in the vocabulary, if nothing drops or
    joins characters before. White space does not count: added tokens may take any amount of it.
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


def _num_characters(text: str) -> int:  # without white space
    return sum(map(len, text.split()))


def _normalizer_shrinks(normalizer: Mapping[str, Any] | None) -> int:
    """Returns the largest factor by which a normalizer may shorten a text; 0: any factor."""
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
    """Returns whether the split of a text into words drops nothing but white space."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(map(_pre_tokenizer_keeps, pre_tokenizer["pretokenizers"]))
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return kind in (*_KEEP_ALL, "WhitespaceSplit", "Whitespace", "BertPreTokenizer")


def _model_keeps(described: Mapping[str, Any]) -> bool:
    """Returns whether every character becomes part of a token of the vocabulary."""
    model = described["model"]
    if model["type"] != "BPE":  # in others one token may stand for any unknown word
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
