"""What is asked of the engine, what it refuses, and what it gives back. Token ids throughout."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxrl_llm.config.samples import MIN_TEMPERATURE
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.text import is_text

# Of one sample; the device compares each new token with them. The config allows 8, the rest is
# left to the model's own ends of sequence.
NUM_STOP_TOKENS = 16
MAX_TOP_LOG_PROBS = 32
# Text that begins within a sequence may differ in its first characters from the same tokens'
# text in place: a character cut in two (at most 4 tokens), a space that is dropped.
_MARGIN_TOKENS = 4

Decode = Callable[[Sequence[int]], str]
# "": still running; "stop": a stop token or stop string; "length": the limit of tokens; "error":
# the host's work for this sample raised an error.
FinishReason = Literal["", "stop", "length", "abort", "error"]
# Of one position in a sequence: (token, log-prob) pairs, the likeliest first.
TopLogProbs = tuple[tuple[int, float], ...]


class RequestError(UserError, ValueError):
    """An engine cannot serve such a request; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one sample is drawn.

    A stop token is the sample's last token. So is the first token that completes a stop string in
    its text, whatever text that token holds after the string (`text_before` cuts there).
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy; else at least MIN_TEMPERATURE
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_top_log_probs: int = 0  # likeliest tokens reported at every position; 0: off

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the samples wanted of it; the prompt is read once for all of them.

    The random number of a token follows from the key of its sample and its position in the
    sequence. So an aborted sample can continue as a new request: prompt and tokens so far as the
    prompt, the same key, the rest of `max_tokens`.
    """

    tokens: tuple[int, ...]
    keys: np.ndarray  # [G, 2] uint32, one raw random key a sample
    params: tuple[SamplingParams, ...]  # G of them
    # Experts that the prompt's tokens are to visit, [tokens, routes], -1: the router's choice;
    # None: of all. Only for an engine that keeps routes.
    routes: np.ndarray | None = None
    # Whether other requests may continue its samples: their keys and values stay in their pages
    # until other samples need these, or `Engine.forget`.
    keeps: bool = False
    # The sample that this one continues, as (its request, its index): what the prompt shares with
    # it is read again only if its keys and values are gone.
    continues: tuple[int, int] | None = None
    # How many of its last tokens are the beginning of its sample: stop strings may begin there.
    begun: int = 0
    # What images are to the prompt, a row of its tokens; host arrays. None: it has none.
    sights: Sights | None = None

    @property
    def offset(self) -> int:
        """How far the position of what follows the prompt is from its number of tokens."""
        if self.sights is None:
            return 0
        return int(np.max(self.sights.positions)) + 1 - len(self.tokens)


@dataclasses.dataclass
class Completion:
    """One sample as far as it came."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # stop token included
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # of the weights that drew each
    top_log_probs: list[TopLogProbs] = dataclasses.field(default_factory=list)  # none if off
    finish_reason: FinishReason = ""
    # Experts that tokens visited, [_, routes] each: of the prompt, then of what was sampled but the
    # last token, and of tokens after a stop string. Empty if not kept.
    routes: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def stopped(self) -> bool:
        """Whether it ended by itself, not by its length limit or an abort."""
        return self.finish_reason == "stop"


class Progress(NamedTuple):
    """What one step of the engine added to one sample."""

    request: int  # as `Engine.submit` returned it
    sample: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]  # of the weights that drew each token
    top_log_probs: tuple[TopLogProbs, ...]  # empty if off
    finish_reason: FinishReason
    error: Exception | None = None  # why, if that is "error"


