"""Batches prompts for prefill, so that each is read once."""

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
import numpy as np

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.packing.packed_batch import bucket
from jaxrl_llm.rollout.engine import host_inputs, requests
from jaxrl_llm.rollout.engine.prefill import Prefix, Prompts
from jaxrl_llm.rollout.engine.scheduler import Sample, Scheduler
from jaxrl_llm.sharding import kv_store_broadcast


class PrefillBatcher:
    """Prefills the prompts of entering samples, with more of the queue in the same batch."""

    def __init__(
        self,
        prefill: Callable[..., Prefix],
        max_tokens: int,
        statistics: requests.EngineStatistics,
        num_routes: int = 0,
        shapes: Sequence[host_inputs.RowShape] = (),
        shares_rows: bool = True,
    ):
        """`prefill` takes parameters, prompts, and the number of the adapter of each prompt.

        `shapes` and `shares_rows` as in `host_inputs.prompt_rows`.
        """
        self._prefill, self._max_tokens, self._statistics = prefill, max_tokens, statistics
        self._num_routes = num_routes  # per token
        self._shapes, self._shares_rows = shapes, shares_rows
        self._routes: list[np.ndarray] = []  # of the prompts in the batch
        self._log_probs: list[requests.PromptLogProbs] = []  # of the prompts; empty: not computed
        self._indices: dict[int, int] = {}  # request -> index of its prompt in the batch
        self._batch: Prefix | None = None
        self._weights_ref: Callable[[], object] = lambda: None

    @property
    def batched_requests(self) -> Collection[int]:
        """The requests whose prompts are in the last batch."""
        return self._indices.keys()

    def reset_if_new_weights(self, params: Params) -> bool:
        """Drops the last batch if the weights changed since; returns whether they did."""
        weights = jax.tree.leaves(params)[0]
        if self._weights_ref() is weights:
            return False
        # A weak reference, so that old weights can be freed.
        self._indices, self._weights_ref = {}, weakref.ref(weights)
        return True

    def prefill_batches(
        self, params: Params, entering: list[Sample], scheduler: Scheduler
    ) -> Iterator[tuple[Prefix, dict[Sample, int]]]:
        """Yields (prefix, index of each sample's prompt in it), batch by batch."""
        while entering:
            first = entering[0].request
            if first not in self._indices:
                max_prompts = host_inputs.MAX_PREFILL_TOKENS // host_inputs.MIN_WIDTH
                numbers = scheduler.requests_to_prefill(entering)[:max_prompts]
                prompts = [scheduler.requests[number][0].prompt for number in numbers]
                count = host_inputs.num_prompts_in_batch(
                    [*map(len, prompts)],
                    self._max_tokens,
                    self._shapes,
                    shares_rows=self._shares_rows,
                )
                routes = [scheduler.requests[number][0].routes for number in numbers[:count]]
                sights = [scheduler.requests[number][0].sights for number in numbers[:count]]
                batch = host_inputs.prompt_rows(
                    prompts[:count],
                    self._max_tokens,
                    self._shapes,
                    routes,
                    self._num_routes,
                    sights,
                    shares_rows=self._shares_rows,
                )
                self._indices = {number: i for i, number in enumerate(numbers[:count])}
                starts = batch.starts[:count].tolist()
                self._batch, self._log_probs = self._prefill_with_log_probs(
                    params, batch, [scheduler.requests[number][0] for number in numbers[:count]]
                )
                if self._num_routes:
                    experts = kv_store_broadcast.device_get(self._batch.routes)
                    self._routes = [
                        experts[start : start + len(prompt)]
                        for start, prompt in zip(starts, prompts, strict=False)
                    ]
                self._statistics.prefill_tokens += sum(map(len, prompts[:count]))
                self._statistics.prefill_positions += batch.tokens.size
            assert self._batch is not None
            indices = {s: self._indices[s.request] for s in entering if s.request in self._indices}
            if self._num_routes:
                for sample, index in indices.items():
                    sample.completion.routes = [self._routes[index]]
            for sample, index in indices.items() if self._log_probs else ():
                if (num_top := sample.num_prompt_top) is not None:
                    sample.completion.prompt_log_probs = requests.PromptLogProbs(
                        *self._log_probs[index][:2],
                        *(tops[:, :num_top] for tops in self._log_probs[index][2:]),
                    )
            yield self._batch, indices
            entering = [sample for sample in entering if sample not in indices]

    def _prefill_with_log_probs(
        self, params: Params, batch: Prompts, samples: Sequence[Sample]
    ) -> tuple[Prefix, list[requests.PromptLogProbs]]:
        """Prefills a batch with the prompts of `samples`.

        Returns the prefix without log-probs, and these for each prompt, if any asks for them.
        """
        adapters = [sample.adapter_number for sample in samples]
        asked = [s.num_prompt_top for s in samples if s.num_prompt_top is not None]
        if not asked:
            return self._prefill(params, batch, adapters), []
        largest = bucket(max(asked), largest=requests.MAX_TOP_LOG_PROBS) if max(asked) else 0
        prefix = self._prefill(params, batch, adapters, num_prompt_top=largest)
        arrays = kv_store_broadcast.device_get(prefix.prompt_log_probs)
        ends = zip(batch.starts.tolist(), batch.lengths.tolist(), strict=True)
        by_prompt = [
            requests.PromptLogProbs(*(a[start : start + length] for a in arrays))
            for (start, length), _ in zip(ends, samples, strict=False)
        ]
        # Inserts are compiled for a prefix without them.
        return dataclasses.replace(prefix, prompt_log_probs=None), by_prompt
