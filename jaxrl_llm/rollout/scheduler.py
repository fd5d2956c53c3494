"""What the host decides: which sample stands in which slot, and which prompts are read together.

Decisions follow from requests and replicated outputs alone, so they are the same on every host.
"""

import collections
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import inputs, requests
from jaxrl_llm.rollout.prefill import Prefix, Prompts
from jaxrl_llm.rollout.programs import Outputs
from jaxrl_llm.rollout.requests import Completion, Decode, Progress, Request


class Sample:
    """One sample from its submission to its end: number `index` of request `number`."""

    def __init__(self, number: int, index: int, request: Request):
        self.request, self.index, self.slot = number, index, -1  # -1: it waits
        self.prompt, self.params = request.tokens, request.params[index]
        self.begun = request.tokens[len(request.tokens) - request.begun :]
        self.routes, self.sights, self.offset = request.routes, request.sights, request.offset
        self.key = request.keys[index]
        self.keeps, self.continues = request.keeps, request.continues
        self.shared = 0  # tokens of the prompt that the slot holds as it enters
        self.completion = Completion()
        self.error: Exception | None = None

    def extend(self, sampled: Outputs, column: int, version: int) -> int:
        """Takes in one column; returns how many tokens it held."""
        given = sampled.tokens[:, column] >= 0
        count, c = int(given.sum()), self.completion
        c.tokens += sampled.tokens[given, column].tolist()
        c.log_probs += sampled.log_probs[given, column].tolist()
        c.versions += [version] * count
        if sampled.routes.shape[-1] and count:
            c.routes.append(np.asarray(sampled.routes[given, column]))
        if k := self.params.num_top_log_probs:
            tokens = sampled.top_tokens[given, column, :k].tolist()
            log_probs = sampled.top_log_probs[given, column, :k].tolist()
            c.top_log_probs += map(tuple, map(zip, tokens, log_probs))
        return count

    def progress(self, first: int) -> Progress:
        """Returns what was sampled from token `first` on."""
        c = self.completion
        new = (tuple(each[first:]) for each in (c.tokens, c.log_probs, c.versions, c.top_log_probs))
        return Progress._make((self.request, self.index, *new, c.finish_reason, self.error))


