"""Reward functions: the built-in ones, and how a user's own are found.

Each is `f(data_source, solution_str, ground_truth, extra_info)` and returns a number, or a dict
with `score` and what else should be logged; maj@k votes on `pred`, the answer in the solution.
Worker processes import this module, so it must not import jax.
"""

import inspect
import re
import string
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from jaxrl_llm.algorithms import lookup

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
Info = Mapping[str, Any]
Result = float | Mapping[str, Any]
RewardFunction = Callable[..., Result | Awaitable[Result]]


def arithmetic(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info) -> dict:
    """Returns 1.0 as `score` if all text after the first `#` is the ground truth, else 0.0.

    White space around it is ignored. A policy can neither guess twice nor go on for ever. Of an
    episode with tools or an environment the policy's last turn counts.
    """
    if messages := extra_info.get("messages"):
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        solution_str = said[-1] if said else ""
    _, _, answer = solution_str.partition("#")
    return {"score": float(answer.strip() == str(ground_truth)), "pred": answer.strip()}


def gsm8k(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info) -> dict:
    """Returns 1.0 as `score` if the last `#### number` is the ground truth, else 0.0.

    Only the last 300 characters count. Commas are dropped; then the texts must be equal, as in
    verl: neither `12.0` nor `12.` at the end of a sentence is `12`.
    """
    numbers = re.findall(r"#### (-?[0-9.,]+)", solution_str[-300:])
    answer = numbers[-1].replace(",", "") if numbers else ""
    return {"score": float(bool(numbers) and answer == ground_truth), "pred": answer}


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info) -> dict:
    """Returns 1.0 as `score` if the answer is one of those in the ground truth, else 0.0.

    The answer is the text in the last `<answer>...</answer>`. It is compared as in SQuAD (arXiv
    1606.05250): without case, punctuation, articles and spaces that are more than one. The ground
    truth is a text, a list of texts, or a mapping with such a list as `target` (Search-R1's rows).
    """
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    answer = _normalized(found[-1]) if found else ""
    wanted = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    texts = [wanted] if isinstance(wanted, str) else list(wanted or ())
    right = bool(answer) and answer in {_normalized(str(text)) for text in texts}
    return {"score": float(right), "pred": answer}


def _normalized(text: str) -> str:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def formatted(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info) -> float:
    """Returns 1.0 if the solution contains a match of `extra_info["format_regex"]`, else 0.0.

    The default is `#### number`; `.` matches newlines too.
    """
    pattern = extra_info.get("format_regex", r"#### -?[0-9]")
    return float(re.search(pattern, solution_str, re.DOTALL) is not None)


def length(data_source: str, solution_str: str, ground_truth: Any, extra_info: Info) -> float:
    """Returns -min(1, (characters - max_characters) / buffer_characters), 0.0 of fewer characters.

    `extra_info` may have `max_characters` (1024) and `buffer_characters` (as `max_characters`).
    """
    allowed = extra_info.get("max_characters", 1024)
    excess = max(0, len(solution_str) - allowed)
    return -min(1.0, excess / extra_info.get("buffer_characters", allowed)) if excess else 0.0


# Where each function is. Its module is imported when the function is resolved: not in runs without
# it, and not within the time limit of its first call.
REWARD_FUNCTIONS: Mapping[str, Any] = {
    "arithmetic": f"{__name__}:arithmetic",
    "gsm8k": f"{__name__}:gsm8k",
    "math": "jaxrl_llm.rewards.math:math_answer",
    "exact_match": f"{__name__}:exact_match",
    "code": "jaxrl_llm.rewards.code:code",
    "format": f"{__name__}:formatted",
    "length": f"{__name__}:length",
}


def resolve(name: str) -> RewardFunction:
    """Returns a key of `REWARD_FUNCTIONS`, `package.module:function` or `path/file.py:function`.

    ValueError if there is none, its module fails when imported, or it does not take `ARGUMENTS`.
    """
    where, what = REWARD_FUNCTIONS.get(name, name), "reward function"
    try:
        function = lookup.resolve(where, REWARD_FUNCTIONS, what)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{what} {name!r} cannot be used: {cause}") from error
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        rule = f"must take {', '.join(ARGUMENTS)} by name"
        raise ValueError(f"{what} {name!r}: {rule}: {error}") from error
    return function
