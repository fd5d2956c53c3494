"""The rollout engine: prefill, insert and generate over decode slots, kept full."""

import contextlib
import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.samples import NO_SPECULATION
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import inputs, programs
from jaxrl_llm.rollout.jitted import MOVES, Jitted, Program
from jaxrl_llm.rollout.pages import Pages
from jaxrl_llm.rollout.prefill import Prefix
from jaxrl_llm.rollout.reader import Reader
from jaxrl_llm.rollout.requests import (
    Completion,
    Decode,
    Limits,
    Progress,
    Request,
    SamplingParams,
    Statistics,
)
from jaxrl_llm.rollout.scheduler import Sample, Scheduler
from jaxrl_llm.sharding import telling

_ONE = SamplingParams(max_tokens=1)


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
        keeps_routes: bool = False,
        cache_tokens: int = 0,
        prompt_shapes: Sequence[inputs.Shape] = (),
    ):
        """
        Args:
          max_tokens: Longest prompt plus response.
          chunk_steps: Most decode steps before the host reads their tokens.
          layout: Of the weights, as `config.mesh.rollout`; slots and heads are split by it.
          decode: Tokens to text; without it requests with stop strings are refused.
          keeps_routes: Whether completions say which experts their tokens visited.
          cache_tokens: Of all slots, in `network.cached_dtype`; 0: `num_slots` times `max_tokens`.
            At least one sequence of `max_tokens` fits on each shard of the slots.
          prompt_shapes: Rows in which prompts are read, as `inputs.few_shapes`; others are read in
            rows that fit them, each kind a program.
        """
        self.network, self.mesh, self.layout = network, mesh, layout
        self.num_slots, self.max_tokens, self.chunk_steps = num_slots, max_tokens, chunk_steps
        self._step_tokens = 1 + speculation.draft_tokens  # that a step may give a slot
        self._chunk_tokens = chunk_steps * self._step_tokens
        self._decode = decode or str  # str is never called
        self.jitted = Jitted(
            network,
            mesh,
            num_slots,
            max_tokens,
            chunk_steps,
            layout,
            speculation,
            keeps_routes,
            cache_tokens,
        )
        vocab_size, num_routes = network.shape.vocab_size, self.jitted.num_routes
        vector_size = network.shape.hidden_size if network.shape.rope_sections else 0
        self.limits = Limits(max_tokens, vocab_size, decode is not None, num_routes, vector_size)
        self.prompt_shapes = prompt_shapes
        self.reset()

    def another(self) -> "Engine":
        """Returns an engine with the same compiled programs, requests and a cache of its own."""
        other = copy.copy(self)
        other.reset()
        return other

    def reset(self) -> None:
        """Forgets every request and gives the cache's memory back; keeps compiled programs."""
        self.statistics = Statistics()  # `generate` resets when it begins
        self._pages = Pages(self.jitted.pages)
        self._scheduler = Scheduler(self._decode, self._pages, self._chunk_tokens)
        read = lambda *args: self.jitted.prefill(*args)  # noqa: E731
        num_routes = self.jitted.num_routes
        self._reader = Reader(
            read, self.max_tokens, self.statistics, num_routes, self.prompt_shapes
        )
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

    def num_compilations(self) -> int:
        """Returns how many programs were compiled so far."""
        names = ("empty", "prefill", "insert", "extend", "generate", "release", "move")
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
        """Ends a request; returns its completions so far, none if it has ended or never was."""
        return self._scheduler.remove(number)

    def completions(self, number: int) -> list[Completion]:
        """Returns those of an unfinished request; they grow until their samples end."""
        return self._scheduler.completions(number)

    def forget(self, number: int, index: int) -> None:
        """Gives back the pages that are kept for who continues a sample, if there are any."""
        self._scheduler.forget(number, index)

    def step(self, params: Params, version: int = 0, *, ahead: bool = False) -> list[Progress]:
        """Fills free slots from the queue and decodes a chunk.

        Returns one entry for each sample that got tokens, or failed.

        Args:
          params: Rollout parameters, `layers` a tuple. Others of the same shapes and layout may
            follow: prompts without a slot are read again, slots keep their keys and values.
          version: Of these weights; reported with every token that they draw.
          ahead: Nothing is submitted, aborted or changed before the next step, so the device may
            begin the next chunk before this one is read.
        """
        scheduler, chunk, self._chunk = self._scheduler, self._chunk, None
        self.jitted.ready()
        with jax.set_mesh(self.mesh):
            began = time.perf_counter()
            if self._reader.use(params):
                self._pages.forget_prompts()
            if chunk is None:
                # Who has pages keeps them before others enter.
                scheduler.reserve(self._chunk_tokens, by_force=True)
                # Again until no slot is free: a sample may end with its first token.
                while entering := scheduler.admit():
                    fresh = [sample for sample in entering if sample.is_fresh]
                    others = [sample for sample in entering if not sample.is_fresh]
                    for batch in self._reader.split(params, fresh, scheduler):
                        self._insert(*batch, version)
                    self._extend(params, others, version)
                scheduler.reserve(self._chunk_tokens, by_force=True)
                self.statistics.reread_tokens = scheduler.reread_tokens
                self.statistics.put_back = scheduler.num_put_back
            filled = time.perf_counter()
            self.statistics.prefill_s += filled - began
            if self.num_active:
                if chunk is None:
                    num_slots = self._settle()
                    chunk = self._dispatch(params, version, num_slots, max(scheduler.lengths()))
                if ahead:
                    self._chunk = self._dispatch_ahead(params, version, chunk)
                self._take(chunk)
                self.statistics.most_pages = self._pages.most_used
                self.statistics.decode_s += time.perf_counter() - filled
        return scheduler.progress()

    def generate(
        self, params: Params, requests: Sequence[Request], version: int = 0
    ) -> list[list[Completion]]:
        """Returns the completions of every request, in the order of its samples.

        Raises:
          RequestError, ValueError: If a request does not fit, or submitted ones are not finished.
          Exception: What the host's work for a sample raised, such as `decode`.
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
        """An engine without requests, whose cache's memory is given back in the end.

        Raises ValueError if submitted requests are not finished.
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
            # The cache's memory, and a chunk without active slots; statistics stay.
            self._state = self._chunk = None

    def _insert(self, prefix: Prefix, prompts: dict[Sample, int], version: int) -> None:
        """Puts samples into slots; `prompts` are the indices of their prompts in the prefix."""
        filtered, num_top = self._switches(prompts)
        entering = [(index, s.slot, s.key, s.params) for s, index in prompts.items()]
        size = min(n for n in self.jitted.insert_sizes if n >= len(prompts))
        offsets = [sample.offset for sample in prompts]
        wanted = [(page, index, at) for s, index in prompts.items() for page, at in s.writes]
        most = self.jitted.num_writes(prefix, size)
        # More than one part: each shard of the slots has pages of its own.
        parts = [wanted[i : i + most] for i in range(0, len(wanted), most)] or [[]]
        for number, part in enumerate(parts, 1):
            samples = entering if number == len(parts) else []
            self._state, outputs = self.jitted.insert(
                self._state or self.jitted.empty(),
                prefix,
                inputs.admission(samples, size, self.num_slots, offsets[: len(samples)]),
                inputs.writes(part, most, self.jitted.pages.num_pages),
                filtered=filtered,
                num_top=num_top,
            )
        self._scheduler.take_first(list(prompts), telling.fetched(outputs), version)

    def _extend(self, params: Params, continuing: list[Sample], version: int) -> None:
        """Reads the tokens of samples that their pages do not hold."""
        at = {sample: sample.shared for sample in continuing}  # the next token to read
        sampled: list[tuple[list[Sample | None], programs.Outputs]] = []  # read when all is begun
        tokens = {sample: sample.tokens for sample in continuing}
        layout, history_tokens = self.jitted.pages, self.jitted.history_tokens
        while at:
            longest = max(s.num_tokens - n for s, n in at.items())
            rows, width = inputs.continuation_size(longest, len(at), self.num_slots)
            part = list(at.items())[:rows]
            samples = [sample for sample, _ in part]
            pieces = [tokens[sample][n : n + width] for sample, n in part]
            ends = [n + width >= len(tokens[sample]) for sample, n in part]
            seen = [
                (inputs.longer_sights(s.sights, s.num_tokens, s.offset), s.offset) for s in samples
            ]
            filtered, num_top = self._switches(at)
            # What follows a piece that is not the last is sampled too, and dropped.
            params_of = [
                s.params_left if end else _ONE for s, end in zip(samples, ends, strict=True)
            ]
            entering = [(0, s.slot, s.key, p) for s, p in zip(samples, params_of, strict=True)]
            table = layout.table(enumerate(s.pages for s in samples), rows)
            starts, histories = [n for _, n in part], [tokens[sample] for sample in samples]
            given = pieces, starts, rows, width, table, seen, histories, history_tokens
            self._state, outputs, routes = self.jitted.extend(
                params,
                self._state or self.jitted.empty(),
                inputs.continuation(*given),
                inputs.admission(entering, rows, self.num_slots, [n for _, n in seen]),
                window=_at_least(max(starts), self.jitted.read_windows),
                filtered=filtered,
                num_top=num_top,
            )
            self.statistics.prefill_tokens += sum(map(len, pieces))
            self.statistics.prefill_positions += rows * width
            if self.jitted.num_routes:
                visited = telling.fetched(routes)
                for row, (sample, n) in enumerate(part):
                    known = max(0, sum(map(len, sample.completion.routes)) - n)
                    sample.completion.routes.append(visited[row, known : len(pieces[row])])
            entered = [s if end else None for (s, _), end in zip(part, ends, strict=True)]
            sampled.append((entered, outputs))
            for (sample, n), end in zip(part, ends, strict=True):
                at[sample] = n + width
                if end:
                    del at[sample]
        for entered, outputs in sampled:
            self._scheduler.take_first(entered, telling.fetched(outputs), version)

    def _settle(self) -> int:
        """Brings the device in step with the scheduler; returns how many slots need to decode."""
        # Fewer active samples move together at the front, where a smaller program decodes them.
        num_slots = min(n for n in self.jitted.slot_counts if n >= self.num_active)
        moves = self._scheduler.compact(num_slots)
        for i in range(0, len(moves), MOVES):
            pairs = np.full((MOVES, 2), self.num_slots, np.int32)
            pairs[: len(moves[i : i + MOVES])] = moves[i : i + MOVES]
            self._state = self.jitted.move(self._state, pairs[:, 0], pairs[:, 1])
        if stale := self._scheduler.stale_slots():
            mask = np.zeros(self.num_slots, bool)
            mask[stale] = True
            self._state = self.jitted.release(self._state, mask)
        return num_slots

    def _dispatch(self, params: Params, version: int, num_slots: int, longest: int) -> _Chunk:
        """Gives the device a chunk of steps; no active sequence has over `longest` tokens."""
        queue_waits = self.num_waiting > 0
        enough = num_slots - self.num_active + max(1, num_slots // 16)
        filtered, num_top = self._switches(self._scheduler.active.values())
        self._state, outputs = self.jitted.generate(
            params,
            self._state,
            self._scheduler.table(),
            # While samples wait, another sixteenth of the slots free is worth a refill (some are
            # free where pages are short); else the device runs on until its chunk or work is done.
            np.int32(min(num_slots, enough) if queue_waits else num_slots),
            num_slots=num_slots,
            window=_at_least(longest, self.jitted.windows),
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
        fewer = any(len(left) <= count < chunk.num_slots for count in self.jitted.slot_counts)
        if chunk.queue_waits or not left or searched or fewer:
            return None
        if not self._scheduler.reserve(2 * self._chunk_tokens, by_force=False):
            return None
        longest = max(left) + self._chunk_tokens
        return self._dispatch(params, version, chunk.num_slots, longest)

    def _take(self, chunk: _Chunk) -> None:
        """Reads what a chunk sampled."""
        sampled = telling.fetched(chunk.outputs)
        # [steps, S]: an active slot gets a token in every step, whatever was guessed.
        given = np.reshape(sampled.tokens >= 0, (-1, self._step_tokens, chunk.num_slots))
        active = np.any(given, axis=1)
        steps, slot_steps = int(np.any(active, axis=1).sum()), int(active.sum())
        s = self.statistics
        s.decode_tokens += self._scheduler.take(sampled, chunk.version)
        s.decode_steps += steps
        s.slot_steps += slot_steps
        s.guesses += slot_steps * (self._step_tokens - 1)
        if chunk.queue_waits:
            s.busy_room += steps * self.num_slots
            s.busy_slot_steps += slot_steps

    def _switches(self, samples: Iterable[Sample]) -> tuple[bool, int]:
        """Returns (filtered, num_top): what these samples need of a program, others do not."""
        params = [sample.params for sample in samples]
        most = max((p.num_top_log_probs for p in params), default=0)
        num_top = bucket(most, largest=self.limits.max_top_log_probs) if most else 0
        return any(p.is_filtered for p in params), num_top


def _at_least(tokens: int, windows: Sequence[int]) -> int:
    return next((size for size in windows if size >= tokens), windows[-1])
