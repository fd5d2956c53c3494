"""Prompts in tokens, and the endless seeded stream that a run draws them from."""

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import grain
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import DataConfig
from jaxrl_llm.console import screen
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tasks import Split, task_rows
from jaxrl_llm.data.token_bound import token_bound
from jaxrl_llm.data.tokenizer import prompt_texts, prompt_tokens
from jaxrl_llm.types import Prompt, PromptBatch

T = TypeVar("T")

_CALL_CHARACTERS = 1 << 18  # tokenized in one call, between two reports of progress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The prompts of one split, in the order of their source.

    `prompt.index` is the row of the source: it has gaps where long prompts were dropped.
    """

    prompts: tuple[Prompt, ...]
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((len(prompt.tokens) for prompt in self.prompts), default=0)

    def batches(self, num_prompts: int, limit: int = 0) -> list[PromptBatch]:
        """Returns the first `limit` prompts (0: all) in order; the last batch may be smaller."""
        longest, prompts = self.longest, self.prompts[: limit or len(self)]
        starts = range(0, len(prompts), num_prompts)
        return [PromptBatch(prompts[i : i + num_prompts], longest) for i in starts]


def load_dataset(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split, seed: int
) -> Dataset:
    """Returns the prompts of a split, tokenized, those of at most `max_prompt_tokens`.

    `seed` draws the prompts of the arithmetic task; use the same one for both splits. A text that
    is too long by its number of characters is not tokenized.

    Raises:
      DataError: A file, a row or the chat template cannot be used; a prompt is empty, or too long
        while `filter_long_prompts` is off; no prompt is left.
    """
    rows = task_rows(config, split, seed)
    texts = prompt_texts(tokenizer, [row["prompt"] for row in rows], config.chat_template)
    bound = token_bound(tokenizer)
    fewest = [bound(text) for text in texts]  # tokens of each, at least
    candidates = [i for i, num in enumerate(fewest) if _fits(config, split, i, num, "at least ")]
    ends = list(itertools.accumulate(len(texts[index]) for index in candidates))
    calls = itertools.groupby(
        zip(candidates, ends, strict=True), key=lambda pair: pair[1] // _CALL_CHARACTERS
    )
    prompts = []
    with screen.work(f"tokenizing the {split} split", max(ends, default=0)) as advance:
        for _, pairs in calls:
            indices = [index for index, _ in pairs]
            found = prompt_tokens(tokenizer, [texts[i] for i in indices], config.chat_template)
            for index, tokens in zip(indices, found, strict=True):
                row, text, fewest[index] = rows[index], texts[index], len(tokens)
                if not tokens:
                    raise DataError(f"{split} split, row {index}: the prompt has no tokens")
                if _fits(config, split, index, len(tokens)):
                    truth, info = row["reward_model"]["ground_truth"], row["extra_info"]
                    prompts.append(Prompt(tokens, text, row["data_source"], truth, info, index))
                advance(len(text))
    if not prompts:
        raise DataError(
            f"config.data.max_prompt_tokens: all {len(rows)} prompts of the {split} split are"
            f" longer than {config.max_prompt_tokens} tokens, the shortest has"
            f"{'' if candidates else ' at least'} {min(fewest)}; raise it"
        )
    num_dropped = len(rows) - len(prompts)
    if num_dropped:
        message = "%s split: dropped %d of %d prompts longer than data.max_prompt_tokens=%d"
        logger.warning(message, split, num_dropped, len(rows), config.max_prompt_tokens)
    return Dataset(tuple(prompts), num_dropped)


def _fits(
    config: DataConfig, split: Split, index: int, num_tokens: int, at_least: str = ""
) -> bool:
    """Returns whether to keep a prompt of so many tokens; raises if long ones are errors."""
    if num_tokens <= config.max_prompt_tokens:
        return True
    if config.filter_long_prompts:
        return False
    raise DataError(
        f"{split} split, row {index}: the prompt has {at_least}{num_tokens} tokens, more than"
        f" data.max_prompt_tokens={config.max_prompt_tokens}; raise it or set"
        " data.filter_long_prompts=True"
    )


class Stream(Generic[T]):
    """Endless passes over rows, with a position to save and restore.

    The seed, in [0, 2**32), alone decides the order of each pass, not how many rows are taken at a
    time nor `num_workers`, the threads that read ahead. No rows are a DataError.
    """

    def __init__(self, rows: Sequence[T], seed: int, shuffle: bool = True, num_workers: int = 0):
        if not len(rows):
            raise DataError("a stream needs at least one row")
        self._identity = {"num_rows": len(rows), "seed": seed, "shuffle": shuffle}
        pipeline = grain.MapDataset.source(rows).seed(seed)
        if shuffle:
            pipeline = pipeline.shuffle()
        read_options = grain.ReadOptions(
            num_threads=num_workers, prefetch_buffer_size=2 * num_workers
        )
        self._rows = iter(pipeline.repeat().to_iter_dataset(read_options))

    def take(self, count: int) -> tuple[T, ...]:
        """Returns the next `count` rows and moves past them."""
        return tuple(next(self._rows) for _ in range(count))

    def get_state(self) -> dict[str, Any]:
        """Returns the position; JSON can hold it."""
        return {**self._identity, "position": self._rows.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned for the same rows, seed and order."""
        for name, mine in self._identity.items():
            if state.get(name) != mine:
                raise DataError(
                    f"the saved data position has {name}={state.get(name)!r}, this run has"
                    f" {mine!r}: the position would be another row; restore the data and the"
                    " config of the saved run, or begin in an empty folder"
                )
        self._rows.set_state(dict(state["position"]))


class PromptIterator(Stream[Prompt]):
    """The training prompts: an endless stream in batches of any size."""

    def __init__(self, dataset: Dataset, config: DataConfig, seed: int):
        super().__init__(dataset.prompts, seed, config.shuffle, config.num_workers)
        self._longest = dataset.longest

    def batch(self, num_prompts: int) -> PromptBatch:
        """Returns the next prompts; a batch may span two passes."""
        return PromptBatch(self.take(num_prompts), self._longest)
