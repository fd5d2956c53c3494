"""Page allocator of the KV cache: free lists, reference counts, and prompt sharing.

The cache is split into pages of equal size. A sample holds a list of pages in the order of its
positions, and shares the full pages of its prompt with the other samples of that prompt. Pages are
sharded over devices like slots: each shard has the pages of its own slots.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


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

    def __init__(self, layout: CacheLayout):
        self.layout = layout
        self._ref_counts = [0] * layout.num_pages
        pages_per_shard = layout.num_pages // layout.num_shards
        # Popped from the end, so low page ids go first.
        self._free = [
            [*reversed(range(shard * pages_per_shard, (shard + 1) * pages_per_shard))]
            for shard in range(layout.num_shards)
        ]
        # By (shard, request): the full pages of its prompt, while all of them are in use.
        self._prompt_pages: dict[tuple[int, int], list[int]] = {}
        self._prompt_key: dict[int, tuple[int, int]] = {}
        self.peak_used = 0

    @property
    def num_used(self) -> int:
        return self.layout.num_pages - sum(map(len, self._free))

    def num_free(self, shard: int) -> int:
        """Number of free pages of a shard."""
        return len(self._free[shard])

    def allocate(self, shard: int, count: int) -> list[int]:
        """Allocates `num_pages_for` pages, each with one reference; that many must be free."""
        free = self._free[shard]
        assert count <= len(free), f"{count} pages wanted, {len(free)} free"
        allocated = [free.pop() for _ in range(count)]
        for page in allocated:
            self._ref_counts[page] = 1
        self.peak_used = max(self.peak_used, self.num_used)
        return allocated

    def add_reference(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page."""
        for page in pages:
            self._ref_counts[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Drops a reference to each page, and frees those without any."""
        pages_per_shard = self.layout.num_pages // self.layout.num_shards
        for page in pages:
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                self._free[page // pages_per_shard].append(page)
                if key := self._prompt_key.get(page):
                    self._unregister_prompt(key)

    def is_shared(self, page: int) -> bool:
        """Whether a page has several references; it must not be written then."""
        return self._ref_counts[page] > 1

    def prompt_pages(self, shard: int, request: int) -> list[int]:
        """The full pages of a request's prompt; [] unless all of them are in use."""
        return self._prompt_pages.get((shard, request), [])

    def register_prompt(self, shard: int, request: int, pages: list[int]) -> None:
        """Registers the full pages of a prompt, so that later samples of its request share them."""
        if pages:
            self._prompt_pages[shard, request] = pages
            self._prompt_key.update(dict.fromkeys(pages, (shard, request)))

    def clear_prompts(self) -> None:
        """Clears the prompt registry: after new weights, later samples must not share old pages."""
        self._prompt_pages, self._prompt_key = {}, {}

    def _unregister_prompt(self, key: tuple[int, int]) -> None:
        for page in self._prompt_pages.pop(key):
            del self._prompt_key[page]
