"""The rollout engine: prefill, insert and generate over decode slots, kept full."""

import contextlib
import copy
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.rollout_data import NO_SPECULATION
from jaxrl_llm.models.recurrent import sequence_memory
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.packing.packed_batch import bucket
from jaxrl_llm.rollout.engine import aot_programs, device_programs, host_inputs
from jaxrl_llm.rollout.engine.compiled_programs import MOVES, EnginePrograms
from jaxrl_llm.rollout.engine.grammars import token_masks
from jaxrl_llm.rollout.engine.logit_adjustments import LogitAdjustments, adjustment_arrays
from jaxrl_llm.rollout.engine.page_allocator import PageAllocator
from jaxrl_llm.rollout.engine.prefill import Prefix
from jaxrl_llm.rollout.engine.prefill_batcher import PrefillBatcher
from jaxrl_llm.rollout.engine.requests import (
    Completion,
    Decode,
    EngineStatistics,
    Progress,
    Request,
    RequestLimits,
    SamplingParams,
)
from jaxrl_llm.rollout.engine.scheduler import Sample, Scheduler
from jaxrl_llm.sharding import kv_store_broadcast

_ONE_TOKEN = SamplingParams(max_tokens=1)


class _Chunk(NamedTuple):
    """Decode steps that were dispatched and whose outputs the host has not read."""

    outputs: device_programs.Outputs
    version: int  # of the weights
    num_slots: int
    queue_waits: bool
    step_tokens: int  # maximum a step adds to a slot


