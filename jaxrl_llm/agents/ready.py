"""Tools that come with the project: a calculator, Python in a sandbox, search in a corpus."""

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

from jaxrl_llm.processes.sandbox import Limits, Session

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
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "floor")},
    **{"ceil": math.ceil, "abs": abs, "round": round, "min": min, "max": max},
}
_MAX_CHARACTERS = 1024
_MAX_BITS = 4096  # of an integer


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
    value = _value(ast.parse(text, mode="eval").body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.AST) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in _BINARY:
            left, right = _value(left), _value(right)
            if isinstance(operation, ast.Pow) and _bits(left) * abs(right) > _MAX_BITS:
                raise ValueError("the power is too large")
            result = _BINARY[type(operation)](left, right)
            if _bits(result) > _MAX_BITS:
                raise ValueError("the number is too large")
            return result
        case ast.UnaryOp(operation, operand) if type(operation) in _UNARY:
            return _UNARY[type(operation)](_value(operand))
        case ast.Name(name) if name in _NAMES:
            return _NAMES[name]
        case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 64


class Python:
    """An interpreter of an episode: what one call defines, the next one sees."""

    def __init__(self, wall_s: float = 5.0, memory_gib: float = 1.0):
        self._limits = Limits(wall_s=wall_s, cpu_s=wall_s, memory_gib=memory_gib)
        self._session: Session | None = None

    def python(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last line.

        Args:
            code: The code. Names that earlier calls have defined are known.

        Returns:
            What was printed, or the error.
        """
        if self._session is None or self._session.ended:
            self._session = Session(self._limits)
        return self._session.run(code)


class Search:
    """Finds passages of a corpus by their words (BM25)."""

    def __init__(self, corpus: str):
        self._passages, self._index = index(corpus)

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
        words = bm25s.tokenize([query], stopwords="en", show_progress=False)
        found, scores = self._index.retrieve(words, k=count, show_progress=False)
        pairs = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        best = [self._passages[number] for number, score in pairs if score > 0]
        return "\n\n".join(f"[{i}] {text}" for i, text in enumerate(best, 1)) or "nothing found"


def _bm25s() -> Any:
    """Returns the package `bm25s`, kept from starting jax: its threads do not survive a fork."""
    if "bm25s" not in sys.modules and "jax" not in sys.modules:
        sys.modules["jax"] = None  # type: ignore[assignment]
        try:
            return importlib.import_module("bm25s")
        finally:
            del sys.modules["jax"]
    return importlib.import_module("bm25s")


@functools.cache
def index(corpus: str) -> tuple[list[str], Any]:
    """Returns the passages of a file and what finds them; ValueError if it cannot be read.

    The file holds JSON lines with `text` (or `contents`) and, if wanted, `title`.
    """
    bm25s = _bm25s()
    passages = []
    for number, line in enumerate(pathlib.Path(corpus).read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row.get("text", row.get("contents"))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{corpus}, line {number}: no JSON object: {error}") from error
        if not isinstance(text, str):
            raise ValueError(f"{corpus}, line {number}: no `text`, only {sorted(row)}")
        passages.append(f"{row['title']}\n{text}" if row.get("title") else text)
    if not passages:
        raise ValueError(f"{corpus}: no line with a passage")
    made = bm25s.BM25()
    made.index(bm25s.tokenize(passages, stopwords="en", show_progress=False), show_progress=False)
    return passages, made
