"""Continuous-batching scheduler on the host: slots and KV-cache pages for samples.

Decisions depend only on requests and replicated outputs, so every host makes the same ones.
"""

import collections
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.rollout.engine import host_inputs, prefix_cache, requests
from jaxrl_llm.rollout.engine.device_programs import Outputs
from jaxrl_llm.rollout.engine.page_allocator import PageAllocator
from jaxrl_llm.rollout.engine.requests import Completion, Decode, Progress, Request
from jaxrl_llm.rollout.engine.sample import Sample


class RetainedPages(NamedTuple):
    """KV-cache pages retained from a finished sample, for a request that continues it."""

    shard: int
    pages: list[int]
    tokens: tuple[int, ...]
    weights_epoch: int = 0  # as of the sample
    slot: int = -1  # reserved for the states of its layers; -1: none is needed

    def shared_prefix_length(self, prompt: Sequence[int]) -> int:
        """Length of the prompt prefix that is in the cache, less than the prompt's own length."""
        pairs = zip(self.tokens, prompt[:-1], strict=False)
        return next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(prompt) - 1)
        )


class CachedPrefix(NamedTuple):
    """Pages that hold the first tokens of an entering sample already."""

    pages: Sequence[int] = ()  # full ones, to be shared
    num_tokens: int = 0  # of prefill that they save; 0: the whole prompt is prefilled
    tail: int | None = None  # the page after them, not full, to be continued


