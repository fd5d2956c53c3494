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
    ParsedAnswer,
    final_answer,
    parse_answer,
)
from jaxrl_llm.rewards.functions import ExtraInfo
from jaxrl_llm.rewards.ground_truth import answer_text, checks_truth

# Seconds after which the library gives up on an expression. It uses a signal, which works only in
# the main thread of a process; the pool makes its calls there.
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
    def from_info(cls, info: ExtraInfo) -> "MathOptions":
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: info[name] for name in names if name in info})


@functools.lru_cache(maxsize=4096)
def _parsed_truth(text: str) -> ParsedAnswer:
    """The parsed ground truth of a text; ValueError if it cannot be read."""
    boxed = final_answer(text) if "\\boxed" in text else None
    reading = parse_answer(boxed.text if boxed else text)
    expression = reading.expression
    if reading.choice or reading.words or _value(expression) is not None:
        return reading
    if not expression or not _parsed_expressions(expression):
        raise ValueError(f"got ground truth {text!r:.60}; ground_truth must be {_RULE}")
    return reading


def parse_ground_truth(ground_truth: Any) -> ParsedAnswer:
    """The parsed ground truth of a row.

    Raises:
      ValueError: If it is not a mathematical expression.
    """
    if isinstance(ground_truth, str) and not ground_truth.strip():
        raise ValueError(f"got ground truth {ground_truth!r}; ground_truth must be {_RULE}")
    return _parsed_truth(answer_text(ground_truth, _RULE))


@checks_truth(parse_ground_truth)
def math_answer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo
) -> dict:
    """1.0 as `score` if the final answer has the value of the ground truth, else 0.0.

    A boxed answer counts first, then one in `<answer>`, after `####` or "the answer is", then a
    formula or number at the end of the text. Several different boxed answers form one set, so that
    guessing twice does not help. An answer that cannot be read, or takes too long to compare, is
    wrong. The ground truth is a number or LaTeX without delimiters; ValueError if it is unreadable.
    `extra_info` may have the options of `rewards.math`: `percent`, `units`, `unboxed_letters`.
    """
    target, options = parse_ground_truth(ground_truth), MathOptions.from_info(extra_info)
    answer = final_answer(solution_str)
    if not answer.text or len(answer.text) > MAX_ANSWER_CHARACTERS:
        return {"score": 0.0, "pred": ""}
    reading = parse_answer(answer.text)
    accepts_letters = answer.boxed or options.unboxed_letters
    is_correct = _is_equal(target, reading, options, accepts_letters)
    return {"score": float(is_correct), "pred": _canonical_text(reading)}


def _is_equal(
    target: ParsedAnswer, answer: ParsedAnswer, options: MathOptions, accepts_letters: bool
) -> bool:
    if options.units == "compare" and _normalized_unit(target) != _normalized_unit(answer):
        return False
    if target.choice:
        return accepts_letters and target.choice == answer.choice
    if target.words or answer.words:
        return target.words == answer.words
    if options.percent == "fraction" or target.percent == answer.percent:
        divide = options.percent == "fraction"
        sides = [_scaled_expression(side, divide and side.percent) for side in (target, answer)]
        return _same_value(*sides)
    if _same_value(target.expression, answer.expression):
        return True
    if options.percent == "number":
        return False
    return _same_value(*(_scaled_expression(side, side.percent) for side in (target, answer)))


def _normalized_unit(reading: ParsedAnswer) -> str:
    return re.sub(r"[^a-z0-9$/^]", "", reading.unit.lower())


def _scaled_expression(reading: ParsedAnswer, is_hundredth: bool) -> str:
    return rf"\frac{{{reading.expression}}}{{100}}" if is_hundredth else reading.expression


def _value(expression: str) -> fractions.Fraction | None:
    """The exact value of a decimal number, or of one divided by 100; None for other expressions."""
    hundredth = re.fullmatch(r"\\frac\{(.*)\}\{100\}", expression)
    text = hundredth[1] if hundredth else expression
    if not _NUMBER.fullmatch(text) or len(text) > MAX_ANSWER_CHARACTERS:
        return None
    value = fractions.Fraction(text.replace(",", ""))
    return value / 100 if hundredth else value


def _same_value(target: str, answer: str) -> bool:
    """Whether two expressions have the same value; decimal numbers are compared exactly."""
    if target.replace(" ", "") == answer.replace(" ", ""):
        return True
    values = _value(target), _value(answer)
    if None not in values:
        return values[0] == values[1]
    first, second = _parsed_expressions(target), _parsed_expressions(answer)
    return bool(first and second) and verify(first, second, timeout_seconds=_timeout_s())


def _timeout_s() -> int | None:
    is_main = threading.current_thread() is threading.main_thread()
    return EXPRESSION_TIMEOUT_S if is_main else None


@functools.lru_cache(maxsize=1024)
def _parsed_expressions(expression: str) -> list[Any]:
    configs = [LatexExtractionConfig(), ExprExtractionConfig()]
    return parse(f"\\boxed{{{expression}}}", configs, parsing_timeout=_timeout_s())


def _canonical_text(reading: ParsedAnswer) -> str:
    """A text that is equal for equal answers, as far as the library simplifies them."""
    if reading.words or reading.choice:
        return reading.words or reading.choice
    percent = "%" if reading.percent else ""
    expressions = _parsed_expressions(reading.expression)
    try:
        return f"{expressions[0]}{percent}" if expressions else reading.expression + percent
    except ValueError:  # an integer with more digits than Python prints
        return f"{expressions[-1]}{percent}"
