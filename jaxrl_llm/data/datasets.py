"""Prompts in tokens, the endless seeded stream of them, and examples with answers."""

import dataclasses
import functools
import itertools
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import grain
from transformers import PreTrainedTokenizerBase

from jaxrl_llm import console
from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row, read_rows
from jaxrl_llm.data.formats import example_of, pair_of
from jaxrl_llm.data.lengths import cut, shortened, shortened_pair
from jaxrl_llm.data.masks import example
from jaxrl_llm.data.streaming import Cursor, StreamedRows
from jaxrl_llm.data.tasks import Split, files_of, task_rows, worked_sum
from jaxrl_llm.data.tokenizer import EMPTY, prompt_text, prompt_tokens, token_bound
from jaxrl_llm.types import Example, Pair, Prompt, PromptBatch

T = TypeVar("T")
Rows = Sequence[T] | StreamedRows[Any]
Tokens = tuple[int, ...]

_CALL_CHARACTERS = 1 << 18  # tokenized in one call, between two reports of progress

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The prompts of one split, in the order of their source.

    `prompt.index` is the row of the source: it has gaps where long prompts were dropped.
    """

    prompts: tuple[Prompt, ...]

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
    """Returns the prompts of a split, tokenized, of at most `max_prompt_tokens`.

    `seed` draws the prompts of the arithmetic task; use the same one for both splits. Where long
    prompts are not cut, a text that is too long by its number of characters is not tokenized. A
    prompt that is empty, or too long while `long_rows` is "error", is a DataError, and so is that
    no prompt is left.
    """
    if config.stream:
        raise DataError(
            "config.data.stream: prompts of RL are all read at the start; set it to False"
        )
    rows = task_rows(config, split, seed)

    def fits(index: int, num_tokens: int, at_least: str = "") -> bool:
        if num_tokens <= config.max_prompt_tokens or config.long_rows != "error":
            return num_tokens <= config.max_prompt_tokens or config.long_rows != "drop"
        raise DataError(
            f"{split} split, row {index}: the prompt has {at_least}{num_tokens} tokens, more than"
            f" data.max_prompt_tokens={config.max_prompt_tokens}; raise it or choose"
            " data.long_rows 'drop', 'left', 'right' or 'middle'"
        )

    texts = [
        prompt_text(tokenizer, row["prompt"], config.chat_template, row.get("options", EMPTY))
        for row in rows
    ]
    bound = token_bound(tokenizer)
    fewest = [bound(text) for text in texts]  # tokens of each, at least
    candidates = [i for i, num in enumerate(fewest) if fits(i, num, "at least ")]
    ends = list(itertools.accumulate(len(texts[index]) for index in candidates))
    calls = itertools.groupby(
        zip(candidates, ends, strict=True), key=lambda pair: pair[1] // _CALL_CHARACTERS
    )
    prompts = []
    with console.work(f"tokenizing the {split} split", max(ends, default=0)) as advance:
        for _, pairs in calls:
            indices = [index for index, _ in pairs]
            found = prompt_tokens(tokenizer, [texts[i] for i in indices], config.chat_template)
            for index, tokens in zip(indices, found, strict=True):
                row, text, fewest[index] = rows[index], texts[index], len(tokens)
                if not tokens:
                    raise DataError(f"{split} split, row {index}: the prompt has no tokens")
                if fits(index, len(tokens)):
                    if len(tokens) > config.max_prompt_tokens:
                        tokens = cut(tokens, config.max_prompt_tokens, config.long_rows)
                        text = str(tokenizer.decode(list(tokens)))
                    truth, info = row["reward_model"]["ground_truth"], row["extra_info"]
                    prompts.append(Prompt(tokens, text, row["data_source"], truth, info, index))
                advance(len(text))
    if not prompts:
        raise DataError(
            f"config.data.max_prompt_tokens: all {len(rows)} prompts of the {split} split are"
            f" longer than {config.max_prompt_tokens} tokens, the shortest has"
            f"{'' if candidates else ' at least'} {min(fewest)}; raise it"
        )
    if num_dropped := len(rows) - len(prompts):
        message = "%s split: dropped %d of %d prompts longer than data.max_prompt_tokens=%d"
        logger.warning(message, split, num_dropped, len(rows), config.max_prompt_tokens)
    if split == "train" and config.train_weights:
        files = [rows[prompt.index].get("file", 0) for prompt in prompts]
        prompts = mixed(prompts, files, config.train_weights)
    return Dataset(tuple(prompts))


def mixed(rows: Sequence[T], files: Sequence[int], weights: Sequence[float]) -> list[T]:
    """Returns rows, some of them repeatedly, of which each file has the share of its weight.

    Every row comes once or more often. `files` are the numbers of the rows' files, ascending.
    """
    parts = [list(part) for _, part in itertools.groupby(range(len(rows)), lambda i: files[i])]
    shares = [weights[files[part[0]]] for part in parts]
    total = max(len(part) / share for part, share in zip(parts, shares, strict=True))
    counts = [max(len(p), round(total * share)) for p, share in zip(parts, shares, strict=True)]
    return [
        rows[part[i % len(part)]]
        for part, count in zip(parts, counts, strict=True)
        for i in range(count)
    ]


class Stream(Generic[T]):
    """Endless passes over rows, with a position to save and restore.

    The seed, in [0, 2**32), alone decides the order of each pass, not how many rows are taken at a
    time nor `num_workers`, the threads that read ahead. No rows are a DataError.
    """

    def __init__(self, rows: Rows[T], seed: int, shuffle: bool = True, num_workers: int = 0):
        if not len(rows):
            raise DataError("a stream needs at least one row")
        self._identity = {"num_rows": len(rows), "seed": seed, "shuffle": shuffle}
        self._cursor = Cursor(rows, seed, shuffle) if isinstance(rows, StreamedRows) else None
        if self._cursor:
            return
        pipeline = grain.MapDataset.source(rows).seed(seed)
        if shuffle:
            pipeline = pipeline.shuffle()
        options = grain.ReadOptions(num_threads=num_workers, prefetch_buffer_size=2 * num_workers)
        self._rows = iter(pipeline.repeat().to_iter_dataset(options))

    def take(self, count: int) -> tuple[T, ...]:
        """Returns the next `count` rows and moves past them."""
        if self._cursor:
            return self._cursor.take(count)
        return tuple(next(self._rows) for _ in range(count))

    def get_state(self) -> dict[str, Any]:
        """Returns the position; JSON can hold it."""
        position = self._cursor.position if self._cursor else self._rows.get_state()
        return {**self._identity, "position": position}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Moves to a position that `get_state` returned for the same rows, seed and order."""
        for name, mine in self._identity.items():
            if state.get(name) != mine:
                raise DataError(
                    f"the saved data position has {name}={state.get(name)!r}, this run has"
                    f" {mine!r}: the position would be another row; restore the data and the"
                    " config of the saved run, or begin in an empty folder"
                )
        if self._cursor:
            self._cursor.position = state["position"]
        else:
            self._rows.set_state(dict(state["position"]))


