"""Page allocator of the KV cache: free lists, reference counts, and cached pages.

The cache is split into pages of equal size. A sample holds a list of pages in the order of its
positions, and shares full pages with other samples that begin with the same tokens. Pages are
sharded over devices like slots: each shard has the pages of its own slots.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl_llm.rollout.engine.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Sizes of a paged KV cache."""

    num_pages: int  # over all shards
    page_tokens: int
    max_tokens: int  # of the longest sequence
    num_slots: int
    num_shards: int = 1

    @property
    def pages_per_slot(self) -> int:
        """Pages that the longest sequence needs."""
        return self.num_pages_for(self.max_tokens)

    def num_pages_for(self, num_tokens: int) -> int:
        """Number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_tokens)

    def shard_of_slot(self, slot: int) -> int:
        """The shard that a slot belongs to."""
        return slot * self.num_shards // self.num_slots

    def table(self, rows: Iterable[tuple[int, Sequence[int]]], num_rows: int) -> np.ndarray:
        """Page table [num_rows, pages_per_slot] int32 from (row, its pages), padded with page 0."""
        table = np.zeros((num_rows, self.pages_per_slot), np.int32)
        for row, pages in rows:
            table[row, : len(pages)] = pages
        return table


class PageAllocator:
    """Allocates pages and counts the samples that hold each."""

    def __init__(self, layout: CacheLayout, *, prefix_caching: bool = False):
        """With `prefix_caching`, registered pages stay when no sample holds them any more. They
        count as free, and are evicted when there are no others.
        """
        self.layout, self.prefix_caching = layout, prefix_caching
        self._ref_counts = [0] * layout.num_pages
        self._shard_pages = layout.num_pages // layout.num_shards
        # Popped from the end, so low page ids go first.
        self._free = [
            [*reversed(range(shard * self._shard_pages, (shard + 1) * self._shard_pages))]
            for shard in range(layout.num_shards)
        ]
        self._cache = PrefixCache(layout.num_shards)
        self.peak_used = 0

    @property
    def num_used(self) -> int:
        """Number of pages that samples hold."""
        return self.layout.num_pages - sum(map(self.num_free, range(self.layout.num_shards)))

    def num_free(self, shard: int) -> int:
        """Number of pages of a shard that no sample holds, cached ones included."""
        return len(self._free[shard]) + self._cache.num_unused(shard)

    def allocate(self, shard: int, count: int) -> list[int]:
        """Allocates `count` pages, each with one reference; that many must be free."""
        free, num_free = self._free[shard], self.num_free(shard)
        assert count <= num_free, f"{count} pages wanted, {num_free} free"
        allocated = [free.pop() if free else self._cache.evict(shard) for _ in range(count)]
        for page in allocated:
            self._ref_counts[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return allocated

    def add_reference(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page."""
        for page in pages:
            if not self._ref_counts[page]:
                self._cache.mark_used(page // self._shard_pages, page)
            self._ref_counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drops a reference to each page of a sample, in the order of its positions.

        Those without any are free. Of its cached pages the last is evicted first: the others may
        be the beginning of more sequences.
        """
        cached = []
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page]:
                continue
            if self.prefix_caching and page in self._cache:
                cached.append(page)
            else:
                self._cache.remove(page)
                self._free[page // self._shard_pages].append(page)
        for page in reversed(cached):
            self._cache.mark_unused(page // self._shard_pages, page)

    def is_shared(self, page: int) -> bool:
        """Whether a page has several references; it must not be written then."""
        return self._ref_counts[page] > 1

    def cached_prefix(self, shard: int, hashes: Sequence[bytes]) -> list[int]:
        """The registered pages of the longest prefix of a sequence; see `PrefixCache.prefix`."""
        return self._cache.prefix(shard, hashes)

    def cached_tail(
        self, shard: int, parent: bytes, tokens: Sequence[int]
    ) -> tuple[int | None, int]:
        """(page, its number of tokens) that continues a prefix but is not full, or (None, 0)."""
        return self._cache.tail(shard, parent, tokens)

    def claim_tail(self, page: int) -> None:
        """Gives a page of `cached_tail` to the one sample that continues it."""
        self._cache.remove(page)
        self._ref_counts[page] = 1

    def register(self, page: int, page_hash: bytes) -> bool:
        """Registers a full page that is in use; false if another one has the same hash."""
        return self._cache.add(page // self._shard_pages, page, page_hash)

    def register_tail(self, page: int, parent: bytes, tokens: tuple[int, ...]) -> None:
        """Registers the last page, not full, of a sample that is about to free it."""
        self._cache.add_tail(page // self._shard_pages, page, parent, tokens)

    def unregister(self, page: int) -> None:
        """Hides a page in use from later samples: its holder will overwrite it."""
        self._cache.remove(page)

    def clear_cache(self) -> None:
        """Forgets all cached pages: after new weights, later samples must not read old ones."""
        for page in self._cache.clear():
            self._free[page // self._shard_pages].append(page)
