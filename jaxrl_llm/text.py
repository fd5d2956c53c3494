"""Text from outside: the one place that detects, replaces or rejects lone surrogates.

JSON can write half of a character (`"\\ud83d"`), and Python keeps it in a string that no file in
UTF-8, tokenizer or socket takes. Rows and requests that hold one are rejected by their readers;
texts that nobody can correct (tool results, calls that a policy wrote) are cleaned.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

MAX_DEPTH = 64  # brackets within brackets; Python's own limit differs between releases

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a string that UTF-8 can hold.

    >>> is_text("a"), is_text("\\ud83d"), is_text(None)
    (True, False, False)
    """
    if not isinstance(value, str):
        return False
    return value.isascii() or value.encode("utf-8", "ignore").decode() == value


def text_fault(value: Any, max_depth: int = MAX_DEPTH) -> tuple[list[str], str] | None:
    """The keys that lead to the first fault in a value, and the fault; None if there is none.

    Faults are half of a surrogate pair in a text or a key, and brackets deeper than `max_depth`.

    >>> text_fault({"a": ["b", "\\ud83d"]})
    (['a', '1'], 'contains a lone surrogate, which is not text')
    """
    message = "contains a lone surrogate, which is not text"
    children: Iterable[tuple[Any, Any]]
    pending: list[tuple[list[str], Any]] = [([], value)]
    while pending:
        keys, value = pending.pop()
        if isinstance(value, str):
            if not is_text(value):
                return keys, message
            continue
        if not isinstance(value, (Mapping, list, tuple)):
            continue
        if len(keys) >= max_depth:
            return keys[:3], f"holds brackets that are nested deeper than {max_depth}"
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, str) and not is_text(key):
                    return [*keys, ascii(key)], message
            children = value.items()
        else:
            children = enumerate(value)
        for key, each in children:
            if isinstance(each, str) and not is_text(each):
                return [*keys, str(key)], message
            if isinstance(each, (Mapping, list, tuple)):
                pending.append(([*keys, str(key)], each))
    return None


def clean_text(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair; whole characters stay.

    >>> clean_text("\\ud83d\\ude00") == "\\U0001f600", clean_text("a\\ud83d") == "a\\ufffd"
    (True, True)
    """
    if is_text(text):
        return text
    # Two halves that belong together become the character that they stand for.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def split_lines(text: str, keep_ends: bool = False) -> list[str]:
    r"""The lines of a text as JSON Lines has them: only a line feed ends one.

    `str.splitlines` also splits at U+2028, U+2029, U+0085 and others, which JSON may write as they
    are within a string.

    >>> split_lines("a\u2028b\nc\n"), split_lines("a\nb", keep_ends=True)
    (['a\u2028b', 'c'], ['a\n', 'b'])
    """
    lines = text.split("\n")
    complete, last = [line + "\n" for line in lines[:-1]] if keep_ends else lines[:-1], lines[-1]
    return [*complete, last] if last else complete


def clean_json(value: Any, max_depth: int = MAX_DEPTH) -> Any:
    """A JSON value with clean texts and keys; tuples become lists.

    Raises:
      ValueError: If brackets are nested deeper than `max_depth`.
    """
    if isinstance(value, str):
        return clean_text(value)
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if max_depth <= 0:
        raise ValueError(f"brackets are nested deeper than {MAX_DEPTH}")
    if isinstance(value, Mapping):
        return {
            clean_text(key) if isinstance(key, str) else key: clean_json(each, max_depth - 1)
            for key, each in value.items()
        }
    return [clean_json(each, max_depth - 1) for each in value]


def json_value(text: str | bytes) -> Any:
    """The value of a JSON text from outside, with clean strings, and None for NaN and infinities.

    >>> json_value(b'{"a": NaN, "b": 1e999, "c": 1}')
    {'a': None, 'b': None, 'c': 1}

    Raises:
      ValueError: If it is not JSON, not UTF-8, or its brackets are nested too deep.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")  # `json.loads` would guess the encoding, and take half pairs
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=lambda name: None)
    except RecursionError as error:
        raise ValueError(f"brackets are nested deeper than {MAX_DEPTH}") from error
    may_be_deep = text.count("[") + text.count("{") > MAX_DEPTH
    return clean_json(value) if may_be_deep or "\\u" in text else value


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None