@dataclasses.dataclass
class Statistics:
    """What the engine did since its last reset."""

    prefill_tokens: int = 0  # of prompts, each counted once
    prefill_positions: int = 0  # computed for them, padding included
    prefill_s: float = 0.0
    reread_tokens: int = 0  # those of them that pages held before other samples needed these
    put_back: int = 0  # samples that lost their pages while they ran
    most_pages: int = 0  # that were held at one time
    decode_tokens: int = 0  # sampled
    decode_steps: int = 0
    slot_steps: int = 0  # decode steps of each slot that was active in them
    guesses: int = 0  # that decode steps checked; none without speculation
    busy_room: int = 0  # slots times decode steps, while samples were waiting
    busy_slot_steps: int = 0  # those of them in which the slot was active
    decode_s: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of the slots' steps that sampled a token, until the queue was empty."""
        return self.busy_slot_steps / self.busy_room if self.busy_room else 1.0

    @property
    def tokens_per_forward(self) -> float:
        """Of a slot in one decode step; 1 without speculation."""
        return self.decode_tokens / self.slot_steps if self.slot_steps else 1.0

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were right; 0 without speculation."""
        right = self.decode_tokens - self.slot_steps
        return right / self.guesses if self.guesses else 0.0

    def __add__(self, other: "Statistics") -> "Statistics":
        both = Statistics(*map(operator.add, vars(self).values(), vars(other).values()))
        both.most_pages = max(self.most_pages, other.most_pages)
        return both

    def __sub__(self, other: "Statistics") -> "Statistics":
        left = Statistics(*map(operator.sub, vars(self).values(), vars(other).values()))
        left.most_pages = self.most_pages
        return left

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of a step under their names in `metrics.jsonl`."""
        per_s = lambda tokens, seconds: tokens / seconds if seconds else 0.0  # noqa: E731
        return {
            "rollout/prefill_tokens_per_s": per_s(self.prefill_tokens, self.prefill_s),
            "rollout/decode_tokens_per_s": per_s(self.decode_tokens, self.decode_s),
            "rollout/reread_tokens": float(self.reread_tokens),
            "rollout/put_back": float(self.put_back),
            "rollout/slot_occupancy": self.occupancy,
            "rollout/tokens_per_forward": self.tokens_per_forward,
            "rollout/draft_acceptance": self.acceptance,
        }


# NaN fails every comparison.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda t: t == 0 or MIN_TEMPERATURE <= t < math.inf,
        f"0 or in [{MIN_TEMPERATURE}, inf) (0: greedy)",
    ),
    "top_p": (lambda p: 0 < p <= 1, "in (0, 1] (1: off)"),
    "min_p": (lambda p: 0 <= p < 1, "in [0, 1) (0: off)"),
}


