"""Requests to the engine, their validation, and its results. Token ids throughout."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

import numpy as np
from jax import Array

from jaxrl_llm.config.rollout_data import MAX_SUPPORT_TOKENS, MIN_TEMPERATURE
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine.grammars import Grammar, num_mask_words
from jaxrl_llm.text import is_text

# Per sample; compared on the device. The config allows 8, the rest are the model's own EOS tokens.
NUM_STOP_TOKENS = 16
MAX_TOP_LOG_PROBS = 32
# Numbers of biases of a sample, and (number, length) of its bad words, that programs are compiled
# for. The last are the limits.
BIAS_SIZES = 32, 1024
BAD_WORD_SIZES = (16, 8), (512, 32)
# Decoding from the middle of a sequence may change its first characters: a character split over
# tokens (at most 4), a dropped space.
_MARGIN_TOKENS = 4

Decode = Callable[[Sequence[int]], str]
# "": still running; "stop": a stop token or stop string; "length": the limit of tokens; "error":
# the host's work for this sample raised an error.
FinishReason = Literal["", "stop", "length", "abort", "error"]
# At one position: (token, log-prob) pairs, the likeliest first.
TopLogProbs = tuple[tuple[int, float], ...]


class RequestError(UserError, ValueError):
    """The engine cannot serve a request; the message says how to change it."""


# Fields of `SamplingParams` that adjust logits, and their values that do not.
_NO_ADJUSTMENTS: Mapping[str, Any] = {
    "logit_bias": (),
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "bad_words": (),
}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one sample.

    A sample ends with a stop token, or with the token that completes a stop string, even if that
    token holds more text after the string (`text_before` truncates it).

    Bias, penalties, `min_tokens` and bad words adjust the logits, as in vLLM, and log-probs are of
    the adjusted logits; see `logit_adjustments`. The output of a sample is what it has sampled, and
    the `Request.num_partial` tokens before.
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy; else at least MIN_TEMPERATURE
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_top_log_probs: int = 0  # likeliest tokens reported at every position; 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, bias in [-100, 100]), no token twice
    # Positive logits of tokens of the prompt and output are divided by it, others multiplied.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # in [-2, 2], subtracted for tokens of the output
    frequency_penalty: float = 0.0  # in [-2, 2], subtracted for each time that it is in the output
    min_tokens: int = 0  # tokens of the output before stop tokens and stop strings end it
    # The last token of each is banned where the output ends with the tokens before it.
    bad_words: tuple[tuple[int, ...], ...] = ()
    # Draws among at most so many of the most likely tokens that top_k, top_p and min_p keep,
    # reports them with each token, and log-probs renormalized over them; 0: off.
    support_tokens: int = 0

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def adjustments(self) -> list[str]:
        """The names of the fields that adjust logits, or delay stop strings, and are set."""
        return [name for name, off in _NO_ADJUSTMENTS.items() if getattr(self, name) != off]

    @property
    def is_history_dependent(self) -> bool:
        """Whether its logits depend on earlier tokens, so that the host must know them all."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0) or bool(self.bad_words)

    @property
    def is_adjusted(self) -> bool:
        """Whether its logits are adjusted before sampling."""
        delays_stop = self.min_tokens > 0 and bool(self.stop_tokens)
        return bool(self.logit_bias) or delays_stop or self.is_history_dependent


class PromptLogProbs(NamedTuple):
    """Log-probs of the tokens of a prompt, as the network gives them: without a temperature and
    without adjustments. The values of the first token, which nothing precedes, have no meaning.
    """

    log_probs: np.ndarray | Array  # [tokens] float32
    ranks: np.ndarray | Array  # [tokens] int32; 1: the most likely
    top_tokens: np.ndarray | Array  # [tokens, k] int32; the likeliest first
    top_log_probs: np.ndarray | Array  # [tokens, k] float32


