"""Which prompts are read together, and when."""

import weakref
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import inputs, requests
from jaxrl_llm.rollout.prefill import Prefix, Prompts
from jaxrl_llm.rollout.scheduler import Sample, Scheduler
from jaxrl_llm.sharding import telling


class Reader:
    """Reads each prompt once: those of samples that enter, and more of the queue in their batch."""

    def __init__(
        self,
        read: Callable[[Params, Prompts], Prefix],
        max_tokens: int,
        done: requests.Statistics,
        num_routes: int = 0,
        shapes: Sequence[inputs.Shape] = (),
    ):
        """`shapes` as in `inputs.prompt_rows`."""
        self._read, self._max_tokens, self._done = read, max_tokens, done
        self._num_routes = num_routes  # of a token, that are kept
        self._shapes = shapes
        self._routes: list[np.ndarray] = []  # of the batch's prompts
        self._indices: dict[int, int] = {}  # request -> its prompt's index in the batch
        self._batch: Prefix | None = None
        self._read_with: Callable[[], object] = lambda: None

    def use(self, params: Params) -> bool:
        """Forgets what was read with other weights; returns whether these are others."""
        weights = jax.tree.leaves(params)[0]
        if self._read_with() is weights:
            return False
        # Weakly held: this must not keep them in memory.
        self._indices, self._read_with = {}, weakref.ref(weights)
        return True

    def split(
        self, params: Params, entering: list[Sample], scheduler: Scheduler
    ) -> Iterator[tuple[Prefix, dict[Sample, int]]]:
        """Yields (prefix, the index of each sample's prompt in it) of the batches with them."""
        while entering:
            first = entering[0].request
            if first not in self._indices:
                most = inputs.MOST_PROMPT_TOKENS // inputs.SMALLEST_WIDTH
                numbers = scheduler.to_read(entering)[:most]
                prompts = [scheduler.requests[number][0].prompt for number in numbers]
                count = inputs.num_fitting([*map(len, prompts)], self._max_tokens, self._shapes)
                routes = [scheduler.requests[number][0].routes for number in numbers[:count]]
                sights = [scheduler.requests[number][0].sights for number in numbers[:count]]
                how = self._max_tokens, self._shapes, routes, self._num_routes, sights
                batch = inputs.prompt_rows(prompts[:count], *how)
                self._indices = {number: i for i, number in enumerate(numbers[:count])}
                self._batch = self._read(params, batch)
                if self._num_routes:
                    visited = telling.fetched(self._batch.routes)
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
            entering = [sample for sample in entering if sample not in indices]
