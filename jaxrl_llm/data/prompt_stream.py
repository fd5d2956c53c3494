"""The endless stream of training prompts: seeded passes, mixtures, or as a curriculum says."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config import CurriculumConfig, DataConfig
from jaxrl_llm.config.samples import NO_CURRICULUM
from jaxrl_llm.data import curriculum as curriculum_lib
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.data.mixtures import Cursor, Mixed
from jaxrl_llm.data.streaming import StreamedRows
from jaxrl_llm.data.streams import MixedRows, Stream
from jaxrl_llm.types import Prompt, PromptBatch


class PromptIterator:
    """The training prompts: an endless stream in batches of any size, or as a curriculum says."""

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        seed: int,
        curriculum: CurriculumConfig = NO_CURRICULUM,
    ):
        rows = dataset.rows or dataset.prompts
        self.longest = dataset.longest  # tokens of the longest prompt; 0: not known
        self._curricula: list[Curriculum] = []
        self._cursor: Cursor[Prompt] = Stream(rows, seed, config.shuffle, config.num_workers)
        if curriculum.choice:
            parts = rows.parts if isinstance(rows, MixedRows) else (rows,)
            self._curricula = [
                Curriculum(part, curriculum, (seed + i) % 2**32)
                for i, part in enumerate(parts)
                if not isinstance(part, StreamedRows)
            ]
            self._cursor = self._curricula[0]
            if isinstance(rows, MixedRows):
                self._cursor = Mixed(self._curricula, rows.shares)

    def batch(self, num_prompts: int) -> PromptBatch:
        """Returns the next prompts; a batch may span two passes."""
        return PromptBatch(self._cursor.take(num_prompts), self.longest)

    def learn(self, prompts: Sequence[Prompt], scores: Sequence[np.ndarray]) -> None:
        """Takes the scores of the answers to each of these prompts of a batch."""
        for curriculum in self._curricula:
            curriculum.learn(prompts, scores)

    def metrics(self) -> dict[str, float]:
        """Returns what a curriculum knows of the prompts."""
        return curriculum_lib.metrics(self._curricula) if self._curricula else {}

    def get_state(self) -> dict[str, Any]:
        """Returns the position; JSON can hold it."""
        return self._cursor.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that `get_state` returned for the same prompts and config."""
        self._cursor.set_state(state)
