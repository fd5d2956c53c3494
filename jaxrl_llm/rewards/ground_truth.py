"""Ground truths of rows as text, whatever type the file has.

Each reader raises a ValueError that names the rule. `check_truth` of a reward function, which
`truth_checks.py` calls on every row before a run, is made of these readers.
"""

import decimal
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import numpy as np

# Texts that tools write for a missing value. "None" may be a word of a text, so only readers of
# numbers and expressions reject these.
_PLACEHOLDERS = frozenset(
    {"", "none", "null", "nil", "nan", "<na>", "nat", "n/a", "na", "-", "--", "?", "inf", "-inf"}
)
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?")
_MINUS = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{FULLWIDTH HYPHEN-MINUS}": "-"}
)

Function = TypeVar("Function", bound=Callable[..., Any])


class TruthCheck(Protocol):
    """Checks a ground truth; ValueError, with the rule, if no answer can be compared with it."""

    def __call__(self, ground_truth: Any, /) -> Any: ...


def checks_truth(check: TruthCheck) -> Callable[[Function], Function]:
    """Decorator of a reward function: `check` becomes its attribute `check_truth`."""

    def decorated(function: Function) -> Function:
        cast(Any, function).check_truth = check
        return function

    return decorated


def is_number(value: Any) -> bool:
    """Whether a value of a file is a number; booleans are not.

    >>> is_number(7), is_number(True), is_number("7")
    (True, False, False)
    """
    numbers = (int, float, decimal.Decimal, np.integer, np.floating)
    return isinstance(value, numbers) and not isinstance(value, bool)


def decimal_text(value: Any) -> str:
    """A number in decimal notation: all digits, no exponent, no trailing zeros of a fraction.

    >>> decimal_text(72.0), decimal_text(0.00001), decimal_text(10**12)
    ('72', '0.00001', '1000000000000')

    Raises:
      ValueError: If it is not finite, or has more digits than Python prints.
    """
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    number = value if isinstance(value, decimal.Decimal) else decimal.Decimal(str(value))
    if not number.is_finite():
        raise ValueError(f"got {value}, which is not a value; ground_truth must be a finite number")
    text = f"{number:f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def answer_text(truth: Any, rule: str) -> str:
    """A truth that is one number or one text, as stripped text.

    >>> answer_text(" 72 ", "a number"), answer_text(72, "a number")
    ('72', '72')

    Raises:
      ValueError: If it is neither, or stands for a missing value; `rule` names the valid values.
    """
    if is_number(truth):
        return decimal_text(truth)
    if not isinstance(truth, str):
        raise ValueError(f"got {_value_text(truth)}; ground_truth must be {rule}")
    if truth.strip().lower() in _PLACEHOLDERS:
        raise ValueError(f"got {truth!r}, which stands for no value; ground_truth must be {rule}")
    return truth.strip()


def number_texts(truth: Any) -> frozenset[str]:
    """The accepted spellings of the number of a GSM8K truth, without commas.

    A text may have thousands separators, a dollar sign, and `####` before it, as GSM8K's own
    answers have.

    >>> sorted(number_texts(" 1,234 ")), sorted(number_texts("72.0")), sorted(number_texts(72.0))
    (['1234'], ['72', '72.0'], ['72'])

    Raises:
      ValueError: If it is not a number.
    """
    rule = "one number, such as 72 or '1,234'"
    text = answer_text(truth, rule).rpartition("####")[2].strip().translate(_MINUS)
    sign, _, rest = text.rpartition("$")
    text = (sign + rest if sign in ("", "-") else text).strip()
    if not _NUMBER.fullmatch(text) or not re.search("[0-9]", text):
        raise ValueError(f"got {_value_text(truth)}; ground_truth must be {rule}")
    text = text.replace(",", "").removeprefix("+")
    # The original text as well: a truth of 72.0 may expect that form.
    return frozenset({text, decimal_text(decimal.Decimal(text))})


def alternative_texts(truth: Any) -> list[str]:
    """The alternative correct answers of a truth: one, a list, or a mapping with `target`.

    >>> alternative_texts(7), alternative_texts({"target": ["Rome", "Roma"]})
    (['7'], ['Rome', 'Roma'])

    Raises:
      ValueError: If there is none, or one is neither a text nor a number.
    """
    rule = "a text, a number, or a list of them (or a mapping with such a list as 'target')"
    target = truth.get("target") if isinstance(truth, dict) else truth
    target = target.tolist() if isinstance(target, np.ndarray) else target
    texts = []
    for value in target if isinstance(target, (list, tuple)) else [target]:
        if is_number(value):
            texts.append(decimal_text(value))
        elif isinstance(value, str) and value.strip():
            texts.append(value)
        else:
            raise ValueError(f"got {_value_text(truth)}; ground_truth must be {rule}")
    if not texts:
        raise ValueError(f"got {_value_text(truth)}; ground_truth must be {rule}")
    return texts


def _value_text(truth: Any) -> str:
    return f"{truth!r:.60}" if truth is None else f"{type(truth).__name__} {truth!r:.60}"