class AdapterSlot(NamedTuple):
    """Where an adapter is among the parameters of an engine."""

    number: int  # from 1
    generation: int = 0  # of the adapters in this place: keys and values of others are not shared


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and its samples, which share one prefill.

    The randomness of a token depends only on its sample's key and its position in the sequence. So
    an aborted sample can be continued by a new request: prompt plus tokens so far as the prompt,
    the same key, and the rest of `max_tokens`.
    """

    tokens: tuple[int, ...]
    keys: np.ndarray  # [G, 2] uint32, one raw random key a sample
    params: tuple[SamplingParams, ...]  # G of them
    # Router replay: experts that the prompt's tokens visit, [tokens, routes]; -1: the router's
    # choice; None: for all. Only for an engine with `keeps_routes`.
    routes: np.ndarray | None = None
    # Whether other requests may continue its samples: their keys and values stay in their pages
    # until other samples need these, or `Engine.free`.
    retains_pages: bool = False
    # The sample that this one continues, as (request, index): the shared prefix is recomputed only
    # if its pages are gone.
    continues: tuple[int, int] | None = None
    # Number of trailing prompt tokens that belong to the response: stop strings may begin there.
    num_partial: int = 0
    # Image inputs of the prompt, one row, host arrays; None: no images.
    image_inputs: ImageInputs | None = None
    # Most likely tokens reported for every prompt token, with its own log-prob; None: no log-probs.
    # The whole prompt is prefilled for them, whatever it continues.
    num_prompt_top: int | None = None
    # Constrains the text of every sample, its partial prompt tokens included (structured outputs).
    grammar: Grammar | None = None
    # LoRA adapter of an engine with several; None: the base model.
    adapter: AdapterSlot | None = None

    @property
    def offset(self) -> int:
        """Position of the next token minus the number of prompt tokens (M-RoPE)."""
        if self.image_inputs is None:
            return 0
        return int(np.max(self.image_inputs.positions)) + 1 - len(self.tokens)


@dataclasses.dataclass
class Completion:
    """A sample so far."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # stop token included
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)  # weight version of each token
    top_log_probs: list[TopLogProbs] = dataclasses.field(default_factory=list)  # none if off
    # Supports of the tokens, [_, support_tokens] each, padded with -1, and of tokens after a stop
    # string; none if off.
    support: list[np.ndarray] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason = ""
    prompt_log_probs: PromptLogProbs | None = None  # with the first token
    # Experts visited by tokens, [_, routes] each: of the prompt, then of the sampled tokens but the
    # last, and of tokens after a stop string. Empty if not kept.
    routes: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def is_stopped(self) -> bool:
        """Whether it ended with a stop token or string, not by the length limit or an abort."""
        return self.finish_reason == "stop"


class Progress(NamedTuple):
    """Tokens that one engine step added to one sample."""

    request: int  # as `Engine.submit` returned it
    sample: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]  # of the weights that drew each token
    top_log_probs: tuple[TopLogProbs, ...]  # empty if off
    finish_reason: FinishReason
    error: Exception | None = None  # why, if that is "error"
    prompt_log_probs: PromptLogProbs | None = None  # with the first tokens, if asked for


