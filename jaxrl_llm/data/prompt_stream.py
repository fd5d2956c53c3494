"""The endless iterator of training prompts: seeded epochs, mixtures, or a curriculum."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import CurriculumConfig, DataConfig
from jaxrl_llm.config.rollout_data import NO_CURRICULUM
from jaxrl_llm.data import curriculum as curriculum_lib
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.data.mixtures import MixedIterator, RowIterator
from jaxrl_llm.data.streaming import StreamedRows
from jaxrl_llm.data.streams import MixedRows, Stream
from jaxrl_llm.types import Prompt, PromptBatch


class PromptIterator:
    """Endless training prompts in batches of any size, in seeded order or drawn by a curriculum."""

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        seed: int,
        curriculum: CurriculumConfig = NO_CURRICULUM,
    ):
        rows = dataset.rows or dataset.prompts
        # length of the longest prompt in tokens; 0: unknown
        self.max_prompt_tokens = dataset.max_prompt_tokens
        self._curricula: list[Curriculum] = []
        self._cursor: RowIterator[Prompt] = Stream(rows, seed, config.shuffle, config.num_workers)
        if curriculum.choice:
            parts = rows.parts if isinstance(rows, MixedRows) else (rows,)
            self._curricula = [
                Curriculum(part, curriculum, (seed + i) % 2**32)
                for i, part in enumerate(parts)
                if not isinstance(part, StreamedRows)
            ]
            self._cursor = self._curricula[0]
            if isinstance(rows, MixedRows):
                self._cursor = MixedIterator(self._curricula, rows.shares)

    def next_batch(self, num_prompts: int) -> PromptBatch:
        """Draws the next prompts; a batch may span two epochs."""
        return PromptBatch(self._cursor.take(num_prompts), self.max_prompt_tokens)

    def learn(self, prompts: Sequence[Prompt], scores: Sequence[np.ndarray]) -> None:
        """Reports the scores of the responses to these prompts to the curriculum."""
        for curriculum in self._curricula:
            curriculum.learn(prompts, scores)

    def metrics(self) -> dict[str, float]:
        """Metrics of the curriculum; empty without one."""
        return curriculum_lib.metrics(self._curricula) if self._curricula else {}

    def get_state(self) -> dict[str, Any]:
        """The position as JSON-compatible state."""
        return self._cursor.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned for the same prompts and config."""
        self._cursor.set_state(state)
