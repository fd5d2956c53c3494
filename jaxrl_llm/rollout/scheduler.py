"""What the host decides: which sample stands in which slot, and in which pages.

Decisions follow from requests and replicated outputs alone, so they are the same on every host.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.rollout import requests
from jaxrl_llm.rollout.pages import Pages
from jaxrl_llm.rollout.programs import Outputs
from jaxrl_llm.rollout.requests import Completion, Decode, Progress, Request, SamplingParams


class Sample:
    """One sample from its submission to its end: number `index` of request `number`."""

    def __init__(self, number: int, index: int, request: Request):
        self.request, self.index, self.slot = number, index, -1  # -1: it waits
        self.prompt, self.params = request.tokens, request.params[index]
        self.begun = request.tokens[len(request.tokens) - request.begun :]
        self.routes, self.sights, self.offset = request.routes, request.sights, request.offset
        self.key = request.keys[index]
        self.keeps, self.continues = request.keeps, request.continues
        self.pages: list[int] = []  # that it holds, in order of its positions
        self.shared = 0  # tokens in its pages as it enters
        # Pages that are to be filled as it enters, and where they begin in its prompt.
        self.writes: list[tuple[int, int]] = []
        self.completion = Completion()
        self.error: Exception | None = None

    @property
    def age(self) -> tuple[int, int]:  # the lowest came first
        return self.request, self.index

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion.tokens)

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.completion.tokens)

    @property
    def params_left(self) -> SamplingParams:
        """Those of the tokens that it may still get."""
        left = self.most_tokens - self.num_tokens
        return dataclasses.replace(self.params, max_tokens=left)

    @property
    def is_fresh(self) -> bool:
        """Whether its prompt is to be read whole, with those of others; else from `shared` on."""
        return not self.shared and not self.completion.tokens

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
    """What pages hold of a sample that ended."""

    shard: int
    pages: list[int]
    tokens: tuple[int, ...]

    def shared_with(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens a prompt begins with that need not be read: not all of it."""
        pairs = zip(self.tokens, prompt[:-1], strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(prompt) - 1)
        )


