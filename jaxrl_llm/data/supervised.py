"""Examples with answers: for the warm start of a policy and for training a reward model."""

import random

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import fitting
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row
from jaxrl_llm.data.tasks import Split, task_rows, worked_sum

Tokens = tuple[int, ...]


def worked_examples(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split, seed: int
) -> list[tuple[Tokens, Tokens]]:
    """Returns prompt and worked answer of every row, as tokens; the answer ends the sequence.

    The arithmetic task can have a teacher that errs: with `config.arithmetic_errors` above 0
    every row comes four times, each time wrong in one step with that probability.

    Raises:
      DataError: the task has no worked answers, or its data cannot be used.
    """
    if config.task == "files":
        raise DataError("config.data.task: 'files' has no worked answers; use another task")
    rows, prompts = _rows_and_prompts(config, tokenizer, split, seed)
    if config.task == "arithmetic" and config.arithmetic_errors:
        texts = [_by_erring_teacher(config, row, seed, i) for i in range(4) for row in rows]
        prompts = prompts * 4
    else:
        texts = [row["extra_info"]["answer"] for row in rows]
    return list(zip(prompts, _responses(tokenizer, texts), strict=True))


def preference_pairs(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split, seed: int, name: str = ""
) -> list[tuple[Tokens, Tokens, Tokens]]:
    """Returns prompt, chosen and rejected answer, as tokens, two pairs of every arithmetic row.

    The chosen answer is the worked one. The rejected one of the first pair of a row is wrong by
    1 to 9 in a step drawn from the seed and the row, never below zero, and the steps after it go
    on from there; that of the second pair adds rightly, but misreads a digit of the question. So
    both end in a wrong answer. All first pairs come before all second ones.

    `name` is that of the model that learns from the pairs; each name has mistakes of its own.

    Raises:
      DataError: another task, or its data cannot be used.
    """
    if config.task != "arithmetic":
        message = f"{config.task!r} has no preference pairs; use 'arithmetic'"
        raise DataError(f"config.data.task: {message}")
    rows, prompts = _rows_and_prompts(config, tokenizer, split, seed)
    chosen = _responses(tokenizer, [row["extra_info"]["answer"] for row in rows])
    salt = f"{name} {seed}".strip()
    wrong = [mistake(row, salt) for mistake in (_wrong_answer, _misread_answer) for row in rows]
    rejected = _responses(tokenizer, wrong)
    return list(zip(prompts * 2, chosen * 2, rejected, strict=True))


def _by_erring_teacher(config: DataConfig, row: Row, seed: int, attempt: int) -> str:
    draw = random.Random(f"teacher {seed} {attempt} {row['extra_info']['question']}")
    errs = draw.random() < config.arithmetic_errors
    return _wrong_answer(row, seed, attempt) if errs else row["extra_info"]["answer"]


def _wrong_answer(row: Row, seed: int | str, attempt: int = 0) -> str:
    draw = random.Random(f"wrong answer {seed} {attempt} {row['extra_info']['question']}")
    digits = _digits(row)
    step = draw.randrange(len(digits) - 1)
    right = sum(digits[: step + 2])
    errors = [error for error in range(-9, 10) if error and right + error >= 0]
    return worked_sum(digits, wrong_step=step, error=draw.choice(errors))


def _misread_answer(row: Row, seed: int | str) -> str:
    draw = random.Random(f"misread answer {seed} {row['extra_info']['question']}")
    digits = _digits(row)
    place = draw.randrange(len(digits))
    digits[place] = draw.choice([digit for digit in range(10) if digit != digits[place]])
    return worked_sum(digits)


def _digits(row: Row) -> list[int]:
    return [int(digit) for digit in row["extra_info"]["question"].rstrip("=").split("+")]


def _rows_and_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split, seed: int
) -> tuple[list[Row], list[Tokens]]:
    rows = task_rows(config, split, seed)
    kept = fitting(config, tokenizer, split, rows)
    return [row for _, row, _, _ in kept], [tokens for _, _, tokens, _ in kept]


def _responses(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[Tokens]:
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [(*tokens, tokenizer.eos_token_id) for tokens in encoded]
