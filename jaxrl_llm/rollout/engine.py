"""The rollout engine: prefill, insert and generate over decode slots, kept full.

The engine owns compiled programs and no weights: parameters are an argument of every call,
so new weights of the same layout cost nothing. One host loop serves one process or many:
its decisions follow from replicated device outputs and from the requests alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.rollout import NO_SPECULATION
from jaxrl_llm.data.packing import bucket
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import admission, prefixes, programs, warm_up
from jaxrl_llm.rollout.checks import Limits
from jaxrl_llm.rollout.compiled import Compiled
from jaxrl_llm.rollout.prefill import Prefix
from jaxrl_llm.rollout.requests import (
    MAX_TOP_LOG_PROBS,
    Completion,
    Progress,
    Request,
    SamplingParams,
)
from jaxrl_llm.rollout.scheduler import Placement, Sampled, Scheduler
from jaxrl_llm.rollout.stopping import Decode
from jaxrl_llm.rollout.tally import Statistics, Tally
from jaxrl_llm.rollout.warm_up import MOVES, Program


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Decode steps that the device was given and the host has not read."""

    outputs: programs.Outputs
    version: int  # of the weights
    num_slots: int
    queue_waits: bool


def _no_decoder(tokens: Sequence[int]) -> str:
    raise AssertionError("requests with stop strings are refused by an engine without decoder")