class Engine:
    """Continuous batching on a mesh: `generate`, or `submit`, `abort` and `step`.

    Not thread-safe. It holds no weights, so new ones of the same layout cost nothing.
    """

    def __init__(
        self,
        network: Network,
        mesh: Mesh,
        *,
        num_slots: int,
        max_tokens: int,
        chunk_steps: int = 16,
        layout: str = "tensor",
        speculation: SpeculationConfig = NO_SPECULATION,
        decode: Decode | None = None,
        keeps_routes: bool = False,
        cache_tokens: int = 0,
        prompt_shapes: Sequence[host_inputs.RowShape] = (),
        prefix_caching: bool = False,
        window_cache: bool = False,
    ):
        """
        Args:
          max_tokens: Maximum tokens of prompt plus response.
          chunk_steps: Maximum decode steps between two reads by the host.
          layout: Sharding of the weights, as `config.mesh.rollout`; slots and heads follow it.
          decode: Tokens to text; without it requests with stop strings are refused.
          keeps_routes: Whether completions record the experts that their tokens visited.
          cache_tokens: KV-cache capacity of all slots, in `network.cached_dtype`; 0: `num_slots`
            times `max_tokens`. Each shard of the slots holds at least `max_tokens`.
          prompt_shapes: Prefill shapes, see `host_inputs.prefill_shapes`; other prompts get rows
            that fit them, and each new shape is another program.
          prefix_caching: Whether prompts read the keys and values of what they have in common with
            earlier requests of the same weights. No effect with `keeps_routes`: the experts of a
            prompt are known only where it is computed; nor with layers that keep a state, which is
            not that of a prefix.
          window_cache: Whether layers with sliding windows or chunked attention keep no more than
            these of a sequence, where that is at most half of `max_tokens`: in a ring of pages per
            slot (`kv_cache`). Then there is no prefix caching, as a prefix has no ring; a request
            that continues a sample goes on from its slot until another sample needs that, and what
            is preempted is read again from its first token. Else they keep all tokens, as others.
        """
        network = dataclasses.replace(network, shape=network.shape.for_length(max_tokens))
        self.network, self.mesh, self.layout = network, mesh, layout
        self.num_slots, self.max_tokens, self.chunk_steps = num_slots, max_tokens, chunk_steps
        self._step_tokens = 1 + speculation.draft_tokens  # maximum a step adds to a slot
        self._chunk_tokens = chunk_steps * self._step_tokens
        self._decode = decode or str  # str is never called
        self.programs = EnginePrograms(
            network,
            mesh,
            num_slots=num_slots,
            max_tokens=max_tokens,
            chunk_steps=chunk_steps,
            layout=layout,
            speculation=speculation,
            keeps_routes=keeps_routes,
            cache_tokens=cache_tokens,
            prefix_caching=prefix_caching,
            window_cache=window_cache,
        )
        self.limits = RequestLimits.for_network(
            network, max_tokens, decode, self.programs.num_routes
        )
        self.prompt_shapes = prompt_shapes
        self.prefix_caching = self.programs.prefix_caching
        self.reset()

    def clone(self) -> "Engine":
        """An engine that shares the compiled programs but has its own requests and cache."""
        other = copy.copy(self)
        other.reset()
        return other

    def reset(self) -> None:
        """Drops all requests and frees the KV cache; keeps compiled programs."""
        self.statistics = EngineStatistics()  # `generate` resets when it begins
        self._pages = PageAllocator(self.programs.pages, prefix_caching=self.prefix_caching)
        has_state = sequence_memory.has_state(self.network.shape)
        self._scheduler = Scheduler(
            self._decode, self._pages, self._chunk_tokens, pages_resume=self.programs.pages_resume
        )
        num_routes = self.programs.num_routes
        self._reader = PrefillBatcher(
            self.programs.prefill_prompts,
            self.max_tokens,
            self.statistics,
            num_routes,
            self.prompt_shapes,
            shares_rows=not has_state,
        )
        self._state: device_programs.DecodeState | None = None
        self._chunk: _Chunk | None = None  # in flight on the device

    @property
    def num_waiting(self) -> int:
        """Number of samples in the waiting queue."""
        return len(self._scheduler.waiting)

    @property
    def num_active(self) -> int:
        """Number of samples in decode slots."""
        return len(self._scheduler.active)

    def num_compilations(self) -> int:
        """Number of programs compiled so far."""
        names = ("empty", "prefill", "insert", "extend", "generate", "release", "move")
        masked = ("begin_masked", "forward_masked", "sample_masked", "end_masked")
        return sum(getattr(self.programs, name)._cache_size() for name in (*names, *masked))

    def compile(self, params: Params, program: aot_programs.Program) -> None:
        """Compiles one of `warmup_programs`; allowed between any two calls of `step`."""
        with jax.set_mesh(self.mesh):
            state = self._state or self.programs.empty()
            calls = aot_programs.IdleCalls(self.programs, aot_programs.call)
            self._state = program.idle_call(calls, params, state)[0]

    def programs_to_compile(
        self,
        params: Params,
        filters: Sequence[bool],
        continues: bool = False,
        support_tokens: int = 0,
    ) -> dict[str, Callable[[], None]]:
        """Returns by name the functions that compile the programs of a run, see
        `aot_programs.compile_tasks`.
        """
        return aot_programs.compile_tasks(
            self.programs, self.prompt_shapes, params, filters, continues, support_tokens
        )

    def wait_before_steps(self, wait: Callable[[], None]) -> None:
        """Makes each step, of clones too, first `wait` for programs that compile in threads."""
        self.programs.wait_compiled = wait

    def lowered_programs(
        self, params: Params, num_prompts: int, prompt_tokens: int, vector_size: int = 0
    ) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Lowers "prefill" and "decode" at their largest sizes, by name; see `aot_programs`."""
        prompts = num_prompts, prompt_tokens, vector_size
        return {
            "prefill": lambda: aot_programs.lower_prefill(self.programs, params, *prompts),
            "decode": lambda: aot_programs.lower_generate(self.programs, params),
        }

    def submit(self, request: Request) -> int:
        """Queues a request; returns its number, unique until a reset. Raises `RequestError`."""
        self.limits.check(request, "request")
        return self._scheduler.add(request)

    def abort(self, number: int) -> list[Completion]:
        """Aborts a request; returns its partial completions, none if it is not running."""
        return self._scheduler.abort(number)

    def completions(self, number: int) -> list[Completion]:
        """Completions of an unfinished request, which grow until their samples end."""
        return self._scheduler.completions(number)

    def free(self, number: int, index: int) -> None:
        """Frees the KV-cache pages retained for a request that would continue a sample."""
        self._scheduler.free_retained(number, index)

    def step(self, params: Params, version: int = 0, *, ahead: bool = False) -> list[Progress]:
        """Fills free slots from the waiting queue and decodes a chunk.

        Returns one entry for each sample that got tokens or failed.

        Args:
          params: Rollout parameters, `layers` a tuple. They may change between steps (same shapes
            and layout): waiting prompts are prefilled again, active slots keep their KV cache.
          version: Version of these weights, reported with every token that they sample.
          ahead: The caller submits, aborts and changes nothing before the next step, so the next
            chunk is dispatched before this one is read.
        """
        scheduler, chunk, self._chunk = self._scheduler, self._chunk, None
        self.programs.wait_compiled()
        with jax.set_mesh(self.mesh):
            began = time.perf_counter()
            if self._reader.reset_if_new_weights(params):
                self._scheduler.drop_cache()
            if chunk is None:
                # Active samples get their pages before others enter.
                scheduler.reserve(self._chunk_tokens, preempt=True)
                # Again until no slot is free: a sample may end with its first token.
                while entering := scheduler.schedule(self._reader.batched_requests):
                    fresh = [sample for sample in entering if sample.needs_full_prefill]
                    others = [sample for sample in entering if not sample.needs_full_prefill]
                    for batch in self._reader.prefill_batches(params, fresh, scheduler):
                        self._insert(*batch, version)
                    self._extend(params, others, version)
                scheduler.reserve(self._chunk_tokens, preempt=True)
                self.statistics.recomputed_tokens = scheduler.recomputed_tokens
                self.statistics.num_preemptions = scheduler.num_preempted
                self.statistics.prefix_cache_queries = scheduler.prefix_cache_queries
                self.statistics.prefix_cache_hits = scheduler.prefix_cache_hits
            filled = time.perf_counter()
            self.statistics.prefill_s += filled - began
            if self.num_active:
                if chunk is None:
                    num_slots = self._apply_moves()
                    longest = max(scheduler.active_lengths())
                    if any(sample.is_constrained for sample in scheduler.active.values()):
                        self._decode_masked(params, version, num_slots, longest)
                    else:
                        chunk = self._dispatch(params, version, num_slots, longest)
                if chunk is not None:
                    if ahead:
                        self._chunk = self._dispatch_ahead(params, version, chunk)
                    self._read_chunk(chunk)
                self.statistics.peak_pages = self._pages.peak_used
                self.statistics.decode_s += time.perf_counter() - filled
        return scheduler.progress()

    def generate(
        self, params: Params, requests: Sequence[Request], version: int = 0
    ) -> list[list[Completion]]:
        """Samples all requests to their end; returns the completions of each.

        Raises:
          RequestError, ValueError: If a request does not fit, or submitted ones are not finished.
          Exception: Raised by host work for a sample, such as `decode`.
        """
        for i, request in enumerate(requests):
            self.limits.check(request, f"request {i}")
        with self.session():
            completions = [self._scheduler.completions(self._scheduler.add(r)) for r in requests]
            while self.num_waiting or self.num_active:
                for progress in self.step(params, version, ahead=True):
                    if progress.error is not None:
                        raise progress.error
        return completions

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Starts without requests and frees the KV cache at the end.

        Raises ValueError if submitted requests are unfinished.
        """
        if self.num_waiting or self.num_active:
            raise ValueError(
                f"session: {self.num_waiting} submitted samples are waiting and"
                f" {self.num_active} running; finish them with step, abort them, or reset"
            )
        self.reset()
        try:
            yield
        except BaseException:
            self.reset()
            raise
        finally:
            # Frees the cache and a chunk without active slots; statistics stay.
            self._state = self._chunk = None
            self._scheduler.drop_cache()

    def _insert(self, prefix: Prefix, prompts: dict[Sample, int], version: int) -> None:
        """Inserts samples into slots; `prompts` maps them to their prompts in the prefix."""
        switches = self._static_arguments(prompts)
        entering = [(index, s.slot, s.key, s.params) for s, index in prompts.items()]
        size = min(n for n in self.programs.insert_sizes if n >= len(prompts))
        offsets = [sample.offset for sample in prompts]
        adjustments = self._adjustments(enumerate(prompts), size)
        writes = [(page, index, at) for s, index in prompts.items() for page, at in s.page_writes]
        max_writes = self.programs.num_writes(prefix, size)
        masks = self._entry_masks(list(prompts), size)
        # Several parts: each shard of the slots has its own pages.
        parts = [writes[i : i + max_writes] for i in range(0, len(writes), max_writes)] or [[]]
        for number, part in enumerate(parts, 1):
            samples = entering if number == len(parts) else []
            self._state, outputs = self.programs.insert(
                self._state or self.programs.empty(),
                prefix,
                host_inputs.insert_args(
                    samples, size, self.num_slots, offsets[: len(samples)], adjustments, masks
                ),
                host_inputs.page_writes(part, max_writes, self.programs.pages.num_pages),
                **switches,
            )
        self._scheduler.record_inserted(
            list(prompts), kv_store_broadcast.device_get(outputs), version
        )

    def _extend(self, params: Params, continuing: list[Sample], version: int) -> None:
        """Prefills the tokens of continued samples that their pages do not hold, in chunks."""
        # the next token to read
        next_token = {sample: sample.num_cached_tokens for sample in continuing}
        sampled: list[
            tuple[list[Sample | None], device_programs.Outputs]
        ] = []  # read after all are dispatched
        tokens = {sample: sample.tokens for sample in continuing}
        layout, history_tokens = self.programs.pages, self.programs.history_tokens
        while next_token:
            rows, width, in_order = host_inputs.chunked_prefill_batch(
                [s.num_tokens - n for s, n in next_token.items()],
                self.programs.extend_shapes,
                longest_first=self.prefix_caching,
            )
            unread = list(next_token.items())
            chunk = [unread[i] for i in in_order]
            samples = [sample for sample, _ in chunk]
            chunk_tokens = [tokens[sample][n : n + width] for sample, n in chunk]
            ends = [n + width >= len(tokens[sample]) for sample, n in chunk]
            entered = [s if end else None for s, end in zip(samples, ends, strict=True)]
            sights_and_offsets = [
                (host_inputs.extended_image_inputs(s.sights, s.num_tokens, s.offset), s.offset)
                for s in samples
            ]
            switches = self._static_arguments(next_token)
            # A token is sampled after every chunk; only the one after the last chunk is kept.
            params_of = [
                s.remaining_params if end else _ONE_TOKEN
                for s, end in zip(samples, ends, strict=True)
            ]
            entering = [(0, s.slot, s.key, p) for s, p in zip(samples, params_of, strict=True)]
            table = layout.table(enumerate(s.pages for s in samples), rows)
            starts, histories = [n for _, n in chunk], [tokens[sample] for sample in samples]
            continuation = host_inputs.chunked_prefill_inputs(
                chunk_tokens,
                starts,
                rows,
                width,
                table,
                sights_and_offsets,
                histories,
                history_tokens,
            )
            self._state, outputs, routes = self.programs.extend(
                self.programs.with_adapter_numbers(params, enumerate(samples), rows),
                self._state or self.programs.empty(),
                continuation,
                host_inputs.insert_args(
                    entering,
                    rows,
                    self.num_slots,
                    [n for _, n in sights_and_offsets],
                    self._adjustments(enumerate(samples), rows),
                    self._entry_masks(entered, rows),
                ),
                window=_at_least(max(starts), self.programs.read_windows),
                **switches,
            )
            self.statistics.prefill_tokens += sum(map(len, chunk_tokens))
            self.statistics.prefill_positions += rows * width
            if self.programs.num_routes:
                visited = kv_store_broadcast.device_get(routes)
                for row, (sample, n) in enumerate(chunk):
                    num_recorded = max(0, sum(map(len, sample.completion.routes)) - n)
                    sample.completion.routes.append(
                        visited[row, num_recorded : len(chunk_tokens[row])]
                    )
            sampled.append((entered, outputs))
            for (sample, n), end in zip(chunk, ends, strict=True):
                next_token[sample] = n + width
                if end:
                    del next_token[sample]
        for entered, outputs in sampled:
            self._scheduler.record_inserted(
                entered, kv_store_broadcast.device_get(outputs), version
            )

    def _apply_moves(self) -> int:
        """Applies the scheduler's moves on the device; returns the number of slots to decode."""
        # Fewer active samples move together at the front, where a smaller program decodes them.
        num_slots = min(n for n in self.programs.slot_counts if self._scheduler.fits_below(n))
        moves = self._scheduler.compact(num_slots)
        for i in range(0, len(moves), MOVES):
            pairs = np.full((MOVES, 2), self.num_slots, np.int32)
            pairs[: len(moves[i : i + MOVES])] = moves[i : i + MOVES]
            self._state = self.programs.move(self._state, pairs[:, 0], pairs[:, 1])
        if stale := self._scheduler.stale_slots():
            mask = np.zeros(self.num_slots, bool)
            mask[stale] = True
            self._state = self.programs.release(self._state, mask)
        return num_slots

    def _dispatch(self, params: Params, version: int, num_slots: int, longest: int) -> _Chunk:
        """Gives the device a chunk of steps; no active sequence has over `longest` tokens."""
        queue_waits = self.num_waiting > 0
        switches = self._static_arguments(self._scheduler.active.values())
        active = self._scheduler.active.items()
        self._state, outputs = self.programs.generate(
            self.programs.with_adapter_numbers(params, active, num_slots),
            self._state,
            self._scheduler.page_table(),
            np.int32(self._free_target(num_slots)),
            self._adjustments(active, num_slots),
            num_slots=num_slots,
            window=_at_least(longest, self.programs.windows),
            **switches,
        )
        return _Chunk(outputs, version, num_slots, queue_waits, self._step_tokens)

    def _dispatch_ahead(self, params: Params, version: int, chunk: _Chunk) -> _Chunk | None:
        """Gives the device the chunk after one that is not read, unless the host must decide."""
        # It must while samples wait for a slot, where those that are left fit a smaller program,
        # where texts are searched, and where logits depend on the tokens of the chunk. That a
        # sample ended early is seen one chunk late.
        left = self._scheduler.active_lengths(self.chunk_steps)
        searched = any(
            s.params.stop_strings or s.params.is_history_dependent
            for s in self._scheduler.active.values()
        )
        fewer = any(len(left) <= count < chunk.num_slots for count in self.programs.slot_counts)
        if chunk.queue_waits or not left or searched or fewer:
            return None
        if not self._scheduler.reserve(2 * self._chunk_tokens, preempt=False):
            return None
        longest = max(left) + self._chunk_tokens
        return self._dispatch(params, version, chunk.num_slots, longest)

    def _decode_masked(self, params: Params, version: int, num_slots: int, longest: int) -> None:
        """Decodes a chunk in which samples have grammars, and records its tokens.

        The forward pass of a step runs while the host reads the token before it and fills the
        masks with which its token will be sampled.
        """
        programs, scheduler = self.programs, self._scheduler
        queue_waits, free_target = self.num_waiting > 0, self._free_target(num_slots)
        switches = self._static_arguments(scheduler.active.values())
        window, table = _at_least(longest, programs.windows), scheduler.page_table()
        assert self._state is not None
        params = programs.with_adapter_numbers(params, scheduler.active.items(), num_slots)
        chunk, live, recent = programs.begin_masked(
            self._state, table, num_slots=num_slots, window=window
        )

        live_states = bool(self._state.layer_states)

        def forward(recent: Any, number: int) -> Any:
            cache = self._state.cache  # type: ignore[union-attr]
            return programs.forward_masked(
                params, cache, chunk, live, recent, np.int32(number), window=window
            )

        recent, logits, routes = forward(recent, 0)
        for number in range(1, self.chunk_steps + 1):
            masks = self._token_masks(scheduler.active, num_slots)
            adjustments = self._adjustments(scheduler.active.items(), num_slots)
            live, outputs = programs.sample_masked(
                live, logits, routes, masks, adjustments, **switches
            )
            if number < self.chunk_steps:
                recent, logits, routes = forward(recent, number)
            self._read_chunk(_Chunk(outputs, version, num_slots, queue_waits, step_tokens=1))
            # The forward pass after this sample has already advanced the states of active slots:
            # with states, the chunk goes on to its end, where there is none, or no slot is active.
            enough = num_slots - self.num_active >= free_target
            if not self.num_active or (enough and not live_states):
                break
        self._state = programs.end_masked(self._state, live, recent, table)

    def _token_masks(self, samples: Mapping[int, Sample], num_rows: int) -> np.ndarray:
        """Masks of samples by row; those whose grammars cannot go on end with the error."""
        masks, errors = token_masks(samples, num_rows, self.limits.vocab_size)
        for sample, error in errors.items():
            self._scheduler.fail(sample, error)
        return masks

    def _entry_masks(self, samples: Sequence[Sample | None], num_rows: int) -> np.ndarray | None:
        """Masks of samples that enter slots; None: none of them has a grammar."""
        rows = {row: s for row, s in enumerate(samples) if s is not None and s.is_constrained}
        return self._token_masks(rows, num_rows) if rows else None

    def _free_target(self, num_slots: int) -> int:
        """Number of free slots at which a chunk ends early."""
        # While samples wait, another sixteenth of the slots free is worth a refill (some are
        # free where pages are short); else the device runs on until its chunk or work is done.
        enough = num_slots - self.num_active + max(1, num_slots // 16)
        return min(num_slots, enough) if self.num_waiting else num_slots

    def _read_chunk(self, chunk: _Chunk) -> None:
        """Reads the outputs of a decode chunk and records its tokens."""
        sampled = kv_store_broadcast.device_get(chunk.outputs)
        # [steps, S]: an active slot gets a token in every step, whatever was drafted.
        has_token = np.reshape(sampled.tokens >= 0, (-1, chunk.step_tokens, chunk.num_slots))
        active = np.any(has_token, axis=1)
        steps, slot_steps = int(np.any(active, axis=1).sum()), int(active.sum())
        s = self.statistics
        s.decode_tokens += self._scheduler.record_generated(sampled, chunk.version)
        s.decode_steps += steps
        s.slot_steps += slot_steps
        s.draft_tokens += slot_steps * (chunk.step_tokens - 1)
        if chunk.queue_waits:
            s.busy_capacity += steps * self.num_slots
            s.busy_slot_steps += slot_steps

    def _adjustments(
        self, samples: Iterable[tuple[int, Sample]], size: int
    ) -> LogitAdjustments | None:
        """Adjustments of the logits of `size` rows, where samples have these indices."""
        adjusted = [(i, s.adjusted_row) for i, s in samples if s.params.is_adjusted]
        longest = max((len(row.tokens) for _, row in adjusted), default=0)
        return adjustment_arrays(adjusted, size, _at_least(longest, self.programs.windows))

    def _static_arguments(self, samples: Iterable[Sample]) -> dict[str, Any]:
        """Static arguments that these samples need of a program."""
        params = [sample.params for sample in samples]
        max_top = max((p.num_top_log_probs for p in params), default=0)
        return {
            "filtered": any(p.is_filtered for p in params),
            "num_top": bucket(max_top, largest=self.limits.max_top_log_probs) if max_top else 0,
            "num_support": max((p.support_tokens for p in params), default=0),
        }


def _at_least(tokens: int, windows: Sequence[int]) -> int:
    return next((size for size in windows if size >= tokens), windows[-1])
