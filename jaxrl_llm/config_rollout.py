"""How the rollout engine works where it changes speed and not samples."""

import dataclasses
from collections.abc import Iterator

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
