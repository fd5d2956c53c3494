"""What the engine did, in tokens, steps and seconds."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator


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


class Tally:
    """Adds up what `Statistics` tells."""

    def __init__(self, num_slots: int, draft_tokens: int):
        """
        Args:
          num_slots: Of the engine.
          draft_tokens: Guesses that a decode step checks in each slot.
        """
        self._num_slots = num_slots
        self._draft_tokens = draft_tokens
        self._sums = Statistics()
        self._prefill_s = self._decode_s = 0.0

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
        self._sums += Statistics(
            decode_tokens=tokens,
            decode_steps=steps,
            slot_steps=slot_steps,
            guesses=slot_steps * self._draft_tokens,
            busy_room=steps * self._num_slots if queue_waits else 0,
            busy_slot_steps=slot_steps if queue_waits else 0,
        )

    def statistics(self, prefill_tokens: int, prefill_positions: int) -> Statistics:
        """Returns all of it."""
        return dataclasses.replace(
            self._sums,
            prefill_tokens=prefill_tokens,
            prefill_positions=prefill_positions,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
        )
