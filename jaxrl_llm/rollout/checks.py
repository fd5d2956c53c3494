"""What an engine refuses, before anything is queued."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from jaxrl_llm.config.rollout import MIN_TEMPERATURE
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.requests import MAX_TOP_LOG_PROBS, NUM_STOP_TOKENS, Request, SamplingParams


class RequestError(UserError, ValueError):
    """An engine cannot serve such a request; the message says what to change."""


# NaN fails every comparison.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda t: t == 0 or MIN_TEMPERATURE <= t < math.inf,
        f"must be finite and at least {MIN_TEMPERATURE:g}, or 0 for greedy",
    ),
    "top_k": (
        lambda k: isinstance(k, Integral) and 0 <= int(k) < 2**31,
        "must be an integer from 0 (off) to 2147483647",
    ),
    "top_p": (lambda p: 0 < p <= 1, "must be above 0 and at most 1 (off)"),
    "min_p": (lambda p: 0 <= p < 1, "must be at least 0 (off) and below 1"),
}


def number_problem(name: str, value: Any) -> str:
    """Returns what is wrong with a number of `SamplingParams`, "" if nothing is.

    >>> number_problem("top_p", 1.5)
    'must be above 0 and at most 1 (off), got 1.5'
    """
    holds, rule = _RULES[name]
    try:
        return "" if holds(value) else f"{rule}, got {value!r}"
    except TypeError:  # not a number at all
        return f"{rule}, got {value!r:.100}"


def is_text(string: str) -> bool:
    """Returns whether UTF-8 can hold a string: it cannot hold half of a surrogate pair.

    >>> is_text("\\ud83d")
    False
    """
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can take."""

    max_tokens: int  # prompt and response
    vocab_size: int
    takes_stop_strings: bool

    def check(self, request: Request, name: str) -> None:
        """Checks a request of any origin; `name` is what the message calls it.

        Raises:
          RequestError: If the engine cannot serve it.
        """
        if problem := self._problem(request):
            raise RequestError(f"{name}: {problem}")

    def _problem(self, request: Request) -> str:
        length = len(request.tokens)
        if not 1 <= length < self.max_tokens:
            return f"a prompt of {length} tokens; this engine takes 1 to {self.max_tokens - 1}"
        if problem := self._token_problem("prompt", request.tokens):
            return problem
        keys = np.asarray(request.keys)
        if keys.shape != (len(request.params), 2) or keys.dtype.kind not in "iu":
            return (
                f"keys of shape {keys.shape} and {keys.dtype} for {len(request.params)} samples;"
                " give one raw key of two integers for each"
            )
        # Samples of a prompt mostly share their parameters.
        each = {id(params): params for params in request.params}.values()
        return next((p for params in each if (p := self._sampling_problem(params, length))), "")

    def _token_problem(self, name: str, tokens: Sequence[int]) -> str:
        ids = np.asarray(tokens)
        if ids.dtype.kind not in "iu" or ids.ndim != 1:
            return f"{name}: token ids are integers, got {tokens!r:.100}"
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            return f"{name}: token id {wrong[0]} is outside the vocabulary of {self.vocab_size}"
        return ""

    def _sampling_problem(self, params: SamplingParams, prompt_tokens: int) -> str:
        room = self.max_tokens - prompt_tokens
        if not (isinstance(params.max_tokens, Integral) and 1 <= int(params.max_tokens) <= room):
            return (
                f"max_tokens={params.max_tokens!r:.100} after a prompt of {prompt_tokens}"
                f" must lie between 1 and {room} and be an integer"
            )
        for field in _RULES:
            if problem := number_problem(field, getattr(params, field)):
                return f"{field} {problem}"
        if len(params.stop_tokens) > NUM_STOP_TOKENS:
            return f"{len(params.stop_tokens)} stop tokens, at most {NUM_STOP_TOKENS}"
        if params.stop_tokens and (p := self._token_problem("stop_tokens", params.stop_tokens)):
            return p
        most, count = min(MAX_TOP_LOG_PROBS, self.vocab_size), params.num_top_log_probs
        if not (isinstance(count, Integral) and 0 <= int(count) <= most):
            return (
                f"num_top_log_probs={count!r:.100} must lie between 0 and {most} and be an integer"
            )
        if params.stop_strings and not self.takes_stop_strings:
            return "stop strings need the text of tokens; give the engine `decode`"
        for string in params.stop_strings:
            if not string:
                return "a stop string is empty; leave it out"
            if not is_text(string):
                return f"stop string {string!r:.100} holds half of a surrogate pair; leave it out"
        return ""
