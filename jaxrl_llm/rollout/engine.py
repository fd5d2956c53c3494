"""The rollout engine: prefill, insert and generate over decode slots, kept full.

The engine owns compiled programs and no weights: parameters are an argument of every call,
so new weights of the same layout cost nothing. One host loop serves one process or many:
its decisions follow from replicated device outputs and from the requests alone.
"""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import programs
from jaxrl_llm.rollout.sampling import SamplerState
from jaxrl_llm.rollout.scheduler import Completion, Placement, Request, SamplingParams, Scheduler
from jaxrl_llm.sharding import mesh as mesh_lib

_PREFILL_TOKENS = 4096  # prompt tokens read at one time, padding included
_SMALLEST_BUCKET = 32
_NUM_STOPS = 8  # stop tokens of one sample


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What one call of `Engine.generate` did."""

    prefill_tokens: int  # of prompts, each counted once
    decode_tokens: int  # sampled
    decode_steps: int  # times num_slots, the room there was
    occupancy: float  # share of the slots' steps that sampled a token, until the queue was empty
    prefill_s: float
    decode_s: float


class Engine:
    """Samples completions of prompts on a mesh."""

    def __init__(
        self,
        network: Network,
        mesh: Mesh,
        *,
        num_slots: int,
        max_prompt_tokens: int,
        max_tokens: int,
        chunk_steps: int = 16,
        layout: str = "tensor",
    ):
        """
        Args:
          network: The policy; its `compute_dtype` is the cache's.
          mesh: Where weights, slots and heads are split.
          num_slots: Sequences decoded at one time.
          max_prompt_tokens: Longest prompt.
          max_tokens: Longest prompt plus response; the cache's length.
          chunk_steps: Most decode steps between two looks of the host.
          layout: Of the weights, a key of `mesh.LAYOUTS`; it decides what slots and heads are
            split over, where they divide.
        """
        self.network = network
        self.mesh = mesh
        self.num_slots = num_slots
        self.max_prompt_tokens = max_prompt_tokens
        self.max_tokens = max_tokens
        self.chunk_steps = chunk_steps
        self.statistics = Statistics(0, 0, 0, 0.0, 0.0, 0.0)
        replicated = mesh_lib.replicated(mesh)
        ruled = functools.partial(mesh_lib.under, mesh_lib.ROLLOUT_ACTIVATIONS[layout])

        @ruled
        def empty():
            return programs.empty_state(
                network, num_slots, max_tokens, _NUM_STOPS, network.compute_dtype
            )

        with jax.set_mesh(mesh):
            # Left to the compiler, the state could come back split in another way than it
            # went in, and the next call would compile again.
            sharding = ruled(lambda a: mesh_lib.sharding_of(a.shape, _cache_axes(a.ndim), mesh))
            self._state_shardings = jax.tree.map(sharding, jax.eval_shape(empty))
        self._empty = jax.jit(empty, out_shardings=self._state_shardings)
        self._prefill = jax.jit(ruled(functools.partial(programs.prefill, network)))
        self._insert = jax.jit(
            ruled(programs.insert),
            static_argnames="filtered",
            donate_argnums=0,
            out_shardings=(self._state_shardings, replicated),
        )
        self._generate = jax.jit(
            ruled(functools.partial(programs.generate, network)),
            static_argnames=("num_steps", "window", "filtered"),
            donate_argnums=1,
            out_shardings=(self._state_shardings, replicated),
        )

    def num_compilations(self) -> int:
        """Returns how many programs were compiled so far."""
        jitted: tuple[Any, ...] = (self._empty, self._prefill, self._insert, self._generate)
        return sum(function._cache_size() for function in jitted)

    def speed(self) -> tuple[int, float, float]:
        """Returns tokens decoded, seconds taken and slot occupancy of the last call."""
        last = self.statistics
        return last.decode_tokens, last.decode_s, last.occupancy

    def generate(self, params: Params, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the completions of every request, in the order of its samples.

        Args:
          params: Rollout parameters, `layers` a tuple.
          requests: Prompts with what to draw of each.

        Raises:
          ValueError: If a prompt is empty or too long for the engine, or too many stops are given.
        """
        for i, request in enumerate(requests):
            self._check(i, request)
        scheduler = Scheduler(requests, self.num_slots)
        filtered = any(p.is_filtered for request in requests for p in request.params)
        prefixes = _Prefixes(self, params, requests)
        tally = _Tally(self.num_slots)

        with jax.set_mesh(self.mesh):
            state = self._empty()
            while scheduler.num_waiting or scheduler.num_active:
                with tally.prefill():
                    # Again until no slot is free: a sample may end with its first token.
                    while placements := scheduler.admit():
                        for batch in prefixes.split(placements):
                            state = self._admit(state, batch, scheduler, filtered)
                if not scheduler.num_active:
                    break
                with tally.decode(queue_waits=scheduler.num_waiting > 0) as account:
                    state, outputs = self._generate(
                        params,
                        state,
                        np.int32(self._free_target(scheduler)),
                        num_steps=self.chunk_steps,
                        window=bucket(
                            scheduler.max_active_tokens() + self.chunk_steps,
                            smallest=_SMALLEST_BUCKET,
                            largest=self.max_tokens,
                        ),
                        filtered=filtered,
                    )
                    tokens, log_probs, remaining = jax.device_get(outputs)
                    account(
                        steps=int((tokens >= 0).any(1).sum()),
                        tokens=scheduler.take(tokens, log_probs, remaining),
                    )
        prompt_tokens = sum(len(request.tokens) for request in requests)
        self.statistics = tally.statistics(prompt_tokens)
        return scheduler.completions

    def _check(self, index: int, request: Request) -> None:
        length = len(request.tokens)
        if not 1 <= length <= self.max_prompt_tokens:
            raise ValueError(
                f"request {index}: a prompt of {length} tokens;"
                f" this engine takes 1 to {self.max_prompt_tokens}"
            )
        for params in request.params:
            if length + params.max_tokens > self.max_tokens or params.max_tokens < 1:
                raise ValueError(
                    f"request {index}: max_tokens={params.max_tokens} after a prompt of {length}"
                    f" must lie between 1 and {self.max_tokens - length}"
                )
            if len(params.stop_tokens) > _NUM_STOPS:
                raise ValueError(
                    f"request {index}: {len(params.stop_tokens)} stop tokens, at most {_NUM_STOPS}"
                )

    def _free_target(self, scheduler: Scheduler) -> int:
        """Returns at how many free slots the device hands back to the host.

        While samples wait, all slots are taken, and a sixteenth of them is worth a refill;
        afterwards the device runs on until its chunk or its work is done.
        """
        return max(1, self.num_slots // 16) if scheduler.num_waiting else self.num_slots

    def _admit(self, state, batch, scheduler, filtered):
        prefix, rows, placements = batch
        # Two sizes, so two programs: of the first fill, and of a refill.
        size = min(self.num_slots, max(8, self.num_slots // 8))
        size = size if len(placements) <= size else self.num_slots
        admission = _admission(scheduler.requests, placements, rows, size, self.num_slots)
        state, outputs = self._insert(state, prefix, admission, filtered=filtered)
        scheduler.first_tokens(placements, *jax.device_get(outputs))
        return state


def _cache_axes(ndim: int) -> tuple[str | None, ...]:
    """Returns the dim names of a cache (4 dims) or of any other part of the decode state."""
    return ("batch", "kv_heads", None, None) if ndim == 4 else ("batch", *[None] * (ndim - 1))


class _Prefixes:
    """Reads prompts in batches, in order, each once; keeps them until their samples are placed."""

    def __init__(self, engine: Engine, params: Params, requests: Sequence[Request]):
        self._engine, self._params, self._requests = engine, params, requests
        widest = self._width(engine, requests)
        room = max(1, _PREFILL_TOKENS // widest)
        self.batch_size = min(bucket(len(requests)), room)
        self._first = 0
        self._prefix: programs.Prefix | None = None

    @staticmethod
    def _width(engine: Engine, requests: Sequence[Request]) -> int:
        return bucket(
            max((len(r.tokens) for r in requests), default=0),
            smallest=_SMALLEST_BUCKET,
            largest=engine.max_prompt_tokens,
        )

    def split(self, placements: list[Placement]):
        """Yields (prefix, rows, placements) of the batches that hold these placements."""
        while placements:
            if self._prefix is None or placements[0].request >= self._first + self.batch_size:
                self._first = placements[0].request
                self._prefix = self._read(self._requests[self._first :][: self.batch_size])
            inside = [p for p in placements if p.request < self._first + self.batch_size]
            yield self._prefix, [p.request - self._first for p in inside], inside
            placements = placements[len(inside) :]

    def _read(self, requests: Sequence[Request]) -> programs.Prefix:
        engine = self._engine
        width = self._width(engine, requests)
        tokens = np.zeros((self.batch_size, width), np.int32)
        lengths = np.ones(self.batch_size, np.int32)
        for row, request in enumerate(requests):
            tokens[row, : len(request.tokens)] = request.tokens
            lengths[row] = len(request.tokens)
        return engine._prefill(self._params, tokens, lengths)


def _admission(requests, placements, rows, size: int, num_slots: int) -> programs.Admission:
    """Returns the arrays of an insert of `size` samples; what is not used goes nowhere."""
    first = SamplingParams(max_tokens=1)
    params = [requests[p.request].params[p.sample] for p in placements]
    params += [first] * (size - len(placements))

    def column(values, fill, dtype):
        return np.array([*values, *[fill] * (size - len(placements))], dtype)

    stops = np.full((size, _NUM_STOPS), -1, np.int32)
    for i, p in enumerate(params):
        stops[i, : len(p.stop_tokens)] = p.stop_tokens
    keys = np.zeros((size, 2), np.uint32)
    for i, p in enumerate(placements):
        keys[i] = requests[p.request].keys[p.sample]
    sampler: dict[str, Any] = {
        "keys": keys,
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
    }
    fields: dict[str, Any] = {
        "rows": column(rows, 0, np.int32),
        "slots": column([p.slot for p in placements], num_slots, np.int32),
        "limits": np.array([p.max_tokens for p in params], np.int32),
        "stops": stops,
    }
    return programs.Admission(**fields, sampler=SamplerState(**sampler))


class _Tally:
    """Seconds and tokens of one call."""

    def __init__(self, num_slots: int):
        self._num_slots = num_slots
        self._prefill_s = self._decode_s = 0.0
        self._steps = self._tokens = self._busy_steps = self._busy_tokens = 0

    def prefill(self):
        return _Stopwatch(self._add_prefill)

    def _add_prefill(self, seconds: float):
        self._prefill_s += seconds

    def decode(self, queue_waits: bool):
        def account(*, steps: int, tokens: int):
            self._steps += steps
            self._tokens += tokens
            if queue_waits:
                self._busy_steps += steps
                self._busy_tokens += tokens

        return _Stopwatch(self._add_decode, account)

    def _add_decode(self, seconds: float):
        self._decode_s += seconds

    def statistics(self, prompt_tokens: int) -> Statistics:
        busy = self._busy_steps * self._num_slots
        return Statistics(
            prefill_tokens=prompt_tokens,
            decode_tokens=self._tokens,
            decode_steps=self._steps,
            occupancy=self._busy_tokens / busy if busy else 1.0,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
        )


class _Stopwatch:
    def __init__(self, add, value=None):
        self._add, self._value = add, value

    def __enter__(self):
        self._start = time.perf_counter()
        return self._value

    def __exit__(self, *_):
        self._add(time.perf_counter() - self._start)