def number_problem(name: str, value: Any) -> str:
    """Returns what is wrong with a number of `SamplingParams`, "" if nothing is.

    >>> number_problem("top_p", 1.5)
    'must be in (0, 1] (1: off), got 1.5'
    """
    holds, rule = _RULES[name]
    try:
        return "" if holds(value) else f"must be {rule}, got {value!r}"
    except TypeError:  # not a number at all
        return f"must be {rule}, got {value!r:.100}"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can take."""

    max_tokens: int  # prompt and response
    vocab_size: int
    takes_stop_strings: bool
    num_routes: int = 0  # of a token; 0: not kept
    vector_size: int = 0  # of a vector of an image; 0: the model reads none

    @property
    def max_top_log_probs(self) -> int:
        return min(MAX_TOP_LOG_PROBS, self.vocab_size)

    def check(self, request: Request, name: str) -> None:
        """Raises a `RequestError` for what the engine cannot serve; `name` begins its message."""
        if problem := next(self._problems(request), ""):
            raise RequestError(f"{name}: {problem}")

    def _problems(self, request: Request) -> Iterator[str]:
        length = len(request.tokens)
        if not 1 <= length < self.max_tokens:
            yield f"a prompt of {length} tokens; this engine takes 1 to {self.max_tokens - 1}"
        yield from self._token_problems("prompt", request.tokens)
        keys = np.asarray(request.keys)
        if keys.shape != (count := len(request.params), 2) or keys.dtype.kind not in "iu":
            came = f"keys of shape {keys.shape} and {keys.dtype} for {count} samples"
            yield f"{came}; give one raw key of two integers for each"
        if request.continues and count != 1:
            yield f"{count} samples continue one; give a request for each"
        if request.routes is not None:
            found, wanted = request.routes.shape, (length, self.num_routes)
            if not self.num_routes:
                yield "routes: this engine keeps none; make it with keeps_routes=True"
            elif found != wanted:
                yield f"routes of shape {found} for a prompt of {length} tokens; give {wanted}"
        yield from self._sight_problems(request)
        # Samples of a prompt mostly share their parameters.
        for params in {id(params): params for params in request.params}.values():
            yield from self._sampling_problems(params, length)

    def _sight_problems(self, request: Request) -> Iterator[str]:
        if (sights := request.sights) is None:
            return
        count, size = sights.vectors.shape
        if not self.vector_size:
            yield "it has images; this model reads text alone, take one of a family with a tower"
        elif size != self.vector_size:
            yield f"vectors of {size} numbers for images; this model's have {self.vector_size}"
        elif sights.at.shape != (1, len(request.tokens)) or np.max(sights.at) >= count:
            yield (
                f"images of {count} vectors, of which {int((np.asarray(sights.at) >= 0).sum())} of"
                f" {sights.at.shape} tokens are to be; give one row of {len(request.tokens)}"
            )

    def _token_problems(self, name: str, tokens: Sequence[int]) -> Iterator[str]:
        ids = np.asarray(tokens)
        if len(tokens) and (ids.dtype.kind not in "iu" or ids.ndim != 1):
            yield f"{name}: token ids are integers, got {tokens!r:.100}"
        elif (wrong := ids[(ids < 0) | (ids >= self.vocab_size)]).size:
            yield f"{name}: token id {wrong[0]} is outside the vocabulary of {self.vocab_size}"

    def _sampling_problems(self, params: SamplingParams, prompt_tokens: int) -> Iterator[str]:
        room, after = self.max_tokens - prompt_tokens, f" after a prompt of {prompt_tokens}"
        for field, note, low, high in (
            ("max_tokens", after, 1, room),
            ("top_k", " (0: off)", 0, 2**31 - 1),
            ("num_top_log_probs", "", 0, self.max_top_log_probs),
        ):
            value, rule = getattr(params, field), f"must lie between {low} and {high}"
            if not (isinstance(value, Integral) and low <= int(value) <= high):
                yield f"{field}={value!r:.100}{note} {rule} and be an integer"
        for field in _RULES:
            if problem := number_problem(field, getattr(params, field)):
                yield f"{field} {problem}"
        if len(params.stop_tokens) > NUM_STOP_TOKENS:
            yield f"{len(params.stop_tokens)} stop tokens, at most {NUM_STOP_TOKENS}"
        yield from self._token_problems("stop_tokens", params.stop_tokens)
        if params.stop_strings and not self.takes_stop_strings:
            yield "stop strings need the text of tokens; give the engine `decode`"
        for string in params.stop_strings:
            if not string:
                yield "a stop string is empty; leave it out"
            if not is_text(string):
                yield f"stop string {string!r:.100} holds half of a surrogate pair; leave it out"


def num_tokens_to_stop(
    tokens: Sequence[int], num_seen: int, stop_strings: Sequence[str], decode: Decode
) -> int:
    """Returns the tokens up to the first after `num_seen` that completes a stop string, or 0."""
    # A token without text aside, n bytes of text are at most n tokens.
    longest = max(len(stop.encode()) for stop in stop_strings)
    start = max(0, num_seen - longest - _MARGIN_TOKENS)

    def completes(end: int) -> bool:
        text = decode(tokens[start:end])
        return any(stop in text for stop in stop_strings)

    ends = range(num_seen + 1, len(tokens) + 1)
    return next(filter(completes, ends)) if completes(len(tokens)) else 0


def text_before(text: str, stop_strings: Sequence[str]) -> str:
    """Returns `text` up to the first stop string in it, all of it if there is none.

    >>> text_before("yes. Q: what", ("Q:", "."))
    'yes'
    """
    found = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
