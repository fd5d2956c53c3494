"""Mathematical answers, compared by value: 1/2, 0.5 and \\frac{1}{2} are the same.

docs/answers.md lists the forms of answers with their verdicts.
"""

import dataclasses
import fractions
import functools
import re
import threading
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from jaxrl_llm.rewards.answers import (
    MAX_ANSWER_CHARACTERS,
    Reading,
    final_answer,
    read_answer,
)
from jaxrl_llm.rewards.functions import Info
from jaxrl_llm.rewards.ground_truth import answer_text, checks_truth

# The library drops an expression that takes longer than this, in seconds. It does so by a signal,
# which works in the main thread of a process only: there the pool makes its calls.
EXPRESSION_TIMEOUT_S = 2
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)")
_RULE = "a number, or LaTeX without delimiters"


@dataclasses.dataclass(frozen=True)
class MathOptions:
    """How answers are compared; `rewards.math` of the config, or `extra_info` of a row."""

    percent: str = "either"
    units: str = "ignore"
    unboxed_letters: bool = True

    @classmethod
    def from_info(cls, info: Info) -> "MathOptions":
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: info[name] for name in names if name in info})


@functools.lru_cache(maxsize=4096)
def _target(text: str) -> Reading:
    """The ground truth of a text; ValueError if it is none."""
    boxed = final_answer(text) if "\\boxed" in text else None
    reading = read_answer(boxed.text if boxed else text)
    expression = reading.expression
    if reading.choice or reading.words or _value(expression) is not None:
        return reading
    if not expression or not _parsed(expression):
        raise ValueError(f"got ground truth {text!r:.60}; ground_truth must be {_RULE}")
    return reading


def read_truth(ground_truth: Any) -> Reading:
    """The ground truth of a row.

    Raises:
      ValueError: If it is no mathematical expression.
    """
    if isinstance(ground_truth, str) and not ground_truth.strip():
        raise ValueError(f"got ground truth {ground_truth!r}; ground_truth must be {_RULE}")
    return _target(answer_text(ground_truth, _RULE))


@checks_truth(read_truth)
def math_answer(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info) -> dict:
    """Returns 1.0 as `score` if the final answer has the value of the ground truth, else 0.0.

    A boxed answer counts first, then one in `<answer>`, after `####` or "the answer is", then a
    formula or number at the end of the text. Several different boxed answers are one set, so that a
    second guess is no help. An answer that cannot be read, or takes too long to compare, is wrong.
    The ground truth is a number or LaTeX without delimiters; ValueError if it cannot be read.
    `extra_info` may have the options of `rewards.math`: `percent`, `units`, `unboxed_letters`.
    """
    target, options = read_truth(ground_truth), MathOptions.from_info(extra_info)
    answer = final_answer(solution_str)
    if not answer.text or len(answer.text) > MAX_ANSWER_CHARACTERS:
        return {"score": 0.0, "pred": ""}
    reading = read_answer(answer.text)
    letters = answer.boxed or options.unboxed_letters
    right = _equal(target, reading, options, letters)
    return {"score": float(right), "pred": _text(reading)}


def _equal(target: Reading, answer: Reading, options: MathOptions, letters: bool) -> bool:
    if options.units == "compare" and _unit(target) != _unit(answer):
        return False
    if target.choice:
        return letters and target.choice == answer.choice
    if target.words or answer.words:
        return target.words == answer.words
    if options.percent == "fraction" or target.percent == answer.percent:
        divide = options.percent == "fraction"
        sides = [_scaled(each, divide and each.percent) for each in (target, answer)]
        return _same_value(*sides)
    if _same_value(target.expression, answer.expression):
        return True
    if options.percent == "number":
        return False
    return _same_value(*(_scaled(each, each.percent) for each in (target, answer)))


def _unit(reading: Reading) -> str:
    return re.sub(r"[^a-z0-9$/^]", "", reading.unit.lower())


def _scaled(reading: Reading, is_hundredth: bool) -> str:
    return rf"\frac{{{reading.expression}}}{{100}}" if is_hundredth else reading.expression


def _value(expression: str) -> fractions.Fraction | None:
    """The exact value of a number in digits, also of a hundredth of one."""
    hundredth = re.fullmatch(r"\\frac\{(.*)\}\{100\}", expression)
    text = hundredth[1] if hundredth else expression
    if not _NUMBER.fullmatch(text) or len(text) > MAX_ANSWER_CHARACTERS:
        return None
    value = fractions.Fraction(text.replace(",", ""))
    return value / 100 if hundredth else value


def _same_value(target: str, answer: str) -> bool:
    """Whether two expressions have one value; numbers in digits are compared digit by digit."""
    if target.replace(" ", "") == answer.replace(" ", ""):
        return True
    values = _value(target), _value(answer)
    if None not in values:
        return values[0] == values[1]
    first, second = _parsed(target), _parsed(answer)
    return bool(first and second) and verify(first, second, timeout_seconds=_timeout())


def _timeout() -> int | None:
    is_main = threading.current_thread() is threading.main_thread()
    return EXPRESSION_TIMEOUT_S if is_main else None


@functools.lru_cache(maxsize=1024)
def _parsed(expression: str) -> list[Any]:
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    return parse(f"\\boxed{{{expression}}}", configs, parsing_timeout=_timeout())


def _text(reading: Reading) -> str:
    """The same text for equal answers, as far as the library simplifies them."""
    if reading.words or reading.choice:
        return reading.words or reading.choice
    percent = "%" if reading.percent else ""
    parsed = _parsed(reading.expression)
    try:
        return f"{parsed[0]}{percent}" if parsed else reading.expression + percent
    except ValueError:  # an integer of more digits than Python prints
        return f"{parsed[-1]}{percent}"
