"""Which sample stands in which slot. Pure Python, no device: the same on every host."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.rollout import stopping
from jaxrl_llm.rollout.requests import Completion, Progress, Request, SamplingParams
from jaxrl_llm.rollout.stopping import Decode


@dataclasses.dataclass(frozen=True)
class Placement:
    """A sample that enters a slot: `sample` of request `request`."""

    request: int
    sample: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What the device sampled, read by the host: `programs.Outputs` in numpy."""

    tokens: np.ndarray  # [N, S] int32; -1: none
    log_probs: np.ndarray  # [N, S]
    top_tokens: np.ndarray  # [N, S, k]
    top_log_probs: np.ndarray  # [N, S, k]
    remaining: np.ndarray  # [S]; 0: the sample ended
    version: int = 0  # of the weights


class _Sample:
    """One sample from its submission to its end."""

    def __init__(self, request: int, index: int, prompt_tokens: int, params: SamplingParams):
        self.request, self.index, self.params = request, index, params
        self.prompt_tokens = prompt_tokens
        self.completion = Completion()
        self.num_reported = 0
        self.error: Exception | None = None

    def extend(self, sampled: Sampled, column: int) -> int:
        """Takes in one column; returns how many tokens it held."""
        given = sampled.tokens[:, column] >= 0
        c = self.completion
        c.tokens.extend(sampled.tokens[given, column].tolist())
        c.log_probs.extend(sampled.log_probs[given, column].tolist())
        c.versions.extend([sampled.version] * int(given.sum()))
        if k := self.params.num_top_log_probs:
            tops = zip(
                sampled.top_tokens[given, column, :k].tolist(),
                sampled.top_log_probs[given, column, :k].tolist(),
                strict=True,
            )
            c.top_log_probs.extend(tuple(zip(*top, strict=True)) for top in tops)
        return int(given.sum())

    def cut(self, length: int) -> None:
        c = self.completion
        del c.tokens[length:], c.log_probs[length:], c.versions[length:], c.top_log_probs[length:]

    def progress(self) -> Progress:
        """Returns what was not reported before."""
        first, c = self.num_reported, self.completion
        self.num_reported = len(c.tokens)
        return Progress(
            self.request,
            self.index,
            tuple(c.tokens[first:]),
            tuple(c.log_probs[first:]),
            tuple(c.versions[first:]),
            tuple(c.top_log_probs[first:]),
            c.finish_reason,
            self.error,
        )


