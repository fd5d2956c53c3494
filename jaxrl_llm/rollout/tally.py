"""What the engine did, in tokens, steps and seconds."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the engine did since its last reset."""

    prefill_tokens: int  # of prompts, each counted once
    prefill_positions: int  # computed for them, padding included
    decode_tokens: int  # sampled
    decode_steps: int  # times num_slots, the room there was
    occupancy: float  # share of the slots' steps that sampled a token, until the queue was empty
    tokens_per_forward: float  # of a slot in one decode step; 1 without speculation
    acceptance: float  # share of the guesses' places whose guess was kept; 0 without speculation
    prefill_s: float
    decode_s: float


class Tally:
    """Adds up what `Statistics` tells."""

    def __init__(self, num_slots: int):
        self._num_slots = num_slots
        self._prefill_s = self._decode_s = 0.0
        self._steps = self._slot_steps = self._tokens = 0
        self._busy_steps = self._busy_slot_steps = 0

    @contextlib.contextmanager
    def prefill(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._prefill_s += time.perf_counter() - began

    @contextlib.contextmanager
    def decode(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._decode_s += time.perf_counter() - began

    def add_chunk(self, *, steps: int, slot_steps: int, tokens: int, queue_waits: bool) -> None:
        """Adds decode steps, those of each slot that was active, and the tokens they gave."""
        self._steps += steps
        self._slot_steps += slot_steps
        self._tokens += tokens
        if queue_waits:
            self._busy_steps += steps
            self._busy_slot_steps += slot_steps

    def statistics(
        self, prefill_tokens: int, prefill_positions: int, draft_tokens: int
    ) -> Statistics:
        """Returns all of it; guesses in a step are `draft_tokens`."""
        room = self._busy_steps * self._num_slots
        guesses = self._slot_steps * draft_tokens
        return Statistics(
            prefill_tokens=prefill_tokens,
            prefill_positions=prefill_positions,
            decode_tokens=self._tokens,
            decode_steps=self._steps,
            occupancy=self._busy_slot_steps / room if room else 1.0,
            tokens_per_forward=self._tokens / self._slot_steps if self._slot_steps else 1.0,
            acceptance=(self._tokens - self._slot_steps) / guesses if guesses else 0.0,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
        )