class Engine:
    """Samples completions of prompts on a mesh.

    Two ways to use it: `generate` for a list of prompts; or `submit` and `abort` at any time
    between turns of `step`. Not for several threads.
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
        decode: Decode = _no_decoder,
    ):
        """
        Args:
          network: The policy; its `compute_dtype` is the cache's.
          mesh: Where weights, slots and heads are split.
          num_slots: Sequences decoded at one time.
          max_tokens: Longest prompt plus response; the cache's length.
          chunk_steps: Most decode steps between two looks of the host.
          layout: Of the weights, a key of `mesh.LAYOUTS`; it decides what slots and heads are
            split over, where they divide.
          speculation: Guesses that are checked together; they change speed, not samples.
          decode: Tokens to text, for stop strings; without it requests that have some are refused.
        """
        self.network = network
        self.mesh = mesh
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.chunk_steps = chunk_steps
        self.layout = layout
        # Two sizes, so two programs: of a refill, and of the first fill.
        self._insert_sizes = (min(num_slots, max(8, num_slots // 8)), num_slots)
        self._places = 1 + speculation.draft_tokens  # tokens that a step may give a slot
        self._decode = decode
        self.limits = Limits(max_tokens, network.shape.vocab_size, decode is not _no_decoder)
        self.compiled = Compiled(
            network,
            mesh,
            num_slots=num_slots,
            max_tokens=max_tokens,
            chunk_steps=chunk_steps,
            layout=layout,
            speculation=speculation,
        )
        self.reset()

    def reset(self) -> None:
        """Forgets every request and gives the cache's memory back; keeps compiled programs."""
        self._scheduler = Scheduler(self.num_slots, self._decode)
        self._prefixes = prefixes.Prefixes(
            lambda *args: self.compiled.prefill(*args), self.max_tokens
        )
        self._tally = Tally(self.num_slots, self._places - 1)
        self._state: programs.DecodeState | None = None
        self._chunk: _Chunk | None = None  # the device is at work on it

    @property
    def num_waiting(self) -> int:
        """Samples that have no slot yet."""
        return self._scheduler.num_waiting

    @property
    def num_active(self) -> int:
        """Samples that stand in a slot."""
        return self._scheduler.num_active

    @property
    def statistics(self) -> Statistics:
        """What was done since the last reset; `generate` resets when it begins."""
        return self._tally.statistics(self._prefixes.num_tokens, self._prefixes.num_positions)

    def num_compilations(self) -> int:
        """Returns how many programs were compiled so far."""
        return self.compiled.count()

    def programs(
        self, num_prompts: int, prompt_tokens: int, filters: Sequence[bool] = (False,)
    ) -> list[Program]:
        """Returns what to `compile` for requests of these kinds (see `warm_up.programs`).

        Afterwards nothing compiles while up to `num_prompts` are read together (4096 tokens,
        padding included), each of up to `prompt_tokens`. Otherwise programs compile when they
        are first needed.
        """
        return warm_up.programs(
            self.compiled,
            max_tokens=self.max_tokens,
            num_slots=self.num_slots,
            insert_sizes=self._insert_sizes,
            num_prompts=num_prompts,
            prompt_tokens=prompt_tokens,
            filters=filters,
        )

    def compile(self, params: Params, program: Program) -> None:
        """Compiles a program of `programs`; may be called between any two turns of `step`."""
        with jax.set_mesh(self.mesh):
            state = self.compiled.empty() if self._state is None else self._state
            self._state = program.call(params, state)

    def submit(self, request: Request) -> int:
        """Queues a request; returns its number, never given twice between two resets.

        Raises:
          RequestError: If the engine cannot serve it: an empty prompt, token ids outside the
            vocabulary, prompt and response longer than the cache, a number out of its range.
        """
        self.limits.check(request, "request")
        return self._scheduler.add(request)

    def abort(self, number: int) -> list[Completion]:
        """Ends a request; returns its completions so far, `finish_reason` "abort" where running.

        Its slots are free for the next `step`. Of a request that has finished, or never was,
        nothing is returned and nothing happens. Tokens that were sampled and not yet reported do
        not exist: every `step` reports all it samples.
        """
        return self._scheduler.remove(number)

    def step(self, params: Params, version: int = 0) -> list[Progress]:
        """Takes one turn: fills free slots from the queue, decodes a chunk.

        Args:
          params: Rollout parameters, `layers` a tuple. They may differ from those of the turn
            before, with the same shapes and layout: prompts that were not yet placed are read
            anew, slots keep the keys and values that the earlier weights gave.
          version: Of these weights; every token tells the one that drew it.

        Returns:
          One entry for each sample that got tokens, or failed; none if there is nothing to do.
        """
        return self._turn(params, version, ahead=False)

    def _turn(self, params: Params, version: int, *, ahead: bool) -> list[Progress]:
        """Takes a turn; `ahead`: the device may begin the next chunk before this one is read."""
        scheduler = self._scheduler
        done, self._chunk = self._chunk, None
        with jax.set_mesh(self.mesh):
            if done is None:
                with self._tally.prefill():
                    # Again until no slot is free: a sample may end with its first token.
                    while placements := scheduler.admit():
                        for batch in self._prefixes.split(params, placements, scheduler):
                            self._admit(*batch, version)
            if scheduler.num_active:
                with self._tally.decode():
                    if done is None:
                        num_slots = self._settle()
                        done = self._dispatch(params, version, num_slots, max(scheduler.lengths()))
                    if ahead:
                        self._chunk = self._dispatch_ahead(params, version, done)
                    self._take(done)
        return scheduler.progress()

    def generate(
        self, params: Params, requests: Sequence[Request], version: int = 0
    ) -> list[list[Completion]]:
        """Returns the completions of every request, in the order of its samples.

        Args:
          params: Rollout parameters, `layers` a tuple.
          requests: Prompts with what to draw of each.
          version: Of the weights.

        Raises:
          RequestError: If a request does not fit (see `submit`).
          ValueError: If submitted ones are not finished.
          Exception: What was raised on behalf of a sample, such as by `decode`.
        """
        if self.num_waiting or self.num_active:
            raise ValueError(
                f"generate: {self.num_waiting} submitted samples are waiting and"
                f" {self.num_active} running; finish them with step, abort them, or reset"
            )
        for i, request in enumerate(requests):
            self.limits.check(request, f"request {i}")
        self.reset()
        add = self._scheduler.add
        completions = {add(r): [Completion() for _ in r.params] for r in requests}
        try:
            while self.num_waiting or self.num_active:
                # No request comes or goes meanwhile, so the host may be a chunk behind.
                for p in self._turn(params, version, ahead=True):
                    if p.error is not None:
                        raise p.error
                    completion = completions[p.request][p.sample]
                    completion.tokens += p.tokens
                    completion.log_probs += p.log_probs
                    completion.versions += p.versions
                    completion.top_log_probs += p.top_log_probs
                    completion.finish_reason = p.finish_reason
            return list(completions.values())
        except BaseException:
            self.reset()
            raise
        finally:
            # The cache's memory, and a chunk without active slots; statistics stay.
            self._state = self._chunk = None

    def _admit(
        self, prefix: Prefix, places: list[int], placements: list[Placement], version: int
    ) -> None:
        size = next(size for size in self._insert_sizes if size >= len(placements))
        scheduler = self._scheduler
        drawn = [
            (scheduler.request(p.request).keys[p.sample], scheduler.params(p)) for p in placements
        ]
        state = self.compiled.empty() if self._state is None else self._state
        self._state, outputs = self.compiled.insert(
            state,
            prefix,
            admission.lay_out(drawn, [p.slot for p in placements], places, size, self.num_slots),
            **self._switches([params for _, params in drawn]),
        )
        scheduler.take_first(placements, _read(outputs, version))

    def _settle(self) -> int:
        """Brings the device in step with the scheduler; returns how many slots need to decode.

        Fewer active samples move together at the front, where a smaller program decodes them.
        """
        scheduler = self._scheduler
        num_slots = self._num_slots_for(scheduler.num_active)
        moves = scheduler.compact(num_slots)
        for i in range(0, len(moves), MOVES):
            pairs = np.full((MOVES, 2), self.num_slots, np.int32)
            pairs[: len(moves[i : i + MOVES])] = moves[i : i + MOVES]
            self._state = self.compiled.move(self._state, pairs[:, 0], pairs[:, 1])
        if stale := [slot for slot in scheduler.stale_slots() if slot < self.num_slots]:
            mask = np.zeros(self.num_slots, bool)
            mask[stale] = True
            self._state = self.compiled.release(self._state, mask)
        return num_slots

    def _num_slots_for(self, num_samples: int) -> int:
        """Returns how many slots the smallest program with room for so many samples decodes."""
        return next(n for n in self.compiled.slot_counts if n >= num_samples)

    def _dispatch(self, params: Params, version: int, num_slots: int, longest: int) -> _Chunk:
        """Gives the device a chunk of decode steps.

        Args:
          longest: At least the tokens of the longest active sequence.
        """
        queue_waits = self._scheduler.num_waiting > 0
        self._state, outputs = self.compiled.generate(
            params,
            self._state,
            # While samples wait all slots are taken, and a sixteenth of them is worth a refill;
            # afterwards the device runs on until its chunk or its work is done.
            np.int32(max(1, num_slots // 16) if queue_waits else num_slots),
            num_slots=num_slots,
            window=next((w for w in self.compiled.windows if w >= longest), self.max_tokens),
            **self._switches(self._scheduler.active_params),
        )
        return _Chunk(outputs, version, num_slots, queue_waits)

    def _dispatch_ahead(self, params: Params, version: int, chunk: _Chunk) -> _Chunk | None:
        """Gives the device what follows a chunk that is not read, if the host has no say in it.

        It has while samples wait for a slot, where few enough will be left for a smaller program,
        or none, and where texts are searched for stop strings. Samples that end before their
        budgets do are found out a chunk late.
        """
        scheduler = self._scheduler
        left = scheduler.lengths(self.chunk_steps)
        if chunk.queue_waits or not left or any(p.stop_strings for p in scheduler.active_params):
            return None
        if self._num_slots_for(len(left)) < chunk.num_slots:
            return None
        longest = max(left) + self.chunk_steps * self._places
        return self._dispatch(params, version, chunk.num_slots, longest)

    def _take(self, chunk: _Chunk) -> None:
        """Reads what a chunk sampled."""
        sampled = _read(chunk.outputs, chunk.version)
        # [N, S]: an active slot gets a token in every step, whatever was guessed.
        given = np.reshape(sampled.tokens >= 0, (-1, self._places, chunk.num_slots))
        active = np.any(given, axis=1)
        self._tally.add_chunk(
            steps=int(np.any(active, axis=1).sum()),
            slot_steps=int(active.sum()),
            tokens=self._scheduler.take(sampled),
            queue_waits=chunk.queue_waits,
        )

    def _switches(self, params: list[SamplingParams]) -> dict[str, Any]:
        """Returns what these samples need of a program that others can do without."""
        most = max((p.num_top_log_probs for p in params), default=0)
        widest = min(MAX_TOP_LOG_PROBS, self.network.shape.vocab_size)
        return {
            "filtered": any(p.is_filtered for p in params),
            "num_top": bucket(most, largest=widest) if most else 0,
        }


def _read(outputs: programs.Outputs, version: int) -> Sampled:
    o = jax.device_get(outputs)
    return Sampled(o.tokens, o.log_probs, o.top_tokens, o.top_log_probs, o.remaining, version)