class Scheduler:
    """Keeps slots full: hands out free slots in order of arrival, lowest slot first."""

    def __init__(self, num_slots: int, decode: Decode):
        """
        Args:
          num_slots: Sequences decoded at one time.
          decode: Tokens to text; asked only where a sample has stop strings.
        """
        self._decode = decode
        self._num_requests = 0
        self._requests: dict[int, Request] = {}  # unfinished, in order of arrival
        self._samples: dict[int, list[_Sample]] = {}
        self._waiting: collections.deque[_Sample] = collections.deque()
        self._owners: list[_Sample | None] = [None] * num_slots
        self._touched: dict[_Sample, None] = {}  # in order; what `progress` will report
        self._stale: set[int] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return sum(owner is not None for owner in self._owners)

    @property
    def active_params(self) -> list[SamplingParams]:
        """How each active sample is drawn."""
        return [owner.params for owner in self._owners if owner is not None]

    def add(self, request: Request) -> int:
        """Queues the samples of a request; returns its number."""
        number = self._num_requests
        self._num_requests += 1
        samples = [
            _Sample(number, i, len(request.tokens), params)
            for i, params in enumerate(request.params)
        ]
        if samples:
            self._requests[number], self._samples[number] = request, samples
            self._waiting.extend(samples)
        return number

    def request(self, number: int) -> Request:
        return self._requests[number]

    def params(self, placement: Placement) -> SamplingParams:
        """Returns how a placed sample is drawn."""
        return self._requests[placement.request].params[placement.sample]

    def requests_from(self, number: int) -> list[int]:
        """Returns unfinished requests that arrived with this one or later, in order."""
        return [other for other in self._requests if other >= number]

    def remove(self, number: int) -> list[Completion]:
        """Takes an unfinished request out; returns its completions as far as they came."""
        if number not in self._requests:
            return []
        samples = self._samples[number]
        self._waiting = collections.deque(s for s in self._waiting if s.request != number)
        for slot, owner in enumerate(self._owners):
            if owner is not None and owner.request == number:
                self._owners[slot] = None
                self._stale.add(slot)
        for sample in samples:
            self._touched.pop(sample, None)
            if not sample.completion.finish_reason:
                sample.completion.finish_reason = "abort"
        del self._requests[number], self._samples[number]
        return [sample.completion for sample in samples]

    def lengths(self, beyond: int = 0) -> list[int]:
        """Returns the tokens so far of each active sequence that may get over `beyond` more."""
        return [
            owner.prompt_tokens + len(owner.completion.tokens)
            for owner in self._owners
            if owner is not None and owner.params.max_tokens > len(owner.completion.tokens) + beyond
        ]

    def admit(self) -> list[Placement]:
        """Returns the samples that enter a slot now: as many as are waiting and slots free."""
        free = [slot for slot, owner in enumerate(self._owners) if owner is None]
        entering = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        placements = []
        for slot, sample in zip(free, entering, strict=False):
            self._owners[slot] = sample
            placements.append(Placement(sample.request, sample.index, slot))
        return placements

    def take_first(self, placements: Sequence[Placement], sampled: Sampled) -> None:
        """Takes in what `insert` sampled; the columns are in the order of `placements`."""
        for column, placement in enumerate(placements):
            self._stale.discard(placement.slot)
            self._take(placement.slot, sampled, column)

    def compact(self, num_slots: int) -> list[tuple[int, int]]:
        """Moves every active sample below slot `num_slots`; returns the moves (from, to)."""
        behind = [s for s in range(num_slots, len(self._owners)) if self._owners[s] is not None]
        free = [s for s in range(num_slots) if self._owners[s] is None]
        moves = list(zip(behind, free, strict=False))
        for source, target in moves:
            self._owners[target], self._owners[source] = self._owners[source], None
            self._stale.discard(target)
        return moves

    def take(self, sampled: Sampled) -> int:
        """Takes in what `generate` sampled in the first slots; returns how many tokens."""
        return sum(
            self._take(slot, sampled, slot)
            for slot in range(len(sampled.remaining))
            if self._owners[slot] is not None
        )

    def _take(self, slot: int, sampled: Sampled, column: int) -> int:
        sample = self._owners[slot]
        assert sample is not None
        c, num_seen = sample.completion, len(sample.completion.tokens)
        count = sample.extend(sampled, column)
        if sampled.remaining[column] <= 0:
            c.finish_reason = "stop" if c.tokens[-1] in sample.params.stop_tokens else "length"
        if count and (strings := sample.params.stop_strings):
            ended, length = c.finish_reason, 0
            try:
                length = stopping.num_tokens_to_stop(c.tokens, num_seen, strings, self._decode)
            except Exception as error:  # of the user's decoder: it ends this sample alone
                sample.error, c.finish_reason = error, "error"
            if length:
                sample.cut(length)
                c.finish_reason = "stop"
            if c.finish_reason and not ended:
                self._stale.add(slot)
        if count:
            self._touched[sample] = None
        if c.finish_reason:
            self._owners[slot] = None
        return count

    def stale_slots(self) -> list[int]:
        """Returns the slots that are free here and not on the device, once each."""
        stale, self._stale = sorted(self._stale), set()
        return stale

    def progress(self) -> list[Progress]:
        """Returns what was sampled since the last call; forgets requests that are finished."""
        touched, self._touched = list(self._touched), {}
        for number in {sample.request for sample in touched}:
            if all(sample.completion.finish_reason for sample in self._samples[number]):
                del self._requests[number], self._samples[number]
        return [sample.progress() for sample in touched]
