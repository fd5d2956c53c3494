"""One line of a JSON lines file: its value, or the column of what is wrong with it."""

import json
import math
import re
import sys
from typing import Any

MAX_DEPTH = 64  # brackets within brackets; Python's own bound differs from release to release

_TOKEN = re.compile(
    r'(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:)?'
    r"|(?P<opening>[\[{])|(?P<closing>[\]}])|-?(?:NaN|Infinity)|-?\d[\d.eE+-]*"
)


class JsonError(ValueError):
    """A line is no JSON that can be used; the text says in which column, why, and what to do."""


def parse(line: bytes) -> Any:
    """Returns the value of one line in UTF-8; a byte order mark before it is skipped.

    Raises:
      JsonError: not UTF-8, no JSON, a key twice in one object, a number that no float holds, or
        brackets deeper than `MAX_DEPTH`.
    """
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode(errors="replace")) + 1
        raise JsonError(f"in column {column}: {error.reason}; save the file as UTF-8") from error
    if text.count("{") + text.count("[") > MAX_DEPTH and "deeper" in (fault := _fault(text)):
        raise JsonError(fault)
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        rule = "each line must hold one whole JSON object"
        raise JsonError(f"in column {error.colno}: {error.msg}; {rule}") from error
    except ValueError as error:
        raise JsonError(_fault(text)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _float(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError("too large")
    return value


# What it refuses with a ValueError of no column, `_fault` finds.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=int)


def _fault(text: str) -> str:
    """Returns column, reason and remedy of the first thing that is JSON and still refused."""
    open_keys: list[set[str]] = []  # of each bracket that is open
    for token in _TOKEN.finditer(text):
        word, at = token[0], f"in column {token.start() + 1}: "
        if token["opening"]:
            open_keys.append(set())
            if len(open_keys) > MAX_DEPTH:
                return f"{at}brackets deeper than {MAX_DEPTH}; write what they hold as a text"
        elif token["closing"]:
            open_keys = open_keys[:-1]
        elif token["colon"] and open_keys:
            if (key := json.loads(token["text"], strict=False)) in open_keys[-1]:
                return f"{at}the key {key!r:.60} a second time in one object; keep one of them"
            open_keys[-1].add(key)
        elif token["text"]:
            continue
        elif word.endswith(("NaN", "Infinity")):
            return f"{at}{word} is no number of JSON; write null or a text"
        elif word.removeprefix("-").isdigit():
            if len(word) > sys.get_int_max_str_digits():
                return f"{at}an integer of {len(word)} digits; write it as a text"
        elif math.isinf(float(word)):
            return f"{at}{word:.40} is more than a float holds; write it as a text"
    return "no JSON"