class PromptIterator(Stream[Prompt]):
    """The training prompts: an endless stream in batches of any size."""

    def __init__(self, dataset: Dataset, config: DataConfig, seed: int):
        super().__init__(dataset.prompts, seed, config.shuffle, config.num_workers)
        self._longest = dataset.longest

    def batch(self, num_prompts: int) -> PromptBatch:
        """Returns the next prompts; a batch may span two passes."""
        return PromptBatch(self.take(num_prompts), self._longest)


def worked_examples(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    max_tokens: int = 0,
) -> Rows[Example]:
    """Returns every row with its answer, which ends with the end token and bears the loss.

    With `config.arithmetic_errors` above 0 every row of the arithmetic task comes four times, each
    time wrong in one step with that probability. Rows of files with more than `max_tokens` (0: any
    number) are treated as `config.long_rows` says.
    """
    if config.task == "files":
        made = functools.partial(_example, config, tokenizer, max_tokens)
        return _of_files(config, split, made, max_tokens)
    prompts = load_dataset(config, tokenizer, split, seed).prompts
    texts = [prompt.extra_info["answer"] for prompt in prompts]
    if config.task == "arithmetic" and config.arithmetic_errors:
        prompts, texts = prompts * 4, texts * 4
        for i, prompt in enumerate(prompts):
            attempt = i * 4 // len(prompts)
            draw = random.Random(f"teacher {seed} {attempt} {prompt.extra_info['question']}")
            if draw.random() < config.arithmetic_errors:
                texts[i] = _wrong_answer(prompt, seed, attempt)
    return _examples(prompts, _responses(tokenizer, texts))


