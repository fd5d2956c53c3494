"""Which pages of the cache hold whose tokens: free ones, and how many samples hold each.

The cache is pages of as many tokens each. A sample holds a list of them in the order of its
positions, and shares those that are full of a prompt with other samples of that prompt. Pages and
slots are split over devices together: each shard has the pages of its own slots.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of a cache."""

    num_pages: int  # of all shards
    page_tokens: int
    max_tokens: int  # of a sequence
    num_slots: int
    num_shards: int = 1

    @property
    def pages_per_slot(self) -> int:
        """Pages of the longest sequence."""
        return self.count(self.max_tokens)

    def count(self, num_tokens: int) -> int:
        """Returns the pages of so many tokens."""
        return -(-num_tokens // self.page_tokens)

    def shard(self, slot: int) -> int:
        """Returns the shard of a slot."""
        return slot * self.num_shards // self.num_slots

    def table(self, rows: Iterable[tuple[int, Sequence[int]]], num_rows: int) -> np.ndarray:
        """Returns [num_rows, pages_per_slot] int32 of (row, its pages); any page fills the rest."""
        table = np.zeros((num_rows, self.pages_per_slot), np.int32)
        for row, pages in rows:
            table[row, : len(pages)] = pages
        return table


class Pages:
    """Free pages, and the counts of those that are held."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self._counts = [0] * layout.num_pages
        here = layout.num_pages // layout.num_shards
        # Taken from the end, so low numbers first.
        self._free = [
            [*reversed(range(shard * here, (shard + 1) * here))]
            for shard in range(layout.num_shards)
        ]
        # By shard and request: the pages that are full of its prompt, while anyone holds them.
        self._prompts: dict[tuple[int, int], list[int]] = {}
        self._prompt_of: dict[int, tuple[int, int]] = {}
        self.most_used = 0

    @property
    def num_used(self) -> int:
        return self.layout.num_pages - sum(map(len, self._free))

    def num_free(self, shard: int) -> int:
        """Returns the free pages of a shard."""
        return len(self._free[shard])

    def take(self, shard: int, count: int) -> list[int]:
        """Returns so many free pages, which their taker now holds alone; there must be as many."""
        free = self._free[shard]
        assert count <= len(free), f"{count} pages wanted, {len(free)} free"
        taken = [free.pop() for _ in range(count)]
        for page in taken:
            self._counts[page] = 1
        self.most_used = max(self.most_used, self.num_used)
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Counts one more holder of each page."""
        for page in pages:
            self._counts[page] += 1

    def give(self, pages: Iterable[int]) -> None:
        """Counts one holder less; pages that nobody holds are free."""
        here = self.layout.num_pages // self.layout.num_shards
        for page in pages:
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free[page // here].append(page)
                if key := self._prompt_of.get(page):
                    self._forget(key)

    def is_shared(self, page: int) -> bool:
        """Returns whether several hold a page: none of them may write to it."""
        return self._counts[page] > 1

    def of_prompt(self, shard: int, request: int) -> list[int]:
        """Returns the pages full of a request's prompt; [] if nobody holds all of them."""
        return self._prompts.get((shard, request), [])

    def keep_prompt(self, shard: int, request: int, pages: list[int]) -> None:
        """Notes that held pages are those of a prompt, so that others may share them."""
        if pages:
            self._prompts[shard, request] = pages
            self._prompt_of.update(dict.fromkeys(pages, (shard, request)))

    def forget_prompts(self) -> None:
        """Shares no page with samples that come later, as the weights have changed."""
        self._prompts, self._prompt_of = {}, {}

    def _forget(self, key: tuple[int, int]) -> None:
        for page in self._prompts.pop(key):
            del self._prompt_of[page]
