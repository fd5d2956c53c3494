"""Prompts that were read: each once, a batch at a time, kept until its samples are placed."""

import weakref
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import programs
from jaxrl_llm.rollout.scheduler import Placement, Scheduler

_TOKENS = 4096  # prompt tokens read at one time, padding included
SMALLEST_WIDTH = 32

Read = Callable[[Params, np.ndarray, np.ndarray], programs.Prefix]


class Prefixes:
    """Reads the prompts of placed samples, and ahead in the queue as far as a batch reaches."""

    def __init__(self, read: Read, max_tokens: int):
        """
        Args:
          read: (params, tokens [P, T], lengths [P]) to what was read.
          max_tokens: The longest prompt.
        """
        self._read, self._max_tokens = read, max_tokens
        self.num_tokens = 0  # of all prompts read so far
        self._rows: dict[int, int] = {}  # request -> its row of the batch
        self._batch: programs.Prefix | None = None
        self._read_with: Callable[[], object] = lambda: None

    def split(
        self, params: Params, placements: list[Placement], scheduler: Scheduler
    ) -> Iterator[tuple[programs.Prefix, list[int], list[Placement]]]:
        """Yields (prefix, rows, placements) of the batches that hold these placements."""
        weights = jax.tree.leaves(params)[0]
        if self._read_with() is not weights:
            # Read with other weights, or never. Weakly held: this must not keep them in memory.
            self._rows = {}
            self._read_with = weakref.ref(weights)
        while placements:
            if placements[0].request not in self._rows:
                self._fill(params, placements[0].request, scheduler)
            assert self._batch is not None
            inside = [p for p in placements if p.request in self._rows]
            yield self._batch, [self._rows[p.request] for p in inside], inside
            placements = placements[len(inside) :]

    def _fill(self, params: Params, first: int, scheduler: Scheduler) -> None:
        prompts: list[tuple[int, ...]] = []
        width = 1
        waiting = scheduler.requests_from(first)
        for number in waiting:
            prompt = scheduler.request(number).tokens
            wider = max(width, _width(len(prompt), self._max_tokens))
            if prompts and (len(prompts) + 1) * wider > _TOKENS:
                break
            prompts.append(prompt)
            width = wider
        self._rows = {number: row for row, number in enumerate(waiting[: len(prompts)])}
        count = _num_rows(len(prompts), width)
        tokens = np.zeros((count, width), np.int32)
        lengths = np.ones(count, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
            self.num_tokens += len(prompt)
        self._batch = self._read(params, tokens, lengths)


def widest(num_prompts: int, prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Returns rows and width of the largest batch in which such prompts are read."""
    width = _width(prompt_tokens, max_tokens)
    return _num_rows(min(num_prompts, max(1, _TOKENS // width)), width), width


def batches(
    num_prompts: int, prompt_tokens: int, max_tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (tokens, lengths) of every shape in which so many prompts of any length are read."""
    for width in sorted({_width(n, max_tokens) for n in range(1, prompt_tokens + 1)}):
        rows, _ = widest(num_prompts, width, max_tokens)
        yield np.zeros((rows, width), np.int32), np.ones(rows, np.int32)


def _width(length: int, max_tokens: int) -> int:
    return bucket(length, smallest=SMALLEST_WIDTH, largest=max_tokens)


def _num_rows(count: int, width: int) -> int:
    return min(bucket(count), max(1, _TOKENS // width))
