"""Examples with answers: for the warm start of a policy and for training a reward model."""

import random

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.datasets import load_dataset
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tasks import Split, worked_sum
from jaxrl_llm.types import Prompt

Tokens = tuple[int, ...]


def worked_examples(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split, seed: int
) -> list[tuple[Tokens, Tokens]]:
    """Returns prompt and worked answer of every row, as tokens; answers end with the end token.

    With `config.arithmetic_errors` above 0 every row of the arithmetic task comes four times, each
    time wrong in one step with that probability.
    """
    if config.task == "files":
        raise DataError("config.data.task: 'files' has no worked answers; use another task")
    prompts = load_dataset(config, tokenizer, split, seed).prompts
    if config.task == "arithmetic" and config.arithmetic_errors:
        texts = [
            _by_erring_teacher(config, prompt, seed, i) for i in range(4) for prompt in prompts
        ]
        prompts = prompts * 4
    else:
        texts = [prompt.extra_info["answer"] for prompt in prompts]
    responses = _responses(tokenizer, texts)
    return [(prompt.tokens, answer) for prompt, answer in zip(prompts, responses, strict=True)]


def preference_pairs(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: Split, seed: int, name: str = ""
) -> list[tuple[Tokens, Tokens, Tokens]]:
    """Returns prompt, chosen and rejected answer, as tokens, two pairs of every arithmetic row.

    The chosen answer is the worked one. The rejected answer of a row's first pair is wrong by 1 to
    9 in one step, never below zero, and later steps continue from there; that of the second pair
    adds correctly, but misreads a digit. So both end in a wrong result. All first pairs come before
    all second ones. The model `name` that learns from the pairs, the seed and the row choose the
    mistakes.
    """
    if config.task != "arithmetic":
        message = f"{config.task!r} has no preference pairs; use 'arithmetic'"
        raise DataError(f"config.data.task: {message}")
    prompts = load_dataset(config, tokenizer, split, seed).prompts
    chosen = _responses(tokenizer, [prompt.extra_info["answer"] for prompt in prompts])
    salt = f"{name} {seed}".strip()
    mistakes = (_wrong_answer, _misread_answer)
    wrong = [mistake(prompt, salt) for mistake in mistakes for prompt in prompts]
    tokens = [prompt.tokens for prompt in prompts]
    return list(zip(tokens * 2, chosen * 2, _responses(tokenizer, wrong), strict=True))


def _by_erring_teacher(config: DataConfig, prompt: Prompt, seed: int, attempt: int) -> str:
    draw = random.Random(f"teacher {seed} {attempt} {prompt.extra_info['question']}")
    errs = draw.random() < config.arithmetic_errors
    return _wrong_answer(prompt, seed, attempt) if errs else prompt.extra_info["answer"]


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
    if not texts:
        return []
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [(*tokens, tokenizer.eos_token_id) for tokens in encoded]
