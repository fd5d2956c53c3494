"""One line of a JSON lines file: its value, or the column of its first error."""

import json
import math
import re
import sys
from typing import Any

MAX_DEPTH = 64  # brackets within brackets; Python's limit differs between releases

_TOKEN = re.compile(
    r'(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:)?'
    r"|(?P<opening>[\[{])|(?P<closing>[\]}])|-?(?:NaN|Infinity)|-?\d[\d.eE+-]*"
)


def parse(line: bytes) -> Any:
    """Returns the value of one line; a byte order mark before it is skipped.

    Raises:
      ValueError: It is not UTF-8 or not JSON, an object has a key twice, a float cannot hold a
        number, or brackets are deeper than `MAX_DEPTH`; with column, reason and remedy.
    """
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode(errors="replace")) + 1
        raise ValueError(f"in column {column}: {error.reason}; save the file as UTF-8") from error
    if text.count("{") + text.count("[") > MAX_DEPTH and "deeper" in (fault := _fault(text)):
        raise ValueError(fault)
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        rule = "each line must hold one whole JSON object"
        raise ValueError(f"in column {error.colno}: {error.msg}; {rule}") from error
    except ValueError as error:
        raise ValueError(_fault(text)) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key twice")
    return found


def _float(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError("too large")
    return value


# Its own functions raise a ValueError without a column; `_fault` finds the column.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=int)


def _fault(text: str) -> str:
    """Returns column, reason and remedy of the first thing that is JSON but refused here."""
    open_keys: list[set[str]] = []  # keys of each open bracket
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
