"""How responses are sampled, and how the engine works where that changes speed alone."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from jaxrl_llm.errors import Problem

# Of the temperatures above 0 (greedy). Float32 logits are right to about 2e-6: divided by less
# than this, that error alone would decide what is drawn and what training learns of it.
MIN_TEMPERATURE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Tokens guessed from the sequence itself, and checked by one pass over all of them.

    It pays where responses repeat their prompts or themselves and few slots decode; the samples
    are the same.
    """

    draft_tokens: int = 0  # guesses in a decode step; 0: off
    ngram_tokens: int = 3  # longest ending of a sequence that is looked for in it

    def problems(self) -> Iterator[Problem]:
        if not 0 <= self.draft_tokens <= 16:
            yield "draft_tokens", f"must lie in [0, 16] (0: off), got {self.draft_tokens}"
        if not 1 <= self.ngram_tokens <= 16:
            yield "ngram_tokens", f"must lie in [1, 16], got {self.ngram_tokens}"


NO_SPECULATION = SpeculationConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are sampled."""

    max_response_tokens: int = 256
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()  # beside the tokenizer's end of sequence
    num_slots: int = 0  # 0: chosen from the work and the memory
    chunk_steps: int = 16  # decode steps between two looks of the host
    dtype: Literal["compute", "float32", "bfloat16"] = "compute"
    speculation: SpeculationConfig = NO_SPECULATION

    def problems(self) -> Iterator[Problem]:
        if self.max_response_tokens < 1:
            yield "max_response_tokens", f"must be at least 1, got {self.max_response_tokens}"
        if not 0.0 <= self.temperature < math.inf:
            yield "temperature", f"must be finite and not negative, got {self.temperature}"
        if self.top_k < 0:
            yield "top_k", f"must not be negative (0: off), got {self.top_k}"
        if not 0.0 < self.top_p <= 1.0:
            yield "top_p", f"must lie in (0, 1], got {self.top_p}"
        if not 0.0 <= self.min_p < 1.0:
            yield "min_p", f"must lie in [0, 1), got {self.min_p}"
        if len(self.stop_tokens) > 8:
            yield "stop_tokens", f"at most 8, got {len(self.stop_tokens)}"
        if self.num_slots < 0:
            yield "num_slots", f"must not be negative (0: chosen), got {self.num_slots}"
        if not 1 <= self.chunk_steps <= 128:
            yield "chunk_steps", f"must lie in [1, 128], got {self.chunk_steps}"
