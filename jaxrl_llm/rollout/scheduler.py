"""Which sample stands in which slot. Pure Python, no device: the same on every host."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one sample is drawn."""

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the samples wanted of it; the prompt is read once for all of them."""

    tokens: tuple[int, ...]
    keys: np.ndarray  # [n, 2] uint32, one raw random key a sample
    params: tuple[SamplingParams, ...]  # n of them


@dataclasses.dataclass
class Completion:
    """One finished sample."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # stop token included
    log_probs: list[float] = dataclasses.field(default_factory=list)
    stopped: bool = False  # by a stop token, not by its length limit


@dataclasses.dataclass(frozen=True)
class Placement:
    """A sample that enters a slot: `sample` of request `request`."""

    request: int
    sample: int
    slot: int


class Scheduler:
    """Keeps slots full: hands out free slots in order of arrival, lowest slot first."""

    def __init__(self, requests: Sequence[Request], num_slots: int):
        self.requests = requests
        self.completions = [[Completion() for _ in r.params] for r in requests]
        self._waiting = collections.deque(
            (i, s) for i, request in enumerate(requests) for s in range(len(request.params))
        )
        self._owners: list[tuple[int, int] | None] = [None] * num_slots

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        return sum(owner is not None for owner in self._owners)

    def max_active_tokens(self) -> int:
        """Returns the most tokens that any active sequence holds by now."""
        return max(
            len(self.requests[r].tokens) + len(self.completions[r][s].tokens)
            for r, s in filter(None, self._owners)
        )

    def admit(self) -> list[Placement]:
        """Returns the samples that enter a slot now: as many as are waiting and slots free."""
        free = [slot for slot, owner in enumerate(self._owners) if owner is None]
        entering = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        placements = []
        for slot, owner in zip(free, entering, strict=False):
            self._owners[slot] = owner
            placements.append(Placement(*owner, slot))
        return placements

    def first_tokens(self, placements, tokens, log_probs, remaining) -> None:
        """Takes in what `insert` sampled, arrays of [n] in the order of `placements`."""
        for p, token, log_prob, left in zip(placements, tokens, log_probs, remaining, strict=False):
            completion = self.completions[p.request][p.sample]
            completion.tokens.append(int(token))
            completion.log_probs.append(float(log_prob))
            self._release_if_done(p.slot, p.request, p.sample, int(left))

    def take(self, tokens, log_probs, remaining) -> int:
        """Takes in the outputs of `generate`; returns how many tokens were sampled."""
        taken = 0
        for slot, owner in enumerate(self._owners):
            if owner is None:
                continue
            count = int((tokens[:, slot] >= 0).sum())  # active steps come first
            completion = self.completions[owner[0]][owner[1]]
            completion.tokens.extend(tokens[:count, slot].tolist())
            completion.log_probs.extend(log_probs[:count, slot].tolist())
            taken += count
            self._release_if_done(slot, *owner, int(remaining[slot]))
        return taken

    def _release_if_done(self, slot: int, request: int, sample: int, remaining: int) -> None:
        if remaining > 0:
            return
        completion = self.completions[request][sample]
        params = self.requests[request].params[sample]
        completion.stopped = completion.tokens[-1] in params.stop_tokens
        self._owners[slot] = None