@dataclasses.dataclass
class EngineStatistics:
    """Counters of the engine since its last reset."""

    prefill_tokens: int = 0  # prompt tokens, each prompt once
    prefill_positions: int = 0  # computed for them, including padding
    prefill_s: float = 0.0
    recomputed_tokens: int = 0  # recomputed: their pages had been taken by other samples
    num_preemptions: int = 0  # preemptions: running samples that lost their pages
    peak_pages: int = 0  # peak number of pages in use
    decode_tokens: int = 0  # sampled
    decode_steps: int = 0
    slot_steps: int = 0  # active slots summed over decode steps
    draft_tokens: int = 0  # draft tokens verified; none without speculation
    busy_capacity: int = 0  # slots x decode steps, while samples were waiting
    busy_slot_steps: int = 0  # those of them with an active slot
    decode_s: float = 0.0
    # Prompt tokens looked up in the prefix cache, a request once, and those read from it.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of prompt tokens that were read from the prefix cache; 0 without it."""
        hits, queries = self.prefix_cache_hits, self.prefix_cache_queries
        return hits / queries if queries else 0.0

    @property
    def occupancy(self) -> float:
        """Share of slot steps that sampled a token, while the queue was not empty."""
        return self.busy_slot_steps / self.busy_capacity if self.busy_capacity else 1.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of a slot per decode step; 1 without speculation."""
        return self.decode_tokens / self.slot_steps if self.slot_steps else 1.0

    @property
    def acceptance(self) -> float:
        """Share of draft tokens that were accepted; 0 without speculation."""
        right = self.decode_tokens - self.slot_steps
        return right / self.draft_tokens if self.draft_tokens else 0.0

    def __add__(self, other: "EngineStatistics") -> "EngineStatistics":
        total = EngineStatistics(*map(operator.add, vars(self).values(), vars(other).values()))
        total.peak_pages = max(self.peak_pages, other.peak_pages)
        return total

    def __sub__(self, other: "EngineStatistics") -> "EngineStatistics":
        difference = EngineStatistics(*map(operator.sub, vars(self).values(), vars(other).values()))
        difference.peak_pages = self.peak_pages
        return difference

    def metrics(self) -> dict[str, float]:
        """Metrics of a step, named as in `metrics.jsonl`."""
        per_s = lambda tokens, seconds: tokens / seconds if seconds else 0.0  # noqa: E731
        return {
            "rollout/prefill_tokens_per_s": per_s(self.prefill_tokens, self.prefill_s),
            "rollout/decode_tokens_per_s": per_s(self.decode_tokens, self.decode_s),
            "rollout/reread_tokens": float(self.recomputed_tokens),
            "rollout/put_back": float(self.num_preemptions),
            "rollout/prefix_cache_hit_rate": self.prefix_cache_hit_rate,
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
    # Beyond these, products with logits would overflow or lift suppressed tokens.
    "repetition_penalty": (lambda p: 0.01 <= p <= 100, "in [0.01, 100] (1: off)"),
    "presence_penalty": (lambda p: -2 <= p <= 2, "in [-2, 2] (0: off)"),
    "frequency_penalty": (lambda p: -2 <= p <= 2, "in [-2, 2] (0: off)"),
}


def number_problem(name: str, value: Any) -> str:
    """Validates a number of `SamplingParams`; "" if it is allowed.

    >>> number_problem("top_p", 1.5)
    'must be in (0, 1] (1: off), got 1.5'
    """
    holds, rule = _RULES[name]
    try:
        return "" if holds(value) else f"must be {rule}, got {value!r}"
    except TypeError:  # not a number at all
        return f"must be {rule}, got {value!r:.100}"


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of the requests that an engine accepts."""

    max_tokens: int  # prompt and response
    vocab_size: int
    takes_stop_strings: bool
    num_routes: int = 0  # routes per token; 0: not kept
    vector_size: int = 0  # features of an image embedding; 0: text-only model
    num_adapters: int = 0

    @classmethod
    def for_network(
        cls, network: Network, max_tokens: int, decode: Decode | None, num_routes: int
    ) -> "RequestLimits":
        """Returns the limits of an engine that runs this network."""
        shape = network.shape
        vector_size = shape.image_feature_size if shape.rope_sections else 0
        return cls(
            max_tokens,
            shape.vocab_size,
            decode is not None,
            num_routes,
            vector_size,
            network.num_adapters,
        )

    @property
    def max_top_log_probs(self) -> int:
        return min(MAX_TOP_LOG_PROBS, self.vocab_size)

    def check(self, request: Request, name: str) -> None:
        """Raises `RequestError`, beginning with `name`, if the engine cannot serve a request."""
        if problem := next(self._problems(request), ""):
            raise RequestError(f"{name}: {problem}")

    def _problems(self, request: Request) -> Iterator[str]:
        length = len(request.tokens)
        if not 1 <= length < self.max_tokens:
            yield f"a prompt of {length} tokens; this engine takes 1 to {self.max_tokens - 1}"
        yield from self._token_problems("prompt", request.tokens)
        keys = np.asarray(request.keys)
        if keys.shape != (count := len(request.params), 2) or keys.dtype.kind not in "iu":
            problem = f"keys of shape {keys.shape} and {keys.dtype} for {count} samples"
            yield f"{problem}; give one raw key of two integers for each"
        if (k := request.num_prompt_top) is not None and not (
            isinstance(k, Integral) and 0 <= k <= self.max_top_log_probs
        ):
            yield f"num_prompt_top={k!r:.100} must lie between 0 and {self.max_top_log_probs}"
        if request.continues and count != 1:
            yield f"{count} samples continue one; give a request for each"
        if request.routes is not None:
            shape, expected = request.routes.shape, (length, self.num_routes)
            if not self.num_routes:
                yield "routes: this engine keeps none; make it with keeps_routes=True"
            elif shape != expected:
                yield f"routes of shape {shape} for a prompt of {length} tokens; give {expected}"
        if request.adapter and not 1 <= request.adapter.number <= self.num_adapters:
            yield f"adapter {request.adapter.number}; this engine has {self.num_adapters}"
        yield from self._sight_problems(request)
        yield from self._grammar_problems(request)
        # Samples of a prompt mostly share their parameters.
        for params in {id(params): params for params in request.params}.values():
            yield from self._sampling_problems(params, length)

    def _grammar_problems(self, request: Request) -> Iterator[str]:
        if (grammar := request.grammar) is None:
            return
        if grammar.num_words < num_mask_words(self.vocab_size):
            yield (
                f"a grammar over {grammar.num_tokens} tokens; this model has {self.vocab_size};"
                " compile it with the vocabulary of the model"
            )
        if not all(params.stop_tokens for params in request.params):
            yield "a grammar needs stop tokens, with which a sample ends; give at least one"

    def _sight_problems(self, request: Request) -> Iterator[str]:
        if (sights := request.image_inputs) is None:
            return
        count, size = sights.features.shape
        if not self.vector_size:
            yield "it has images; this model is text-only; use a vision-language model"
        elif size != self.vector_size:
            yield f"vectors of {size} numbers for images; this model's have {self.vector_size}"
        elif (
            sights.feature_index.shape != (1, len(request.tokens))
            or np.max(sights.feature_index) >= count
        ):
            yield (
                f"images of {count} vectors, of which"
                f" {int((np.asarray(sights.feature_index) >= 0).sum())} of"
                f" {sights.feature_index.shape} tokens are to be; give one row of"
                f" {len(request.tokens)}"
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
            ("support_tokens", " (0: off)", 0, min(MAX_SUPPORT_TOKENS, self.vocab_size)),
            ("min_tokens", " (0: off)", 0, 2**31 - 1 - self.max_tokens),
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
        yield from self._adjustment_problems(params)
        if params.stop_strings and not self.takes_stop_strings:
            yield "stop strings need the text of tokens; give the engine `decode`"
        for string in params.stop_strings:
            if not string:
                yield "a stop string is empty; leave it out"
            if not is_text(string):
                yield f"stop string {string!r:.100} contains a lone surrogate; remove it"

    def _adjustment_problems(self, params: SamplingParams) -> Iterator[str]:
        biased = [token for token, _ in params.logit_bias]
        yield from self._token_problems("logit_bias", biased)
        if len(set(biased)) < len(biased):
            yield "logit_bias: a token stands twice; give one bias for each"
        if len(biased) > BIAS_SIZES[-1]:
            yield f"logit_bias of {len(biased)} tokens, at most {BIAS_SIZES[-1]}"
        for token, bias in params.logit_bias:
            if not (isinstance(bias, Real) and -100 <= bias <= 100):
                yield f"logit_bias of token {token} must be in [-100, 100], got {bias!r:.100}"
        max_words, max_length = BAD_WORD_SIZES[-1]
        if len(params.bad_words) > max_words:
            yield f"{len(params.bad_words)} bad words, at most {max_words}"
        for word in params.bad_words:
            yield from self._token_problems("bad_words", word)
            if not 1 <= len(word) <= max_length:
                yield f"bad_words: one of {len(word)} tokens; give 1 to {max_length}"
        banned = {word[-1] for word in params.bad_words if word}
        if params.min_tokens:
            banned.update(params.stop_tokens)
        if len(banned) >= self.vocab_size:
            yield "bad_words and stop_tokens may ban the whole vocabulary; leave a token"


def num_tokens_to_stop(
    tokens: Sequence[int],
    num_seen: int,
    stop_strings: Sequence[str],
    decode: Decode,
    min_tokens: int = 0,
) -> int:
    """Number of tokens up to the first one after `num_seen` that completes a stop string, or 0.

    Stop strings that are complete within the first `min_tokens` do not count.
    """
    num_seen = max(num_seen, min_tokens)
    if num_seen >= len(tokens):
        return 0
    # Apart from tokens without text, n bytes of text are at most n tokens.
    longest = max(len(stop.encode()) for stop in stop_strings)
    start = max(0, num_seen - longest - _MARGIN_TOKENS)
    # Without the end of a character whose other bytes follow.
    ignored = decode(tokens[start:min_tokens]).rstrip("\N{REPLACEMENT CHARACTER}")

    def completes(end: int) -> bool:
        text = decode(tokens[start:end])
        return text_before(text, stop_strings, len(ignored)) != text

    ends = range(num_seen + 1, len(tokens) + 1)
    return next(filter(completes, ends)) if completes(len(tokens)) else 0


def text_before(text: str, stop_strings: Sequence[str], num_ignored: int = 0) -> str:
    """Truncates `text` before its first stop string, if there is one.

    Those that end within its first `num_ignored` characters do not count.

    >>> text_before("yes. Q: what", ("Q:", "."))
    'yes'
    >>> text_before("yes. Q: what", ("Q:", "."), 4)
    'yes. '
    """
    starts = (max(0, num_ignored - len(stop) + 1) for stop in stop_strings)
    positions = [
        at
        for stop, start in zip(stop_strings, starts, strict=True)
        if (at := text.find(stop, start)) >= 0
    ]
    return text[: min(positions)] if positions else text
