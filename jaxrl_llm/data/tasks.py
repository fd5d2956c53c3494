"""Tasks: where rows in verl's schema come from.

`arithmetic` needs no files: sums of digits from a seed, with worked answers. `gsm8k` reads the
files of that dataset as they are published. `files` reads rows that are already in the schema.
"""

import random
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row, checked_row, is_text, read_rows

Split = Literal["train", "eval"]

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
GSM8K_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def task_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns the rows of a split, in the order of the source.

    Args:
      seed: draws the prompts of the arithmetic task; files do not depend on it.

    Raises:
      DataError: a file or a row cannot be used.
    """
    return TASKS[config.task](config, split, seed)


def arithmetic_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns different sums of `arithmetic_terms` digits such as `3+4+2=`.

    The worked answer in `extra_info` goes step by step and gives the result behind a `#`:
    `3+4=7,7+2=9#9`. Both splits are cut from one draw without replacement, so that they share no
    prompt.

    Raises:
      DataError: there are not enough sums of that many digits for both splits.
    """
    for field, problem in config.problems():
        raise DataError(f"config.data.{field}: {problem}")
    num_eval = config.arithmetic_eval_prompts
    numbers = random.Random(f"arithmetic {seed}").sample(
        range(10**config.arithmetic_terms), num_eval + config.arithmetic_train_prompts
    )
    numbers = numbers[:num_eval] if split == "eval" else numbers[num_eval:]
    rows = []
    for index, number in enumerate(numbers):
        digits = [int(digit) for digit in f"{number:0{config.arithmetic_terms}d}"]
        question = "+".join(map(str, digits)) + "="
        rows.append(
            {
                "data_source": "arithmetic",
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(sum(digits))},
                "extra_info": {
                    "split": split,
                    "index": index,
                    "question": question,
                    "answer": worked_sum(digits),
                },
            }
        )
    return rows


def worked_sum(digits: list[int], wrong_step: int = -1, error: int = 0) -> str:
    """Returns the sum of the digits step by step, the result behind a `#`.

    Args:
      wrong_step: step, from 0, whose result is off; later steps go on from there. -1: none.
      error: by how much it is off.
    """
    total = digits[0]
    steps = []
    for step, digit in enumerate(digits[1:]):
        result = total + digit + (error if step == wrong_step else 0)
        steps.append(f"{total}+{digit}={result}")
        total = result
    return f"{','.join(steps)}#{total}"


def gsm8k_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns the rows of GSM8K's own files: JSON lines with `question` and `answer`.

    The prompt is the question with the instruction to end in `#### number`; the ground truth is
    that number of the answer without its commas.

    Raises:
      DataError: a file or a row cannot be used.
    """
    del seed
    rows = []
    for index, (where, source) in enumerate(read_rows(_files(config, split))):
        question = _text(source, "question", where)
        answer = _text(source, "answer", where)
        numbers = GSM8K_ANSWER.findall(answer)
        if not numbers:
            raise DataError(f"{where}: answer must end in '#### number', got ...{answer[-60:]!r}")
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": numbers[-1].replace(",", "")},
                "extra_info": {
                    "split": split,
                    "index": index,
                    "question": question,
                    "answer": answer,
                },
            }
        )
    return rows


def file_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns the rows of parquet and JSON lines files in verl's schema.

    Raises:
      DataError: a file or a row cannot be used.
    """
    del seed
    return [
        checked_row(row, where, config.prompt_column)
        for where, row in read_rows(_files(config, split))
    ]


def _files(config: DataConfig, split: Split) -> tuple[str, ...]:
    files = config.train_files if split == "train" else config.eval_files
    if not files:
        message = f"config.data.{split}_files: task={config.task!r} reads files, none given"
        off = "; name some, or set evaluation.before=False, evaluation.after=False and every=0"
        raise DataError(message + (off if split == "eval" else "; name some"))
    return files


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if not is_text(value) or not value.strip():
        raise DataError(f"{where}: {column} must be a text, got {value!r:.60}")
    return value


TASKS = {"arithmetic": arithmetic_rows, "gsm8k": gsm8k_rows, "files": file_rows}