class Scheduler:
    """Keeps slots full: gives free slots to samples in order of arrival, lowest slot first.

    A sample holds pages for its tokens and those of its next chunk. If there are none left, pages
    of samples that ended are taken, and then those of the sample that came last: it waits again.
    """

    def __init__(self, decode: Decode, pages: Pages, chunk_tokens: int):
        """
        Args:
          decode: Turns tokens into text; called only for samples with stop strings.
          chunk_tokens: Most that a chunk of steps gives a sample.
        """
        self._decode, self._pages, self._chunk_tokens = decode, pages, chunk_tokens
        self._num_slots = pages.layout.num_slots
        self._numbers = itertools.count()
        self.requests: dict[int, list[Sample]] = {}  # unfinished, in order of arrival
        self.waiting: collections.deque[Sample] = collections.deque()
        self.active: dict[int, Sample] = {}  # by slot
        self.reread_tokens = self.num_put_back = 0
        # By request and index of samples that ended, in the order of their ends: what they keep,
        # and how many tokens those kept whose pages others needed. Nothing is that of None.
        self._kept: dict[tuple[int, int] | None, Kept] = {}
        self._lost: dict[tuple[int, int] | None, int] = {}
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
                self._give(sample)
        self.waiting = collections.deque(s for s in self.waiting if s.request != number)
        return completions

    def forget(self, number: int, index: int) -> None:
        """Keeps nothing for who continues a sample."""
        if kept := self._kept.pop((number, index), None):
            self._pages.give(kept.pages)
        self._lost.pop((number, index), None)

    def to_read(self, entering: Sequence[Sample]) -> list[int]:
        """Returns the requests whose prompts are to be read whole: those that enter or wait."""
        samples = itertools.chain(entering, self.waiting)
        fresh = (s.request for s in samples if s.is_fresh and s.continues not in self._kept)
        return list(dict.fromkeys(fresh))

    def lengths(self, beyond: int = 0) -> list[int]:
        """Returns the tokens so far of each active sequence that may get over `beyond` more."""
        return [s.num_tokens for s in self.active.values() if s.most_tokens > s.num_tokens + beyond]

    def table(self) -> np.ndarray:
        """Returns the pages of all slots."""
        rows = ((slot, sample.pages) for slot, sample in self.active.items())
        return self._pages.layout.table(rows, self._num_slots)

    def admit(self) -> list[Sample]:
        """Returns the samples that enter a slot now: as many as are waiting, and slots and pages.

        Who continues a sample, or was put back, gets the pages that still hold its tokens. Pages
        of those that ended are taken where needed, the one that ended first before others, where
        possible of none who waits.
        """
        if not self.waiting or len(self.active) == self._num_slots:
            return []
        entered: list[Sample] = []
        elsewhere: list[Sample] = []
        free: dict[int, list[int]] = collections.defaultdict(list)  # by shard, the lowest last
        for slot in reversed(range(self._num_slots)):
            if slot not in self.active:
                free[self._pages.layout.shard(slot)].append(slot)
        while self.waiting and free:
            sample = self.waiting.popleft()
            shard = self._shard_for(sample, free)
            if shard not in free:
                elsewhere.append(sample)  # its pages are those of slots that are in use
                continue
            if not self._hold(sample, shard):
                self.waiting.appendleft(sample)
                break  # no page: whoever came later waits too
            sample.slot = free[shard].pop()
            if not free[shard]:
                del free[shard]
            self._stale.discard(sample.slot)
            self.active[sample.slot] = sample
            entered.append(sample)
        self.waiting.extendleft(reversed(elsewhere))
        return entered

    def _shard_for(self, sample: Sample, free: Iterable[int]) -> int:
        """Returns where a sample is to enter: one of `free`, unless what it continues is not."""
        if kept := self._kept.get(sample.continues):
            return kept.shard
        pages = self._pages
        # Where its prompt is, or else where most pages are free.
        order = lambda at: (bool(pages.of_prompt(at, sample.request)), pages.num_free(at), -at)  # noqa: E731
        return max(free, key=order)

    def _hold(self, sample: Sample, shard: int) -> bool:
        """Gives a sample the pages of its tokens; returns whether there are enough."""
        pages, layout = self._pages, self._pages.layout
        size, source = layout.page_tokens, sample.continues
        kept = self._kept.pop(source, None)
        if kept:
            shared = kept.shared_with(sample.prompt)
            if shared % size and pages.is_shared(kept.pages[shared // size]):
                shared -= shared % size
            held = kept.pages[: layout.count(shared)]
            pages.give(kept.pages[len(held) :])
        else:
            held = pages.of_prompt(shard, sample.request)
            shared = len(held) * size if sample.completion.tokens else 0
            pages.share(held)  # before others are given back
        soon = min(sample.num_tokens + self._chunk_tokens, sample.most_tokens)
        if not self._make_room(shard, layout.count(soon) - len(held) + self._growing(shard)):
            if kept:
                self._kept[source] = Kept(shard, held, kept.tokens[:shared])
            else:
                pages.give(held)
            return False
        count = layout.count(sample.num_tokens)
        sample.shared = shared
        sample.pages = [*held, *pages.take(shard, count - len(held))]
        if kept and sample.routes is not None:
            sample.completion.routes = [sample.routes[:shared]] if shared else []
        if sample.completion.tokens:
            self.reread_tokens += sample.num_tokens - shared
        elif not kept:
            self.reread_tokens += self._lost.pop(source, 0)
        sample.writes = []
        if sample.is_fresh:
            sample.writes = [(sample.pages[i], i * size) for i in range(len(held), count)]
            if not held and len(self.requests[sample.request]) > 1:
                full = sample.pages[: len(sample.prompt) // size]
                pages.keep_prompt(shard, sample.request, full)
        return True

    def _growing(self, shard: int) -> int:
        """Returns the samples of a shard that may need another page.

        They get it before another enters, which would be put back at once.
        """
        layout = self._pages.layout
        there = [s for slot, s in self.active.items() if layout.shard(slot) == shard]
        if self._pages.num_free(shard) >= len(there) + layout.pages_per_slot:
            return len(there)  # enough for any sample, whoever grows
        return sum(layout.count(s.most_tokens - 1) > len(s.pages) for s in there)

    def _make_room(self, shard: int, count: int) -> bool:
        """Takes pages of samples that ended, until so many are free; returns whether they are."""
        while self._pages.num_free(shard) < count:
            keys = [key for key, kept in self._kept.items() if kept.shard == shard]
            if not keys:
                return False
            wanted = {sample.continues for sample in self.waiting}
            oldest = next((key for key in keys if key not in wanted), keys[0])
            kept = self._kept.pop(oldest)
            self._lost[oldest] = len(kept.tokens)
            self._pages.give(kept.pages)
        return True

    def reserve(self, num_tokens: int, *, by_force: bool) -> bool:
        """Gives each active sample the pages of its next `num_tokens`, the oldest first.

        If there are too few, `by_force` takes those of samples that ended, and puts the youngest
        back; else nothing happens, and the result is false.
        """
        layout, pages = self._pages.layout, self._pages

        def missing(sample: Sample) -> int:
            # The last token is not in the cache.
            end = min(sample.num_tokens + num_tokens, sample.most_tokens) - 1
            return max(0, layout.count(end) - len(sample.pages))

        samples = sorted(self.active.values(), key=lambda sample: sample.age)
        if not by_force:
            wanted = collections.Counter[int]()
            for sample in samples:
                wanted[layout.shard(sample.slot)] += missing(sample)
            if any(count > pages.num_free(shard) for shard, count in wanted.items()):
                return False
        for sample in samples:
            shard = layout.shard(sample.slot)
            while sample.slot >= 0 and not self._make_room(shard, missing(sample)):
                there = (s for s in self.active.values() if layout.shard(s.slot) == shard)
                self._put_back(max(there, key=lambda s: s.age))
            if sample.slot >= 0:
                sample.pages += pages.take(shard, missing(sample))
        return True

    def _put_back(self, sample: Sample) -> None:
        self.num_put_back += 1
        del self.active[sample.slot]
        self._stale.add(sample.slot)
        self._give(sample)
        sample.slot, sample.shared = -1, 0
        self.waiting.appendleft(sample)

    def _give(self, sample: Sample) -> None:
        self._pages.give(sample.pages)
        sample.pages = []

    def take_first(
        self, entered: Sequence[Sample | None], sampled: Outputs, version: int = 0
    ) -> None:
        """Takes in what `insert` sampled; the columns are in the order of `entered`."""
        for column, sample in enumerate(entered):
            if sample is not None:
                self._take(sample, sampled, column, version)

    def compact(self, num_slots: int) -> list[tuple[int, int]]:
        """Moves every active sample below slot `num_slots`; returns the moves (from, to)."""
        behind = sorted(slot for slot in self.active if slot >= num_slots)
        free = [slot for slot in range(num_slots) if slot not in self.active]
        moves = list(zip(behind, free, strict=False))
        for source, target in moves:
            self.active[target] = self.active.pop(source)
            self.active[target].slot = target
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
                self._keep(sample)
            self._give(sample)
        return count

    def _keep(self, sample: Sample) -> None:
        held, layout = sample.tokens[:-1], self._pages.layout  # the last was never read
        pages = sample.pages[: layout.count(len(held))]
        sample.pages = sample.pages[len(pages) :]
        kept = Kept(layout.shard(sample.slot), pages, held)
        self._kept[sample.request, sample.index] = kept

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
