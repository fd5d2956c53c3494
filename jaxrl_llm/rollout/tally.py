"""What the engine did, in tokens, steps and seconds."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the engine did since its last reset."""

    prefill_tokens: int  # of prompts, each counted once
    decode_tokens: int  # sampled
    decode_steps: int  # times num_slots, the room there was
    occupancy: float  # share of the slots' steps that sampled a token, until the queue was empty
    prefill_s: float
    decode_s: float


class Tally:
    """Adds up what `Statistics` tells."""

    def __init__(self, num_slots: int):
        self._num_slots = num_slots
        self._prefill_s = self._decode_s = 0.0
        self._steps = self._tokens = self._busy_steps = self._busy_tokens = 0

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

    def add_chunk(self, *, steps: int, tokens: int, queue_waits: bool) -> None:
        self._steps += steps
        self._tokens += tokens
        if queue_waits:
            self._busy_steps += steps
            self._busy_tokens += tokens

    def statistics(self, prefill_tokens: int) -> Statistics:
        room = self._busy_steps * self._num_slots
        return Statistics(
            prefill_tokens=prefill_tokens,
            decode_tokens=self._tokens,
            decode_steps=self._steps,
            occupancy=self._busy_tokens / room if room else 1.0,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
        )
