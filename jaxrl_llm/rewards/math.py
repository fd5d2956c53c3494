"""Mathematical answers, compared by value: 1/2, 0.5 and \\frac{1}{2} are the same."""

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from jaxrl_llm.rewards.functions import Info

# The library drops an expression that takes longer than this, in seconds. It does so by a signal,
# which works in the main thread of a process only: there the pool makes its calls.
EXPRESSION_TIMEOUT_S = 2


def math_answer(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info) -> dict:
    """Returns 1.0 as `score` if the final answer has the value of the ground truth, else 0.0.

    A boxed answer counts first, then LaTeX, then a plain expression near the end of the text.
    Several different boxed answers are one set, so that a second guess is no help. An answer that
    cannot be read, or takes too long to compare, is wrong. The ground truth is a number or LaTeX
    without delimiters; ValueError if it cannot be read.
    """
    limit = {"parsing_timeout": EXPRESSION_TIMEOUT_S}
    target = parse(f"\\boxed{{{ground_truth}}}", [LatexExtractionConfig()], **limit)
    if not target:
        raise ValueError(f"ground truth {ground_truth!r} is no mathematical expression")
    answer = parse(solution_str, [LatexExtractionConfig(), ExprExtractionConfig()], **limit)
    right = verify(target, answer, timeout_seconds=EXPRESSION_TIMEOUT_S)
    return {"score": float(right), "pred": _text(answer)}


def _text(answer: list[Any]) -> str:
    """Returns the same text for equal answers, as far as the library simplifies them."""
    try:
        return str(answer[0]) if answer else ""
    except ValueError:  # an integer of more digits than Python prints
        return str(answer[-1])