def preference_pairs(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
    name: str = "",
    max_tokens: int = 0,
) -> Rows[Pair]:
    """Returns the pairs of files, or two of every arithmetic row: its prompt with two answers.

    Of files, pairs with more than `max_tokens` together (0: any number) are treated as
    `config.long_rows` says.

    Of the arithmetic task, the chosen answer is the worked one. The rejected answer of a row's
    first pair is wrong by 1 to 9 in one step, never below zero, and later steps continue from
    there; that of the second pair adds correctly, but misreads a digit. So both end in a wrong
    result. All first pairs come before all second ones. The model `name` that learns from the
    pairs, the seed and the row choose the mistakes.
    """
    if config.task == "files":
        made = functools.partial(_pair, config, tokenizer, max_tokens)
        return _of_files(config, split, made, max_tokens)
    if config.task != "arithmetic":
        message = f"{config.task!r} has no preference pairs; use 'arithmetic' or 'files'"
        raise DataError(f"config.data.task: {message}")
    prompts = load_dataset(config, tokenizer, split, seed).prompts
    chosen = _responses(tokenizer, [prompt.extra_info["answer"] for prompt in prompts])
    salt = f"{name} {seed}".strip()
    wrong = [_wrong_answer(prompt, salt) for prompt in prompts]
    wrong += [_misread_answer(prompt, salt) for prompt in prompts]
    answers = zip(chosen * 2, _responses(tokenizer, wrong), strict=True)
    return [
        Pair(*_examples([prompt] * 2, both))
        for prompt, both in zip(prompts * 2, answers, strict=True)
    ]


def _of_files(
    config: DataConfig, split: Split, made: Callable[[Row, str], T | None], max_tokens: int
) -> Rows[T]:
    """Returns what becomes of every row of a split's files; that nothing is left is a DataError."""
    files = files_of(config, split)
    if split == "train" and config.stream:
        return StreamedRows(files, made, max_tokens)
    found = [
        (number, made(row, where))
        for number, file in enumerate(files)
        for where, row in read_rows([file])
    ]
    kept = [each for _, each in found if each is not None]
    if not kept:
        raise DataError(
            f"config.data.{split}_files: all {len(found)} rows have more tokens than"
            " trainer.max_sequence_tokens, or no answer after data.long_rows has cut them; raise it"
        )
    if num_dropped := len(found) - len(kept):
        message = "%s split: dropped %d of %d rows longer than trainer.max_sequence_tokens"
        logger.warning(message, split, num_dropped, len(found))
    if split == "train" and config.train_weights:
        return mixed(kept, [n for n, each in found if each is not None], config.train_weights)
    return kept


def _example(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, most: int, row: Row, where: str
) -> Example | None:
    found = example(tokenizer, example_of(row, where, config.prompt_column), config.chat_template)
    return shortened(found, most, config.long_rows, where)


def _pair(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, most: int, row: Row, where: str
) -> Pair | None:
    both = pair_of(row, where, config.prompt_column)
    found = Pair(*(example(tokenizer, one, config.chat_template) for one in both))
    return shortened_pair(found, most, config.long_rows, where)


def _examples(prompts: Sequence[Prompt], responses: Sequence[Tokens]) -> list[Example]:
    return [
        Example(prompt.tokens + answer, (False,) * len(prompt.tokens) + (True,) * len(answer))
        for prompt, answer in zip(prompts, responses, strict=True)
    ]


def _wrong_answer(prompt: Prompt, seed: int | str, attempt: int = 0) -> str:
    draw = random.Random(f"wrong answer {seed} {attempt} {prompt.extra_info['question']}")
    digits = _digits(prompt)
    step = draw.randrange(len(digits) - 1)
    right = sum(digits[: step + 2])
    errors = [error for error in range(-9, 10) if error and right + error >= 0]
    return worked_sum(digits, wrong_step=step, error=draw.choice(errors))


def _misread_answer(prompt: Prompt, seed: int | str) -> str:
    draw = random.Random(f"misread answer {seed} {prompt.extra_info['question']}")
    digits = _digits(prompt)
    index = draw.randrange(len(digits))
    digits[index] = draw.choice([digit for digit in range(10) if digit != digits[index]])
    return worked_sum(digits)


def _digits(prompt: Prompt) -> list[int]:
    return [int(digit) for digit in prompt.extra_info["question"].rstrip("=").split("+")]


def _responses(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tokens]:
    tokens = prompt_tokens(tokenizer, texts, chat_template=True)  # without special tokens
    return [(*answer, tokenizer.eos_token_id) for answer in tokens]
