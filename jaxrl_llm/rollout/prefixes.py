"""Prompts that were read: each once, a batch at a time, kept until its samples are placed."""

import bisect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data.packing import bucket, pack
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import prefill
from jaxrl_llm.rollout.prefill import Prefix, Prompts
from jaxrl_llm.rollout.scheduler import Placement, Scheduler

_TOKENS = 4096  # prompt tokens read at one time, padding included
SMALLEST_WIDTH = 32

Read = Callable[[Params, Prompts], Prefix]


class Prefixes:
    """Reads the prompts of placed samples, and ahead in the queue as far as a batch reaches."""

    def __init__(self, read: Read, max_tokens: int):
        """
        Args:
          read: Parameters and prompts to what was read.
          max_tokens: The longest prompt.
        """
        self._read, self._max_tokens = read, max_tokens
        self.num_tokens = 0  # of all prompts read so far
        self.num_positions = 0  # that were computed for them, padding included
        self._places: dict[int, int] = {}  # request -> its place in the batch
        self._batch: Prefix | None = None
        self._read_with: Callable[[], object] = lambda: None

    def split(
        self, params: Params, placements: list[Placement], scheduler: Scheduler
    ) -> Iterator[tuple[Prefix, list[int], list[Placement]]]:
        """Yields (prefix, places, placements) of the batches that hold these placements."""
        weights = jax.tree.leaves(params)[0]
        if self._read_with() is not weights:
            # Read with other weights, or never. Weakly held: this must not keep them in memory.
            self._places = {}
            self._read_with = weakref.ref(weights)
        while placements:
            if placements[0].request not in self._places:
                self._fill(params, placements[0].request, scheduler)
            assert self._batch is not None
            inside = [p for p in placements if p.request in self._places]
            yield self._batch, [self._places[p.request] for p in inside], inside
            placements = placements[len(inside) :]

    def _fill(self, params: Params, first: int, scheduler: Scheduler) -> None:
        waiting = scheduler.requests_from(first)[: _TOKENS // SMALLEST_WIDTH]
        prompts = [scheduler.request(number).tokens for number in waiting]
        count = _num_fitting([len(prompt) for prompt in prompts], self._max_tokens)
        batch = lay_out(prompts[:count], self._max_tokens)
        self._places = {number: place for place, number in enumerate(waiting[:count])}
        self._batch = self._read(params, batch)
        self.num_tokens += sum(map(len, prompts[:count]))
        self.num_positions += batch.tokens.size


def lay_out(prompts: Sequence[Sequence[int]], max_tokens: int) -> Prompts:
    """Returns prompts in rows as wide as the longest of them needs, short ones sharing a row.

    Rows and width are of a few sizes, and they alone decide every shape. Prompt i is at place i.

    Args:
      max_tokens: The widest row, whatever its factor.
    """
    lengths = [len(prompt) for prompt in prompts]
    width = _width(max(lengths), max_tokens)
    rows = _rows(lengths, width)
    batch = _empty(_num_rows(max(len(rows), -(-len(prompts) // _share(width))), width), width)
    for row, members in enumerate(rows):
        at = 0
        for segment, i in enumerate(members, 1):
            inside = slice(at, at + lengths[i])
            batch.tokens[row, inside] = prompts[i]
            batch.positions[row, inside] = np.arange(lengths[i])
            batch.segment_ids[row, inside] = segment
            batch.starts[i], batch.lengths[i] = row * width + at, lengths[i]
            at = inside.stop
    return batch


def widest(num_prompts: int, prompt_tokens: int, max_tokens: int) -> Prompts:
    """Returns an empty batch of the largest shape in which such prompts are read."""
    width = _width(prompt_tokens, max_tokens)
    return _empty(_num_rows(num_prompts, width), width)


def batches(num_prompts: int, prompt_tokens: int, max_tokens: int) -> Iterator[Prompts]:
    """Yields an empty batch of every shape in which so many prompts of any length are read."""
    for width in sorted({_width(n, max_tokens) for n in range(1, prompt_tokens + 1)}):
        fewest = -(-num_prompts // _share(width))
        for rows in sorted({_num_rows(n, width) for n in range(fewest, num_prompts + 1)}):
            yield _empty(rows, width)


def _empty(rows: int, width: int) -> Prompts:
    places = rows * _share(width)
    tokens, positions, segment_ids = np.zeros((3, rows, width), np.int32)
    starts, lengths = np.zeros(places, np.int32), np.ones(places, np.int32)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "positions": positions,
        "segment_ids": segment_ids,
        "starts": starts,
        "lengths": lengths,
    }
    return Prompts(**fields)


def _num_fitting(lengths: Sequence[int], max_tokens: int) -> int:
    """Returns how many of these prompts, from the first on, are read together."""

    def too_many(count: int) -> bool:
        width = _width(max(lengths[:count]), max_tokens)
        most = _num_rows(count, width)
        return count > most * _share(width) or len(_rows(lengths[:count], width)) > most

    return 1 + bisect.bisect_left(range(2, len(lengths) + 1), True, key=too_many)


def _rows(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Returns which prompts share each row."""
    return pack(lengths, width) if _share(width) > 1 else [[i] for i in range(len(lengths))]


def _share(width: int) -> int:
    """Returns how many prompts a row has room for, in the mean over a batch."""
    return max(1, width // SMALLEST_WIDTH) if width <= prefill.PIECE_TOKENS else 1


def _width(length: int, max_tokens: int) -> int:
    return bucket(length, smallest=SMALLEST_WIDTH, largest=max_tokens)


def _num_rows(count: int, width: int) -> int:
    return min(bucket(count), max(1, _TOKENS // width))
