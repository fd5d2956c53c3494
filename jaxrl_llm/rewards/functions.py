"""Built-in reward functions, and the lookup of users' own.

Each is `f(data_source, solution_str, ground_truth, extra_info)` and returns a number, or a dict
with `score` and other values to log; maj@k votes on `pred`, the answer in the solution. Worker
processes import this module, so it must not import jax.
"""

import inspect
import re
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.algorithms import lookup
from jaxrl_llm.errors import check_package
from jaxrl_llm.rewards import ground_truth as truths
from jaxrl_llm.rewards.ground_truth import TruthCheck, checks_truth

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
ExtraInfo = Mapping[str, Any]
RewardResult = float | Mapping[str, Any]
RewardFunction = Callable[..., RewardResult | Awaitable[RewardResult]]


def _expected_text(truth: Any) -> str:
    return truths.answer_text(truth, "a number or a text")


@checks_truth(_expected_text)
def arithmetic(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo
) -> dict:
    """1.0 as `score` if all text after the first `#` is the ground truth, else 0.0.

    White space around both is ignored, and a numeric ground truth is formatted as the task writes
    it. A policy can neither guess twice nor ramble on. In an episode with tools or an environment
    the policy's last turn counts.
    """
    expected = _expected_text(ground_truth)
    if messages := extra_info.get("messages"):
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        solution_str = turns[-1] if turns else ""
    _, _, answer = solution_str.partition("#")
    return {"score": float(answer.strip() == expected), "pred": answer.strip()}


@checks_truth(truths.number_texts)
def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo) -> dict:
    """1.0 as `score` if the last `#### number` is the ground truth, else 0.0.

    Only the last 300 characters count. Commas are dropped; then the texts must be equal, as in
    verl: neither `12.0` nor `12.` at the end of a sentence is `12`. The ground truth may be a
    number, or the text of one: 72, 72.0, " 72", "1,234" (`ground_truth.number_texts`).
    """
    accepted = truths.number_texts(ground_truth)
    numbers = re.findall(r"#### (-?[0-9.,]+)", solution_str[-300:])
    answer = numbers[-1].replace(",", "") if numbers else ""
    return {"score": float(bool(numbers) and answer in accepted), "pred": answer}


@checks_truth(truths.alternative_texts)
def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo
) -> dict:
    """1.0 as `score` if the answer equals one in the ground truth, else 0.0.

    The answer is the text in the last `<answer>...</answer>`. It is compared as in SQuAD (arXiv
    1606.05250): without case, punctuation, articles and repeated spaces. The ground truth is a
    text, a number, a list of them, or a mapping with such a list as `target` (Search-R1's rows).
    Numbers keep sign and point: -5 is not 5. Where nothing of a text would remain (the choice
    "A"), only case and spaces are ignored.
    """
    tagged_answers = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    answer = _normalized(tagged_answers[-1]) if tagged_answers else ""
    accepted = [] if ground_truth is None else truths.alternative_texts(ground_truth)
    is_correct = bool(answer) and answer in {_normalized(text) for text in accepted}
    return {"score": float(is_correct), "pred": answer}


def _normalized(text: str) -> str:
    if re.fullmatch(r"\s*[-+]?[0-9][0-9,]*(\.[0-9]+)?\s*", text):
        return text.strip().removeprefix("+").replace(",", "")
    return _without_articles(text) or " ".join(text.lower().split())


def _without_articles(text: str) -> str:
    letters = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def format_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo
) -> float:
    """1.0 if the solution contains a match of `extra_info["format_regex"]`, else 0.0.

    The default is `#### number`; `.` matches newlines too.
    """
    pattern = extra_info.get("format_regex", r"#### -?[0-9]")
    return float(re.search(pattern, solution_str, re.DOTALL) is not None)


def length(data_source: str, solution_str: str, ground_truth: Any, extra_info: ExtraInfo) -> float:
    """-min(1, (characters - max_characters) / buffer_characters); 0.0 up to `max_characters`.

    `extra_info` may have `max_characters` (1024) and `buffer_characters` (as `max_characters`).
    """
    max_characters = extra_info.get("max_characters", 1024)
    excess = max(0, len(solution_str) - max_characters)
    return (
        -min(1.0, excess / extra_info.get("buffer_characters", max_characters)) if excess else 0.0
    )


# Name -> import path. A module is imported when its function is resolved: only in runs that use it,
# and outside the time limit of the first call.
REWARD_FUNCTIONS: Mapping[str, Any] = {
    "arithmetic": f"{__name__}:arithmetic",
    "gsm8k": f"{__name__}:gsm8k",
    "math": "jaxrl_llm.rewards.math:math_answer",
    "exact_match": f"{__name__}:exact_match",
    "code": "jaxrl_llm.rewards.code:code",
    "format": f"{__name__}:format_match",
    "length": f"{__name__}:length",
    "reasoning_gym": "jaxrl_llm.rewards.reasoning_gym:score_answer",
}
# Packages of extras that built-in functions need; the extra is named like the function.
_EXTRA_PACKAGES: Mapping[str, str] = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}


def check_installed(name: str) -> None:
    """Raises ConfigError if a built-in function needs an extra that is not installed."""
    if package := _EXTRA_PACKAGES.get(name):
        check_package(package, extra=name, where=f"the reward function {name!r}")


def resolve(name: str) -> RewardFunction:
    """The function of a key of `REWARD_FUNCTIONS`, `package.module:function` or `file.py:function`.

    ValueError if it does not exist, its module fails to import, or it does not take `ARGUMENTS`;
    ConfigError if it is a built-in one whose extra is not installed.
    """
    check_installed(name)
    import_path, kind = REWARD_FUNCTIONS.get(name, name), "reward function"
    try:
        function = lookup.resolve(import_path, REWARD_FUNCTIONS, kind)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{kind} {name!r} cannot be used: {cause}") from error
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        rule = f"must take {', '.join(ARGUMENTS)} by name"
        raise ValueError(f"{kind} {name!r}: {rule}: {error}") from error
    return function


def truth_check(function: RewardFunction) -> TruthCheck | None:
    """The attribute `check_truth` of a reward function; None if it accepts any ground truth.

    >>> truth_check(gsm8k)("72"), truth_check(length)
    (frozenset({'72'}), None)
    """
    return getattr(function, "check_truth", None)


def truth_problems(function: RewardFunction, ground_truths: Sequence[Any]) -> dict[int, str]:
    """The problems of unreadable ground truths, by index; readable ones have no entry."""
    check = truth_check(function)
    problems = {}
    for index, truth in enumerate(ground_truths) if check else ():
        try:
            assert check is not None
            check(truth)
        except Exception as error:  # a user's check may raise anything
            prefix = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            problems[index] = f"{prefix}{error}"
    return problems