class Kept(NamedTuple):
    """What a slot holds of a sample that ended."""

    slot: int
    tokens: tuple[int, ...]

    def shared_with(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens a prompt begins with that need not be read: not all of it."""
        pairs = zip(self.tokens, prompt[:-1], strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(prompt) - 1)
        )


class Scheduler:
    """Keeps slots full: gives free slots to samples in order of arrival, lowest slot first."""

    def __init__(self, num_slots: int, decode: Decode):
        """`decode` turns tokens into text; called only for samples with stop strings."""
        self._num_slots, self._decode = num_slots, decode
        self._numbers = itertools.count()
        self.requests: dict[int, list[Sample]] = {}  # unfinished, in order of arrival
        self.waiting: collections.deque[Sample] = collections.deque()
        self.active: dict[int, Sample] = {}  # by slot
        self.reread_tokens = 0
        # By request and index of samples that ended, in the order of their ends: what they keep,
        # and how many tokens those kept whose slot others needed.
        self._kept: dict[tuple[int, int], Kept] = {}
        self._lost: dict[tuple[int, int], int] = {}
        self._touched: dict[Sample, int] = {}  # in order: the first token not yet reported
        self._stale: set[int] = set()

    def add(self, request: Request) -> int:
        """Queues the samples of a request; returns its number."""
        number = next(self._numbers)
        samples = [Sample(number, i, request) for i in range(len(request.params))]
        if samples:
            self.requests[number] = samples
            self.waiting.extend(samples)
        return number

    def completions(self, number: int) -> list[Completion]:
        """Returns those of an unfinished request; they grow until their samples end."""
        return [sample.completion for sample in self.requests.get(number, ())]

    def remove(self, number: int) -> list[Completion]:
        """Takes an unfinished request out; returns its completions so far."""
        completions = self.completions(number)
        for index in range(len(completions)):
            self.forget(number, index)
        for sample in self.requests.pop(number, ()):
            self._touched.pop(sample, None)
            if not sample.completion.finish_reason:
                sample.completion.finish_reason = "abort"
            if self.active.get(sample.slot) is sample:
                del self.active[sample.slot]
                self._stale.add(sample.slot)
        self.waiting = collections.deque(s for s in self.waiting if s.request != number)
        return completions

    def forget(self, number: int, index: int) -> None:
        """Keeps nothing for who continues a sample."""
        self._kept.pop((number, index), None)
        self._lost.pop((number, index), None)

    def to_read(self, first: int) -> list[int]:
        """Returns the requests from number `first` on whose prompts are to be read whole."""
        return [
            number
            for number, (sample, *_) in self.requests.items()
            if number >= first and not sample.shared and sample.continues not in self._kept
        ]

    def lengths(self, beyond: int = 0) -> list[int]:
        """Returns the tokens so far of each active sequence that may get over `beyond` more."""
        return [
            len(sample.prompt) + len(sample.completion.tokens)
            for sample in self.active.values()
            if sample.params.max_tokens > len(sample.completion.tokens) + beyond
        ]

    def _free(self, num_slots: int) -> list[int]:
        """Returns slots where nobody decodes, those that keep something last."""
        keep = {kept.slot for kept in self._kept.values()}
        free = (slot for slot in range(num_slots) if slot not in self.active)
        return sorted(free, key=keep.__contains__)

    def admit(self) -> list[Sample]:
        """Returns the samples that enter a slot now: as many as are waiting and slots free.

        Who continues a sample gets its slot. Others get empty slots, and after these the one that
        ended first of those that keep something, where possible for none who waits.
        """
        count = min(len(self.waiting), self._num_slots - len(self.active))
        if not count:
            return []
        keep = {kept.slot for kept in self._kept.values()}
        empty = iter([slot for slot in self._free(self._num_slots) if slot not in keep])
        entered = [self.waiting.popleft() for _ in range(count)]
        # All find theirs before any is taken away.
        mine = {s: self._kept.pop(s.continues) for s in entered if s.continues in self._kept}
        wanted = {sample.continues for sample in self.waiting}
        for sample in entered:
            if kept := mine.get(sample):
                sample.slot, sample.shared = kept.slot, kept.shared_with(sample.prompt)
                if sample.shared and sample.routes is not None:
                    sample.completion.routes = [sample.routes[: sample.shared]]
            else:
                self.reread_tokens += self._lost.pop(sample.continues or (-1, -1), 0)
                if (slot := next(empty, -1)) < 0:
                    oldest = next((key for key in self._kept if key not in wanted), None)
                    oldest = oldest or next(iter(self._kept))
                    slot, tokens = self._kept.pop(oldest)
                    self._lost[oldest] = len(tokens)
                sample.slot = slot
            self.active[sample.slot] = sample
            self._stale.discard(sample.slot)
        return entered

    def take_first(
        self, entered: Sequence[Sample | None], sampled: Outputs, version: int = 0
    ) -> None:
        """Takes in what `insert` sampled; the columns are in the order of `entered`."""
        for column, sample in enumerate(entered):
            if sample is not None:
                self._take(sample, sampled, column, version)

    def compact(self, num_slots: int) -> list[tuple[int, int]]:
        """Moves every active sample below slot `num_slots`; returns the moves (from, to).

        What a slot keeps changes places with the sample that comes: two moves, at an even index.
        """
        behind = sorted(slot for slot in self.active if slot >= num_slots)
        keepers = {kept.slot: key for key, kept in self._kept.items()}
        moves: list[tuple[int, int]] = []
        for source, target in zip(behind, self._free(num_slots), strict=False):
            self.active[target] = self.active.pop(source)
            self.active[target].slot = target
            if key := keepers.get(target):
                self._kept[key] = self._kept[key]._replace(slot=source)
                moves = [(source, target), (target, source), *moves]
                if target in self._stale:
                    self._stale.add(source)
            else:
                moves.append((source, target))
            self._stale.discard(target)
        return moves

    def take(self, sampled: Outputs, version: int = 0) -> int:
        """Takes in what `generate` sampled in the first slots; returns how many tokens."""
        active = sorted(self.active.items())
        return sum(self._take(sample, sampled, slot, version) for slot, sample in active)

    def _take(self, sample: Sample, sampled: Outputs, column: int, version: int) -> int:
        c, strings = sample.completion, sample.params.stop_strings
        num_seen = len(c.tokens)
        count = sample.extend(sampled, column, version)
        if count:
            self._touched.setdefault(sample, num_seen)
        ended = sampled.remaining[column] <= 0  # on the device
        if ended:
            c.finish_reason = "stop" if c.tokens[-1] in sample.params.stop_tokens else "length"
        if count and strings:
            try:
                whole, num_before = [*sample.begun, *c.tokens], len(sample.begun) + num_seen
                length = requests.num_tokens_to_stop(whole, num_before, strings, self._decode)
                length = max(0, length - len(sample.begun))
            except Exception as error:  # of the user's decoder: it ends this sample alone
                sample.error, c.finish_reason, length = error, "error", 0
            if length:
                for kept in (c.tokens, c.log_probs, c.versions, c.top_log_probs):
                    del kept[length:]
                c.finish_reason = "stop"
        if c.finish_reason:
            del self.active[sample.slot]
            if not ended:
                self._stale.add(sample.slot)
            if sample.keeps and c.finish_reason != "error":
                held = (*sample.prompt, *c.tokens)[:-1]  # the last was never read
                self._kept[sample.request, sample.index] = Kept(sample.slot, held)
        return count

    def stale_slots(self) -> list[int]:
        """Returns the slots that are free here and not on the device, once each."""
        stale, self._stale = sorted(self._stale), set()
        return stale

    def progress(self) -> list[Progress]:
        """Returns what was sampled since the last call; forgets requests that are finished."""
        touched, self._touched = self._touched, {}
        for number in {sample.request for sample in touched}:
            if all(sample.completion.finish_reason for sample in self.requests[number]):
                del self.requests[number]
        return [sample.progress(first) for sample, first in touched.items()]


class Reader:
    """Reads each prompt once: those of samples that enter, and more of the queue in their batch."""

    def __init__(
        self,
        read: Callable[[Params, Prompts], Prefix],
        max_tokens: int,
        done: requests.Statistics,
        num_routes: int = 0,
    ):
        self._read, self._max_tokens, self._done = read, max_tokens, done
        self._num_routes = num_routes  # of a token, that are kept
        self._routes: list[np.ndarray] = []  # of the batch's prompts
        self.longest = 0  # tokens of the longest prompt that may come later
        self._indices: dict[int, int] = {}  # request -> its prompt's index in the batch
        self._batch: Prefix | None = None
        self._read_with: Callable[[], object] = lambda: None

    def split(
        self, params: Params, entering: list[Sample], scheduler: Scheduler
    ) -> Iterator[tuple[Prefix, dict[Sample, int]]]:
        """Yields (prefix, the index of each sample's prompt in it) of the batches with them."""
        weights = jax.tree.leaves(params)[0]
        if self._read_with() is not weights:
            # Read with other weights, or never. Weakly held: this must not keep them in memory.
            self._indices, self._read_with = {}, weakref.ref(weights)
        while entering:
            first = entering[0].request
            if first not in self._indices:
                most = inputs.MOST_PROMPT_TOKENS // inputs.SMALLEST_WIDTH
                numbers = scheduler.to_read(first)[:most]
                prompts = [scheduler.requests[number][0].prompt for number in numbers]
                count = inputs.num_fitting([*map(len, prompts)], self._max_tokens, self.longest)
                routes = [scheduler.requests[number][0].routes for number in numbers[:count]]
                sights = [scheduler.requests[number][0].sights for number in numbers[:count]]
                how = self._max_tokens, self.longest, routes, self._num_routes, sights
                batch = inputs.prompt_rows(prompts[:count], *how)
                self._indices = {number: i for i, number in enumerate(numbers[:count])}
                self._batch = self._read(params, batch)
                if self._num_routes:
                    visited = np.asarray(self._batch.routes)
                    starts = batch.starts[:count].tolist()
                    self._routes = [
                        visited[start : start + len(prompt)]
                        for start, prompt in zip(starts, prompts, strict=False)
                    ]
                self._done.prefill_tokens += sum(map(len, prompts[:count]))
                self._done.prefill_positions += batch.tokens.size
            assert self._batch is not None
            indices = {s: self._indices[s.request] for s in entering if s.request in self._indices}
            if self._num_routes:
                for sample, index in indices.items():
                    sample.completion.routes = [self._routes[index]]
            yield self._batch, indices
            entering = entering[len(indices) :]
