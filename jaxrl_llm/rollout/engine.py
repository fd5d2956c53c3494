"""The rollout engine: prefill, insert and generate over decode slots, kept full."""

import bisect
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.rollout import NO_SPECULATION
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import programs
from jaxrl_llm.rollout import scheduler as scheduler_lib
from jaxrl_llm.rollout.jitted import MOVES, Jitted, Program
from jaxrl_llm.rollout.prefill import Prefix
from jaxrl_llm.rollout.requests import Completion, Limits, Progress, Request
from jaxrl_llm.rollout.scheduler import Reader, Sample, Scheduler
from jaxrl_llm.rollout.stopping import Decode


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the engine did since its last reset; sums, so that two of them can be added."""

    prefill_tokens: int = 0  # of prompts, each counted once
    prefill_positions: int = 0  # computed for them, padding included
    prefill_s: float = 0.0
    decode_tokens: int = 0  # sampled
    decode_steps: int = 0
    slot_steps: int = 0  # decode steps of each slot that was active in them
    guesses: int = 0  # that decode steps checked; none without speculation
    busy_room: int = 0  # slots times decode steps, while samples were waiting
    busy_slot_steps: int = 0  # those of them in which the slot was active
    decode_s: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of the slots' steps that sampled a token, until the queue was empty."""
        return self.busy_slot_steps / self.busy_room if self.busy_room else 1.0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens of a slot in one decode step; 1 without speculation."""
        return self.decode_tokens / self.slot_steps if self.slot_steps else 1.0

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were right; 0 without speculation."""
        right = self.decode_tokens - self.slot_steps
        return right / self.guesses if self.guesses else 0.0

    def __add__(self, other: "Statistics") -> "Statistics":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Statistics(*(a + b for a, b in pairs))

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of a step under their names in `metrics.jsonl`."""
        read, decoded = self.prefill_tokens, self.decode_tokens
        return {
            "rollout/prefill_tokens_per_s": read / self.prefill_s if self.prefill_s else 0.0,
            "rollout/decode_tokens_per_s": decoded / self.decode_s if self.decode_s else 0.0,
            "rollout/slot_occupancy": self.occupancy,
            "rollout/tokens_per_forward": self.tokens_per_forward,
            "rollout/draft_acceptance": self.acceptance,
        }


class _Chunk(NamedTuple):
    """Decode steps that the device was given and the host has not read."""

    outputs: programs.Outputs
    version: int  # of the weights
    num_slots: int
    queue_waits: bool


class Engine:
    """Samples completions of prompts on a mesh: `generate`, or `submit`, `abort` and `step`.

    Not for several threads. It has no weights: new ones of the same layout cost nothing.
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
    ):
        """
        Args:
          network: The policy; its `compute_dtype` is the cache's.
          max_tokens: Longest prompt plus response; the cache's length.
          chunk_steps: Most decode steps before the host reads their tokens.
          layout: Of the weights, as `config.mesh.rollout`; it decides what slots and heads are
            split over, where they divide.
          speculation: Guesses that are checked together; they change speed, not samples.
          decode: Tokens to text; without it requests with stop strings are refused.
        """
        self.network, self.mesh, self.layout = network, mesh, layout
        self.num_slots, self.max_tokens, self.chunk_steps = num_slots, max_tokens, chunk_steps
        self._step_tokens = 1 + speculation.draft_tokens  # that a step may give a slot
        self._decode = decode or str  # str is never called
        self.limits = Limits(max_tokens, network.shape.vocab_size, decode is not None)
        self.jitted = Jitted(network, mesh, num_slots, max_tokens, chunk_steps, layout, speculation)
        self.reset()

    def reset(self) -> None:
        """Forgets every request and gives the cache's memory back; keeps compiled programs."""
        self._scheduler = Scheduler(self.num_slots, self._decode)
        self._reader = Reader(lambda *args: self.jitted.prefill(*args), self.max_tokens)
        self._sums = Statistics()
        self._state: programs.DecodeState | None = None
        self._chunk: _Chunk | None = None  # the device is at work on it

    @property
    def num_waiting(self) -> int:
        """Samples that have no slot yet."""
        return len(self._scheduler.waiting)

    @property
    def num_active(self) -> int:
        """Samples that have a slot."""
        return len(self._scheduler.active)

    @property
    def statistics(self) -> Statistics:
        """What was done since the last reset; `generate` resets when it begins."""
        return dataclasses.replace(
            self._sums,
            prefill_tokens=self._reader.num_tokens,
            prefill_positions=self._reader.num_positions,
        )

    def num_compilations(self) -> int:
        """Returns how many programs were compiled so far."""
        names = ("empty", "prefill", "insert", "generate", "release", "move")
        return sum(getattr(self.jitted, name)._cache_size() for name in names)

    def compile(self, params: Params, program: Program) -> None:
        """Compiles one of `jitted.programs`; may be called between any two calls of `step`."""
        with jax.set_mesh(self.mesh):
            self._state = program.call(params, self._state or self.jitted.empty())

    def submit(self, request: Request) -> int:
        """Queues a request or raises a `RequestError`; returns its number, unique until a reset."""
        self.limits.check(request, "request")
        return self._scheduler.add(request)

    def abort(self, number: int) -> list[Completion]:
        """Ends a request; returns its completions so far, `finish_reason` "abort" where running.

        A request that has finished, or never was, has none.
        """
        return self._scheduler.remove(number)

    def step(self, params: Params, version: int = 0, *, ahead: bool = False) -> list[Progress]:
        """Fills free slots from the queue and decodes a chunk.

        Args:
          params: Rollout parameters, `layers` a tuple. They may change between steps, with the
            same shapes and layout: prompts without a slot are read again, slots keep their keys
            and values.
          version: Of these weights; reported with every token that they draw.
          ahead: Nothing is submitted, aborted or changed before the next step, so the device may
            begin the next chunk before this one is read.

        Returns:
          One entry for each sample that got tokens, or failed.
        """
        scheduler = self._scheduler
        chunk, self._chunk = self._chunk, None
        with jax.set_mesh(self.mesh):
            began = time.perf_counter()
            if chunk is None:
                # Again until no slot is free: a sample may end with its first token.
                while entering := scheduler.admit():
                    for batch in self._reader.split(params, entering, scheduler):
                        self._insert(*batch, version)
            filled = time.perf_counter()
            self._sums += Statistics(prefill_s=filled - began)
            if self.num_active:
                if chunk is None:
                    num_slots = self._settle()
                    chunk = self._dispatch(params, version, num_slots, max(scheduler.lengths()))
                if ahead:
                    self._chunk = self._dispatch_ahead(params, version, chunk)
                self._take(chunk)
                self._sums += Statistics(decode_s=time.perf_counter() - filled)
        return scheduler.progress()

    def generate(
        self, params: Params, requests: Sequence[Request], version: int = 0, longest_prompt: int = 0
    ) -> list[list[Completion]]:
        """Returns the completions of every request, in the order of its samples.

        Args:
          longest_prompt: Tokens of the longest prompt of any call; with it, calls whose own longest
            prompts differ read them with the same program.

        Raises:
          RequestError, ValueError: If a request does not fit, or submitted ones are not finished.
          Exception: What the host's work for a sample raised, such as `decode`.
        """
        if self.num_waiting or self.num_active:
            raise ValueError(
                f"generate: {self.num_waiting} submitted samples are waiting and"
                f" {self.num_active} running; finish them with step, abort them, or reset"
            )
        for i, request in enumerate(requests):
            self.limits.check(request, f"request {i}")
        self.reset()
        self._reader.longest = longest_prompt
        scheduler = self._scheduler
        completions = [scheduler.completions(scheduler.add(request)) for request in requests]
        try:
            while self.num_waiting or self.num_active:
                for progress in self.step(params, version, ahead=True):
                    if progress.error is not None:
                        raise progress.error
            return completions
        except BaseException:
            self.reset()
            raise
        finally:
            # The cache's memory, and a chunk without active slots; statistics stay.
            self._state = self._chunk = None

    def _insert(
        self, prefix: Prefix, prompts: list[int], entering: list[Sample], version: int
    ) -> None:
        """Puts samples into slots; `prompts` are the indices of their prompts in the prefix."""
        filtered, num_top = self._switches(entering)
        self._state, outputs = self.jitted.insert(
            self._state or self.jitted.empty(),
            prefix,
            scheduler_lib.admission(
                [(sample.key, sample.params) for sample in entering],
                [sample.slot for sample in entering],
                prompts,
                _at_least(len(entering), self.jitted.insert_sizes),
                self.num_slots,
            ),
            filtered=filtered,
            num_top=num_top,
        )
        self._scheduler.take_first(entering, jax.device_get(outputs), version)

    def _settle(self) -> int:
        """Brings the device in step with the scheduler; returns how many slots need to decode."""
        # Fewer active samples move together at the front, where a smaller program decodes them.
        scheduler = self._scheduler
        num_slots = _at_least(self.num_active, self.jitted.slot_counts)
        moves = scheduler.compact(num_slots)
        for i in range(0, len(moves), MOVES):
            pairs = np.full((MOVES, 2), self.num_slots, np.int32)
            pairs[: len(moves[i : i + MOVES])] = moves[i : i + MOVES]
            self._state = self.jitted.move(self._state, pairs[:, 0], pairs[:, 1])
        if stale := scheduler.stale_slots():
            mask = np.zeros(self.num_slots, bool)
            mask[stale] = True
            self._state = self.jitted.release(self._state, mask)
        return num_slots

    def _dispatch(self, params: Params, version: int, num_slots: int, longest: int) -> _Chunk:
        """Gives the device a chunk of steps; no active sequence has over `longest` tokens."""
        queue_waits = self.num_waiting > 0
        filtered, num_top = self._switches(self._scheduler.active.values())
        self._state, outputs = self.jitted.generate(
            params,
            self._state,
            # While samples wait, a sixteenth of the slots free is worth a refill; afterwards the
            # device runs on until its chunk or its work is done.
            np.int32(max(1, num_slots // 16) if queue_waits else num_slots),
            num_slots=num_slots,
            window=_at_least(min(longest, self.max_tokens), self.jitted.windows),
            filtered=filtered,
            num_top=num_top,
        )
        return _Chunk(outputs, version, num_slots, queue_waits)

    def _dispatch_ahead(self, params: Params, version: int, chunk: _Chunk) -> _Chunk | None:
        """Gives the device the chunk after one that is not read, unless the host must decide."""
        # It must while samples wait for a slot, where those that are left fit a smaller program,
        # and where texts are searched. That a sample ended early is seen one chunk late.
        left = self._scheduler.lengths(self.chunk_steps)
        searched = any(s.params.stop_strings for s in self._scheduler.active.values())
        if chunk.queue_waits or not left or searched:
            return None
        if _at_least(len(left), self.jitted.slot_counts) < chunk.num_slots:
            return None
        longest = max(left) + self.chunk_steps * self._step_tokens
        return self._dispatch(params, version, chunk.num_slots, longest)

    def _take(self, chunk: _Chunk) -> None:
        """Reads what a chunk sampled."""
        sampled = jax.device_get(chunk.outputs)
        # [steps, S]: an active slot gets a token in every step, whatever was guessed.
        given = np.reshape(sampled.tokens >= 0, (-1, self._step_tokens, chunk.num_slots))
        active = np.any(given, axis=1)
        steps, slot_steps = int(np.any(active, axis=1).sum()), int(active.sum())
        self._sums += Statistics(
            decode_tokens=self._scheduler.take(sampled, chunk.version),
            decode_steps=steps,
            slot_steps=slot_steps,
            guesses=slot_steps * (self._step_tokens - 1),
            busy_room=steps * self.num_slots if chunk.queue_waits else 0,
            busy_slot_steps=slot_steps if chunk.queue_waits else 0,
        )

    def _switches(self, samples: Iterable[Sample]) -> tuple[bool, int]:
        """Returns (filtered, num_top): what these samples need of a program, others do not."""
        params = [sample.params for sample in samples]
        most = max((p.num_top_log_probs for p in params), default=0)
        num_top = bucket(most, largest=self.limits.max_top_log_probs) if most else 0
        return any(p.is_filtered for p in params), num_top


def _at_least(smallest: int, sizes: Sequence[int]) -> int:
    """Returns the first of rising sizes that is not below `smallest`."""
    return sizes[bisect.bisect_left(sizes, smallest)]