class Scheduler:
    """Keeps slots full: assigns free slots to samples in order of arrival, lowest slot first.

    A sample holds pages for its tokens and those of its next chunk. If pages run out, cached ones
    that no sample holds are evicted, then those retained from finished samples; then the last
    sample to arrive is preempted, and its tokens are recomputed when it enters again.

    If layers keep a state or a ring by slot, pages alone do not suffice to go on with a sequence.
    Then a finished sample whose pages are retained keeps its slot too, until another sample needs
    the slot; and what is preempted or evicted is read again from its first token.
    """

    def __init__(
        self,
        decode: Decode,
        pages: PageAllocator,
        chunk_tokens: int,
        *,
        pages_resume: bool = True,
    ):
        """
        Args:
          decode: Detokenizes; called only for samples with stop strings.
          chunk_tokens: Most tokens per sample and chunk of steps.
          pages_resume: Whether a sequence can go on from the pages of its tokens alone; it cannot
            if layers keep a state or a ring by slot.
        """
        self._pages_resume = pages_resume
        self._parked: dict[int, tuple[int, int]] = {}  # reserved slot -> key of `_retained`
        self._decode, self._pages, self._chunk_tokens = decode, pages, chunk_tokens
        self._num_slots = pages.layout.num_slots
        self._request_ids = itertools.count()
        self.requests: dict[int, list[Sample]] = {}  # unfinished, in order of arrival
        self.waiting: collections.deque[Sample] = collections.deque()
        self.active: dict[int, Sample] = {}  # by slot
        self.recomputed_tokens = self.num_preempted = 0
        # Prompt tokens looked up in the prefix cache, and those found; a request counts once.
        self.prefix_cache_queries = self.prefix_cache_hits = 0
        self._weights_epoch = 0
        # Of one call of `schedule`: requests whose whole prompts are prefilled, and registered
        # pages that chunked prefill has yet to write, which happens after all whole prompts.
        self._whole_prompts: set[int] = set()
        self._unwritten: set[int] = set()
        # By (request, index) of finished samples, in the order they ended: retained pages, and the
        # number of cached tokens of those whose pages were evicted. None is never a key.
        self._retained: dict[tuple[int, int] | None, RetainedPages] = {}
        self._evicted_tokens: dict[tuple[int, int] | None, int] = {}
        self._unreported: dict[Sample, int] = {}  # in order; the first token not yet reported
        self._stale: set[int] = set()

    def add(self, request: Request) -> int:
        """Queues the samples of a request; returns its number."""
        if request.continues and request.num_prompt_top is not None:
            self.free_retained(*request.continues)
        number = next(self._request_ids)
        samples = [Sample(number, i, request) for i in range(len(request.params))]
        if samples:
            self.requests[number] = samples
            self.waiting.extend(samples)
            if self._pages.prefix_caching or len(samples) > 1:
                hashes = prefix_cache.page_hashes(
                    request.tokens,
                    self._pages.layout.page_tokens,
                    self._cache_scope(samples[0]),
                    request.image_inputs,
                )
                for sample in samples:
                    sample.page_hashes = list(hashes)
        return number

    def _cache_scope(self, sample: Sample) -> bytes:
        """Samples share pages in a scope: of an adapter, or of a request without prefix caching."""
        if not self._pages.prefix_caching:
            return str(sample.request).encode()
        return str(sample.adapter).encode() if sample.adapter else b""

    def drop_cache(self) -> None:
        """Forgets all cached pages, as the weights or the pages themselves change."""
        self._pages.clear_cache()
        self._weights_epoch += 1

    def completions(self, number: int) -> list[Completion]:
        """The completions of an unfinished request; they grow until their samples end."""
        return [sample.completion for sample in self.requests.get(number, ())]

    def abort(self, number: int) -> list[Completion]:
        """Aborts an unfinished request; returns its completions so far."""
        completions = self.completions(number)
        for index in range(len(completions)):
            self.free_retained(number, index)
        for sample in self.requests.pop(number, ()):
            self._unreported.pop(sample, None)
            if not sample.completion.finish_reason:
                sample.completion.finish_reason = "abort"
            if self.active.get(sample.slot) is sample:
                del self.active[sample.slot]
                self._stale.add(sample.slot)
                self._free_pages(sample)
        self.waiting = collections.deque(s for s in self.waiting if s.request != number)
        return completions

    def free_retained(self, number: int, index: int) -> None:
        """Frees the KV-cache pages retained for a request that would continue a sample."""
        if retained := self._retained.pop((number, index), None):
            self._pages.free(retained.pages)
            self._parked.pop(retained.slot, None)
        self._evicted_tokens.pop((number, index), None)

    def requests_to_prefill(self, entering: Sequence[Sample]) -> list[int]:
        """Requests, entering or waiting, whose whole prompts need prefill."""
        samples = itertools.chain(entering, self.waiting)
        fresh = {
            s.request: s
            for s in samples
            if s.needs_full_prefill and s.continued_sample not in self._retained
        }
        if not self._pages.prefix_caching:
            return list(fresh)
        # Those that will find their beginnings in the cache, or in pages of requests before them.
        planned: set[bytes] = set()
        size, now = self._pages.layout.page_tokens, {sample.request for sample in entering}
        shards = range(self._pages.layout.num_shards)
        numbers = []
        for number, sample in fresh.items():
            hashes = sample.page_hashes
            own = itertools.takewhile(planned.__contains__, hashes)
            count = max(len(list(own)), *(len(self._cached(shard, sample)) for shard in shards))
            count = min(count, (len(sample.prompt) - 1) // size)
            if number in now or not self._saves_prefill(sample, count * size):
                numbers.append(number)
                planned.update(hashes)
        return numbers

    def active_lengths(self, beyond: int = 0) -> list[int]:
        """Lengths of the active sequences that may grow by more than `beyond` tokens."""
        return [s.num_tokens for s in self.active.values() if s.max_tokens > s.num_tokens + beyond]

    def page_table(self) -> np.ndarray:
        """Page table of all slots."""
        rows = ((slot, sample.pages) for slot, sample in self.active.items())
        return self._pages.layout.table(rows, self._num_slots)

    def schedule(self, prefilled: Collection[int] = ()) -> list[Sample]:
        """Moves waiting samples into free slots while there are pages; returns those that entered.

        A sample that continues another, was preempted, or begins as earlier ones, reuses the pages
        that still hold its tokens. Retained pages are evicted where needed, oldest first, those
        that a waiting sample continues last. Samples may wait for the next call to read pages that
        this one fills.

        Args:
          prefilled: Requests whose whole prompts are prefilled already.
        """
        self._whole_prompts, self._unwritten = set(prefilled), set()
        if not self.waiting or len(self.active) == self._num_slots:
            return []
        entered: list[Sample] = []
        deferred: list[Sample] = []
        # By shard, the lowest last, reserved ones first.
        free_slots: dict[int, list[int]] = collections.defaultdict(list)
        by_use = sorted(range(self._num_slots), key=lambda slot: (slot in self._parked, slot))
        for slot in reversed(by_use):
            if slot not in self.active:
                free_slots[self._pages.layout.shard_of_slot(slot)].append(slot)
        while self.waiting and free_slots:
            sample = self.waiting.popleft()
            shard = self._shard_for(sample, free_slots)
            if shard not in free_slots:
                deferred.append(sample)  # its pages belong to a shard without a free slot
                continue
            cached = self._cached_prefix(sample, shard)
            if cached is None:
                deferred.append(sample)  # the pages that it reads are written in this round
                continue
            if not self._allocate(sample, shard, cached):
                self.waiting.appendleft(sample)
                break  # out of pages: later arrivals wait too
            sample.slot = self._take_slot(sample, free_slots[shard])
            if not free_slots[shard]:
                del free_slots[shard]
            self._stale.discard(sample.slot)
            self.active[sample.slot] = sample
            entered.append(sample)
        self.waiting.extendleft(reversed(deferred))
        return entered

    def _take_slot(self, sample: Sample, free_slots: list[int]) -> int:
        """Removes and returns the slot for a sample: that of the state it continues, or the last.

        A slot that was reserved for another sequence ends what is retained of that.
        """
        own = next((s for s, k in self._parked.items() if k == sample.continued_sample), -1)
        self._parked.pop(own, None)
        if own in free_slots and sample.num_cached_tokens:
            free_slots.remove(own)
            return own
        slot = free_slots.pop()
        if key := self._parked.get(slot):
            self._evict(key)
        return slot

    def _evict(self, key: tuple[int, int] | None) -> None:
        """Frees what is retained of a finished sample: the request that continues it recomputes."""
        retained = self._retained.pop(key)
        self._parked.pop(retained.slot, None)
        self._evicted_tokens[key] = len(retained.tokens)
        self._pages.free(retained.pages)

    def _shard_for(self, sample: Sample, free_shards: Iterable[int]) -> int:
        """The shard for a sample: that of the pages it continues, even if full; else a free one."""
        if retained := self._retained.get(sample.continued_sample):
            return retained.shard
        pages = self._pages
        # Prefer the shard with most pages of its tokens, then the one with most free pages.
        preference = lambda shard: (  # noqa: E731
            len(self._cached(shard, sample)),
            pages.num_free(shard),
            -shard,
        )
        return max(free_shards, key=preference)

    def _cached(self, shard: int, sample: Sample) -> list[int]:
        """Pages of a shard that hold the first tokens of a sample."""
        return self._pages.cached_prefix(shard, sample.page_hashes)

    def _cached_prefix(self, sample: Sample, shard: int) -> CachedPrefix | None:
        """The cached beginning of a sample; None: it is written after others have entered."""
        if sample.continued_sample in self._retained:
            return CachedPrefix()
        size, is_new = self._pages.layout.page_tokens, not sample.completion.tokens
        pages = self._cached(shard, sample)
        if not is_new and not self._pages_resume:
            return CachedPrefix()
        if is_new and not self._pages.prefix_caching:
            return CachedPrefix(pages)
        # At least one token is computed: the next one is sampled from its logits.
        read, tail = pages[: (sample.num_tokens - 1) // size], None
        count = len(read) * size
        if self._pages.prefix_caching and len(read) == len(pages) and not sample.has_images(count):
            parent = sample.page_hashes[len(read) - 1] if read else self._cache_scope(sample)
            rest = sample.token_range(count, min(count + size, sample.num_tokens) - 1)
            tail, num_more = self._pages.cached_tail(shard, parent, rest)
            count += num_more
        whole = is_new and sample.request in self._whole_prompts
        if is_new and (whole or not self._saves_prefill(sample, count)):
            return CachedPrefix(pages)
        return None if self._unwritten.intersection(read) else CachedPrefix(read, count, tail)

    def _saves_prefill(self, sample: Sample, num_cached: int) -> bool:
        """Whether so many cached tokens save a quarter of the work, or more.

        Otherwise the whole prompt is better prefilled: prompts are packed then, and one prefill
        serves all samples of the request that have not entered. With cached tokens, each of these
        computes its last page. Log-probs of a prompt need the states of all of its tokens.
        """
        if sample.num_prompt_top is not None:
            return False
        length, page = len(sample.prompt), self._pages.layout.page_tokens
        siblings = self.requests[sample.request]
        num_new = sum(s.slot < 0 and not s.completion.tokens for s in siblings)
        last_page = length - (length - 1) // page * page
        others = (num_new - 1) * max(last_page, host_inputs.min_chunk_tokens())
        return num_cached > 0 and 4 * (length - num_cached + others) <= 3 * length

    def _allocate(self, sample: Sample, shard: int, cached: CachedPrefix) -> bool:
        """Allocates the pages of a sample's tokens; returns whether there were enough."""
        pages, layout = self._pages, self._pages.layout
        size, continued_sample = layout.page_tokens, sample.continued_sample
        retained = self._retained.pop(continued_sample, None)
        if retained:
            shared = retained.shared_prefix_length(sample.prompt)
            if shared % size and pages.is_shared(retained.pages[shared // size]):
                shared -= shared % size
            elif shared % size:
                pages.unregister(retained.pages[shared // size])
            if not self._pages_resume and shared < len(retained.tokens):
                shared = 0  # the state is that after all of them
            reused = retained.pages[: layout.num_pages_for(shared)]
            pages.free(retained.pages[len(reused) :])
        else:
            reused, shared = list(cached.pages), cached.num_tokens
            pages.add_reference(reused)  # before others are evicted
        target_tokens = min(sample.num_tokens + self._chunk_tokens, sample.max_tokens)
        if not self._evict_retained(
            shard, layout.num_pages_for(target_tokens) - len(reused) + self._num_growing(shard)
        ):
            if retained:
                self._retained[continued_sample] = retained._replace(
                    pages=reused, tokens=retained.tokens[:shared]
                )
            else:
                pages.free(reused)
            return False
        num_pages = layout.num_pages_for(sample.num_tokens)
        if cached.tail is not None:
            pages.claim_tail(cached.tail)
            reused.append(cached.tail)
        sample.num_cached_tokens = shared
        sample.pages = [*reused, *pages.allocate(shard, num_pages - len(reused))]
        if retained and sample.routes is not None:
            sample.completion.routes = [sample.routes[:shared]] if shared else []
        if sample.completion.tokens:
            self.recomputed_tokens += sample.num_tokens - shared
        elif not retained:
            evicted = self._evicted_tokens.pop(continued_sample, 0)
            self.recomputed_tokens += max(0, evicted - shared)
        if pages.prefix_caching and not sample.completion.tokens and not sample.index:
            self.prefix_cache_queries += len(sample.prompt)
            self.prefix_cache_hits += shared
        sample.page_writes, sample.num_registered = [], 0
        sample.weights_epoch = self._weights_epoch
        if retained and shared:
            sample.weights_epoch = retained.weights_epoch
        if sample.needs_full_prefill:
            self._whole_prompts.add(sample.request)
            sample.page_writes = [
                (sample.pages[i], i * size) for i in range(len(reused), num_pages)
            ]
            self._register_pages(sample, len(sample.prompt))
        elif pages.prefix_caching:
            self._unwritten.update(self._register_pages(sample, sample.num_tokens))
        return True

    def _register_pages(self, sample: Sample, num_tokens: int) -> list[int]:
        """Makes the full pages of its first tokens known to other samples; returns those added."""
        if sample.weights_epoch != self._weights_epoch:
            return []
        size, hashes, added = self._pages.layout.page_tokens, sample.page_hashes, []
        if self._pages.prefix_caching and num_tokens // size > len(hashes):
            parent = hashes[-1] if hashes else self._cache_scope(sample)
            more = sample.token_range(len(hashes) * size, num_tokens)
            start = len(hashes) * size
            hashes += prefix_cache.page_hashes(more, size, parent, sample.sights, start)
        for i in range(sample.num_registered, min(num_tokens // size, len(hashes))):
            if self._pages.register(sample.pages[i], hashes[i]):
                added.append(sample.pages[i])
            sample.num_registered = i + 1
        return added

    def _num_growing(self, shard: int) -> int:
        """Number of active samples of a shard that may need another page.

        That many pages stay free when a sample enters: else it would be preempted at once.
        """
        layout = self._pages.layout
        active = [s for slot, s in self.active.items() if layout.shard_of_slot(slot) == shard]
        if self._pages.num_free(shard) >= len(active) + layout.pages_per_slot:
            return len(active)  # an upper bound will do: pages are plenty
        return sum(layout.num_pages_for(s.max_tokens - 1) > len(s.pages) for s in active)

    def _evict_retained(self, shard: int, count: int) -> bool:
        """Evicts retained pages until `num_pages_for` are free; returns whether they are."""
        while self._pages.num_free(shard) < count:
            keys = [key for key, retained in self._retained.items() if retained.shard == shard]
            if not keys:
                return False
            awaited = {sample.continued_sample for sample in self.waiting}
            self._evict(next((key for key in keys if key not in awaited), keys[0]))
        return True

    def reserve(self, num_tokens: int, *, preempt: bool) -> bool:
        """Allocates the pages of the next `num_tokens` of each active sample, oldest first.

        If there are too few, `preempt` evicts retained pages, then preempts the youngest samples;
        else nothing happens, and the result is false.
        """
        layout, pages = self._pages.layout, self._pages

        def num_missing(sample: Sample) -> int:
            # The last token sampled is not in the cache yet.
            end = min(sample.num_tokens + num_tokens, sample.max_tokens) - 1
            return max(0, layout.num_pages_for(end) - len(sample.pages))

        samples = sorted(self.active.values(), key=lambda sample: sample.arrival)
        if not preempt:
            missing_by_shard = collections.Counter[int]()
            for sample in samples:
                missing_by_shard[layout.shard_of_slot(sample.slot)] += num_missing(sample)
            if any(count > pages.num_free(shard) for shard, count in missing_by_shard.items()):
                return False
        for sample in samples:
            shard = layout.shard_of_slot(sample.slot)
            while sample.slot >= 0 and not self._evict_retained(shard, num_missing(sample)):
                candidates = (
                    s for s in self.active.values() if layout.shard_of_slot(s.slot) == shard
                )
                self._preempt(max(candidates, key=lambda s: s.arrival))
            if sample.slot >= 0:
                sample.pages += pages.allocate(shard, num_missing(sample))
        return True

    def _preempt(self, sample: Sample) -> None:
        """Frees a sample's slot and pages; it waits first in the queue, to be recomputed."""
        self.num_preempted += 1
        del self.active[sample.slot]
        self._stale.add(sample.slot)
        self._free_pages(sample)
        sample.slot, sample.num_cached_tokens = -1, 0
        self.waiting.appendleft(sample)

    def _free_pages(self, sample: Sample) -> None:
        # The last token is not in the cache.
        size, count = self._pages.layout.page_tokens, sample.num_tokens - 1
        is_current = sample.weights_epoch == self._weights_epoch
        if self._pages.prefix_caching and is_current and sample.pages:
            self._register_pages(sample, count)
            full, hashes = count // size, sample.page_hashes
            parent = hashes[full - 1] if full else self._cache_scope(sample)
            if count % size and not sample.has_images(full * size):
                tail = sample.token_range(full * size, count)
                self._pages.register_tail(sample.pages[full], parent, tail)
        self._pages.free(sample.pages)
        sample.pages = []

    def record_inserted(
        self, entered: Sequence[Sample | None], sampled: Outputs, version: int = 0
    ) -> None:
        """Records the outputs of `insert`, whose columns are in the order of `entered`."""
        for column, sample in enumerate(entered):
            if sample is not None and not sample.error:
                self._record_outputs(sample, sampled, column, version)

    def fits_below(self, num_slots: int) -> bool:
        """Whether slots below this one hold all active samples beside the reserved slots there."""
        return len(self.active) + sum(slot < num_slots for slot in self._parked) <= num_slots

    def compact(self, num_slots: int) -> list[tuple[int, int]]:
        """Moves every active sample below slot `num_slots`; returns the moves (from, to)."""
        sources = sorted(slot for slot in self.active if slot >= num_slots)
        taken = self.active.keys() | self._parked.keys()
        free = [slot for slot in range(num_slots) if slot not in taken]
        moves = list(zip(sources, free, strict=False))
        for source, target in moves:
            self.active[target] = self.active.pop(source)
            self.active[target].slot = target
            self._stale.discard(target)
        return moves

    def record_generated(self, sampled: Outputs, version: int = 0) -> int:
        """Records the outputs of `generate`, a column per slot; returns the number of tokens."""
        active = sorted(self.active.items())
        return sum(self._record_outputs(sample, sampled, slot, version) for slot, sample in active)

    def _record_outputs(self, sample: Sample, sampled: Outputs, column: int, version: int) -> int:
        c, stop_strings = sample.completion, sample.params.stop_strings
        num_before = len(c.tokens)
        count = sample.append_outputs(sampled, column, version)
        if count:
            self._unreported.setdefault(sample, num_before)
        ended = sampled.remaining[column] <= 0  # on the device
        if ended:
            c.finish_reason = "stop" if c.tokens[-1] in sample.params.stop_tokens else "length"
        if count and stop_strings:
            try:
                text = [*sample.resumed_tokens, *c.tokens]
                length = requests.num_tokens_to_stop(
                    text,
                    len(sample.resumed_tokens) + num_before,
                    stop_strings,
                    self._decode,
                    sample.params.min_tokens,
                )
                length = max(0, length - len(sample.resumed_tokens))
            except Exception as error:  # in the user's decoder: ends only this sample
                sample.error, c.finish_reason, length = error, "error", 0
            if length:
                for fields in (c.tokens, c.log_probs, c.versions, c.top_log_probs):
                    del fields[length:]
                c.finish_reason = "stop"
        if self._pages.prefix_caching:
            self._register_pages(sample, sample.num_tokens - 1)
        if c.finish_reason:
            del self.active[sample.slot]
            if not ended:
                self._stale.add(sample.slot)
            if sample.retains_pages and c.finish_reason != "error":
                # After what a host ends, the device has gone on: its state is not that of the end.
                is_whole = len(c.tokens) == num_before + count
                self._retain(sample, has_state=bool(ended) and is_whole)
            self._free_pages(sample)
        return count

    def fail(self, sample: Sample, error: Exception) -> None:
        """Ends an active sample with an error."""
        sample.error, sample.completion.finish_reason = error, "error"
        self._unreported.setdefault(sample, len(sample.completion.tokens))
        del self.active[sample.slot]
        self._stale.add(sample.slot)
        self._free_pages(sample)

    def _retain(self, sample: Sample, *, has_state: bool) -> None:
        """Keeps the pages of a finished sample for a request that continues it.

        `has_state`: whether its slot's state is that after all its tokens but the last one.
        """
        key, slot = (sample.request, sample.index), -1
        if not self._pages_resume:
            if not has_state:
                self._evicted_tokens[key] = sample.num_tokens - 1
                return
            slot = sample.slot
            self._parked[slot] = key
        # The last token is not in the cache.
        tokens, layout = sample.tokens[:-1], self._pages.layout
        count, shard = layout.num_pages_for(len(tokens)), layout.shard_of_slot(sample.slot)
        self._retained[key] = RetainedPages(
            shard, sample.pages[:count], tokens, sample.weights_epoch, slot
        )
        self._pages.free(sample.pages[count:])
        sample.pages = []

    def stale_slots(self) -> list[int]:
        """Slots that are free on the host but still active on the device; each is reported once."""
        stale, self._stale = sorted(self._stale), set()
        return stale

    def progress(self) -> list[Progress]:
        """Tokens sampled since the last call; drops finished requests."""
        touched, self._unreported = self._unreported, {}
        for number in {sample.request for sample in touched}:
            if all(sample.completion.finish_reason for sample in self.requests[number]):
                del self.requests[number]
        return [sample.progress(first) for sample, first in touched.items()]
