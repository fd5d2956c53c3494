"""Built-in tools: a calculator, Python in a sandbox, BM25 search in a corpus."""

import ast
import functools
import importlib
import json
import math
import operator
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.processes.sandbox import InterpreterSession, SandboxLimits
from jaxrl_llm.text import split_lines

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_NAMES: Mapping[str, float] = {"pi": math.pi, "e": math.e}
_MAX_CHARACTERS = 1024
_MAX_DIGITS = (
    1300  # before or after the decimal point; no number that passes `_check_printable` has more
)
_MAX_BITS = 4096  # of an integer, bounds time and memory of powers


def calculator(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, brackets, pi, e, sqrt, exp, log, sin, cos, tan, floor,
            ceil, abs, round, min and max, for example "(3 + 4) * 12".

    Returns:
        The value.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has over {_MAX_CHARACTERS} characters")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (RecursionError, MemoryError) as error:  # Python's parser raises either
        raise ValueError("the expression is nested too deeply") from error
    except OverflowError as error:
        raise ValueError("the number is too large") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_printable(number)
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            left, right = _value(left), _value(right)
            are_integers = isinstance(left, int) and isinstance(right, int)
            if (
                isinstance(operation, ast.Pow)
                and are_integers
                and abs(left) > 1
                and (left.bit_length() - 1) * right
                > _MAX_BITS  # a lower bound of the bits of the power
            ):
                raise ValueError("the power is too large")
            return _check_printable(_BINARY[type(operation)](left, right))
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            return _UNARY[type(operation)](_value(operand))
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return _check_printable(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")


def _check_printable(number: Any) -> Any:
    """Returns the number; ValueError if it is not real, not finite, or too large to print."""
    if isinstance(number, complex) or number != number or abs(number) == math.inf:
        raise ValueError("the value is not a real number, or is too large")
    if isinstance(number, int) and number.bit_length() > _MAX_BITS:
        raise ValueError("the number is too large")
    return number


def _round(number: Any, digits: Any = None) -> Any:
    """Python's `round`, which never returns for absurdly many digits."""
    if digits is not None and abs(digits) > _MAX_DIGITS:
        raise ValueError(f"round: {digits} digits; at most {_MAX_DIGITS} before or after the point")
    return round(number, digits)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "floor")},
    **{"ceil": math.ceil, "abs": abs, "round": _round, "min": min, "max": max},
}


class Python:
    """A Python interpreter per episode: names that one call defines are visible to the next."""

    def __init__(self, wall_s: float = 5.0, memory_gib: float = 1.0):
        self._limits = SandboxLimits(wall_s=wall_s, cpu_s=wall_s, memory_gib=memory_gib)
        self._session: InterpreterSession | None = None

    def python(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last line.

        Args:
            code: The code. Names that earlier calls have defined are known.

        Returns:
            What was printed, or the error.
        """
        if self._session is None or self._session.has_ended:
            self._session = InterpreterSession(self._limits)
        return self._session.run(code)


class Search:
    """Finds passages of a corpus by their words (BM25)."""

    def __init__(self, corpus: str):
        self._passages, self._index = bm25_index(corpus)

    def search(self, query: str, num_results: int = 3) -> str:
        """Searches the corpus and returns the best passages.

        Args:
            query: What to look for, in a few words.
            num_results: How many passages, at most 10.

        Returns:
            The passages, the best first.
        """
        bm25s = _bm25s()
        count = max(1, min(int(num_results), 10, len(self._passages)))
        query_tokens = bm25s.tokenize([query], stopwords="en", show_progress=False)
        hits, scores = self._index.retrieve(query_tokens, k=count, show_progress=False)
        ranking = zip(hits[0].tolist(), scores[0].tolist(), strict=True)
        best = [self._passages[number] for number, score in ranking if score > 0]
        return "\n\n".join(f"[{i}] {text}" for i, text in enumerate(best, 1)) or "nothing found"


def _bm25s() -> Any:
    """The package `bm25s`, imported without jax, whose threads do not survive a fork."""
    if "bm25s" not in sys.modules and "jax" not in sys.modules:
        sys.modules["jax"] = None  # type: ignore[assignment]
        try:
            return importlib.import_module("bm25s")
        finally:
            del sys.modules["jax"]
    return importlib.import_module("bm25s")


@functools.cache
def bm25_index(corpus: str) -> tuple[list[str], Any]:
    """The passages of a corpus file and their BM25 index; ValueError if it cannot be read.

    The file holds JSON lines with `text` (or `contents`) and optionally `title`.
    """
    bm25s = _bm25s()
    passages = []
    try:
        lines = split_lines(pathlib.Path(corpus).read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{corpus}: is not UTF-8: {error}; convert it") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row.get("text", row.get("contents"))
        except (ValueError, AttributeError, RecursionError) as error:
            too_deep = "brackets are nested too deep"
            problem = too_deep if isinstance(error, RecursionError) else error
            raise ValueError(f"{corpus}, line {number}: no JSON object: {problem}") from error
        if not isinstance(text, str):
            raise ValueError(f"{corpus}, line {number}: no `text`, only {sorted(row)}")
        passages.append(f"{row['title']}\n{text}" if row.get("title") else text)
    if not passages:
        raise ValueError(f"{corpus}: no line with a passage")
    passage_tokens = bm25s.tokenize(passages, stopwords="en", show_progress=False)
    if not any(passage_tokens.ids):
        raise ValueError(
            f"{corpus}: none of its {len(passages)} passages contains a searchable word; words of"
            " one letter and English stop words are not; use another corpus"
        )
    bm25_index = bm25s.BM25()
    bm25_index.index(passage_tokens, show_progress=False)
    return passages, bm25_index
