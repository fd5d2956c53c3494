"""Tasks: generated and file-based sources of rows in verl's schema."""

import random
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_llm.config import DataConfig
from jaxrl_llm.config.datasets.presets import PRESETS
from jaxrl_llm.config.rollout_data import NUM_PRODUCTS
from jaxrl_llm.data import counting_task, reasoning_gym_task
from jaxrl_llm.data.chat.formats import template_options
from jaxrl_llm.data.chat.messages import role_aliases
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import Row, checked_row, read_rows
from jaxrl_llm.data.images import IMAGE_PLACEHOLDER
from jaxrl_llm.data.rows.row_mapping import prompt_columns
from jaxrl_llm.text import is_text

Split = Literal["train", "eval"]

_GSM8K = PRESETS["gsm8k"]  # what the preset does to rows, which this task also numbers
GSM8K_INSTRUCTION = _GSM8K.prompt_template.removeprefix("{question} ")
GSM8K_ANSWER = re.compile(_GSM8K.answer_pattern)


def task_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """The rows of a split in the order of their source; `seed` draws generated prompts."""
    return TASKS[config.task](config, split, seed)


def _arithmetic_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns different sums of `arithmetic_terms` digits such as `3+4+2=`.

    The worked answer in `extra_info` is `3+4=7,7+2=9#9`. Both splits come from one draw without
    replacement, so they share no prompt.
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
        answer = worked_sum(digits)
        extra_info = {"split": split, "index": index, "question": question, "answer": answer}
        rows.append(_row("arithmetic", question, str(sum(digits)), extra_info))
    return rows


def _row(data_source: str, prompt: str, ground_truth: str, extra_info: dict[str, Any]) -> Row:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def worked_sum(digits: list[int], wrong_step: int = -1, error: int = 0) -> str:
    """Returns the sum of the digits step by step, the result after a `#`.

    The result of `wrong_step` (from 0; -1: none) is wrong by `error`; later steps continue from it.
    """
    total = digits[0]
    steps = []
    for step, digit in enumerate(digits[1:]):
        result = total + digit + (error if step == wrong_step else 0)
        steps.append(f"{total}+{digit}={result}")
        total = result
    return f"{','.join(steps)}#{total}"


def wrong_answer(row: Mapping[str, Any], seed: int | str, attempt: int = 0) -> str:
    """Returns the worked answer to a sum, by its `extra_info`, with an error in one step."""
    draw = random.Random(f"wrong answer {seed} {attempt} {row['question']}")
    digits = _digits(row)
    step = draw.randrange(len(digits) - 1)
    right = sum(digits[: step + 2])
    errors = [error for error in range(-9, 10) if error and right + error >= 0]
    return worked_sum(digits, wrong_step=step, error=draw.choice(errors))


def misread_answer(row: Mapping[str, Any], seed: int | str) -> str:
    """Returns the worked answer to a sum in which one digit is another."""
    draw = random.Random(f"misread answer {seed} {row['question']}")
    digits = _digits(row)
    index = draw.randrange(len(digits))
    digits[index] = draw.choice([digit for digit in range(10) if digit != digits[index]])
    return worked_sum(digits)


def _digits(row: Mapping[str, Any]) -> list[int]:
    return [int(digit) for digit in row["question"].rstrip("=").split("+")]


def _products_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns different products of two numbers of two digits such as `37*24=`.

    `extra_info` has the `expression`. The splits share no prompt.
    """
    num_eval = config.arithmetic_eval_prompts
    numbers = random.Random(f"products {seed}").sample(
        range(NUM_PRODUCTS), num_eval + config.arithmetic_train_prompts
    )
    numbers = numbers[:num_eval] if split == "eval" else numbers[num_eval:]
    rows = []
    for index, number in enumerate(numbers):
        a, b = 10 + number // 90, 10 + number % 90
        expression = f"{a}*{b}"
        extra_info = {"split": split, "index": index, "question": f"{expression}="}
        extra_info |= {"expression": expression, "answer": f"#{a * b}"}
        rows.append(_row("products", f"{expression}=", str(a * b), extra_info))
    return rows


# Schema of the built-in calculator tool for worked products; the tool itself lives in `agents/`.
CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes the value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, + - * / // % **, brackets, pi, e, sqrt, exp, log, sin,"
                    " cos, tan, floor, ceil, abs, round, min and max, for example"
                    ' "(3 + 4) * 12".',
                }
            },
            "required": ["expression"],
        },
        "return": {"type": "string", "description": "The value."},
    },
}
_GUESSES = 0.25  # share of guesses among the wrong answers


def worked_product(row: Mapping[str, Any], wrong: random.Random | None = None) -> list[Row]:
    """Returns the answer to a product's prompt: a call of the calculator, its reply, the result.

    With `wrong` the result is wrong: of a call with a term too many, or sometimes a guess.
    """
    expression, result = row["expression"], int(row["answer"].removeprefix("#"))
    if wrong is not None and wrong.random() < _GUESSES:
        guess = abs(result + wrong.choice([e for e in range(-999, 1000) if e]))
        return [{"role": "assistant", "content": f"#{guess}"}]
    if wrong is not None:  # as long as the right one: what is copied in both is learned by both
        more = wrong.choice([e for e in range(-9, 10) if e])
        expression, result = f"{expression}{more:+d}", result + more
    function = {"name": "calculator", "arguments": {"expression": expression}}
    call = {"type": "function", "id": "000000000", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "tool_call_id": call["id"], "content": str(result)},
        {"role": "assistant", "content": f"#{result}"},
    ]


_NAMES = ("Ana", "Ben", "Eva", "Leo", "Max", "Mia", "Tom", "Zoe")
_THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
_EVENTS = {"+": ("buys", "finds", "gets"), "-": ("gives away", "loses", "sells")}


def _story(name: str, things: str, sign: str, event: str, a: int, b: int) -> tuple[str, str, str]:
    """Returns a word problem, its worked answer and its result."""
    more = " more" if sign == "+" else ""
    question = f"{name} has {a} {things} and {event} {b}{more}. How many {things} has {name} now?"
    result = str(a + b if sign == "+" else a - b)
    return question, f"{a} {sign} {b} = {result} #{result}", result


_EXAMPLES = (
    _story("Kim", "nuts", "+", "finds", 6, 9),
    _story("Kim", "nuts", "-", "loses", 14, 5),
)


def _stories_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns different word problems of one sum or difference of numbers up to 20.

    Each comes after two that are answered, in the same dialogue. The worked answer is
    `6 + 9 = 15 #15`. The splits share no problem.
    """
    num_eval = config.arithmetic_eval_prompts
    draw = random.Random(f"stories {seed}")
    stories: dict[str, tuple[str, str]] = {}
    while len(stories) < num_eval + config.arithmetic_train_prompts:
        sign = draw.choice("+-")
        a, b = draw.randint(2, 20), draw.randint(2, 20)
        if sign == "-":
            a, b = max(a, b), min(a, b)
        parts = draw.choice(_NAMES), draw.choice(_THINGS), sign, draw.choice(_EVENTS[sign])
        question, answer, result = _story(*parts, a, b)
        stories[question] = answer, result
    problems = list(stories.items())
    problems = problems[:num_eval] if split == "eval" else problems[num_eval:]
    shots = []
    for question, answer, _ in _EXAMPLES:
        shots += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rows = []
    for index, (question, (answer, result)) in enumerate(problems):
        extra_info = {"split": split, "index": index, "question": question, "answer": answer}
        row = _row("stories", question, result, extra_info)
        rows.append({**row, "prompt": [*shots, *row["prompt"]]})
    return rows


def _shapes_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns drawn images with the question how many shapes they show, from 1 to 9."""
    count = config.arithmetic_eval_prompts if split == "eval" else config.arithmetic_train_prompts
    rows = []
    for index in range(count):
        image, number = counting_task.draw_image(f"shapes {seed} {split} {index}")
        question = f"{IMAGE_PLACEHOLDER}How many?"
        extra_info = {"split": split, "index": index, "question": question}
        extra_info |= {"answer": f"#{number}"}
        row = _row("shapes", question, str(number), extra_info)
        rows.append({**row, "images": [image]})
    return rows


def _gsm8k_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns the rows of GSM8K's own files: JSON lines with `question` and `answer`.

    The prompt asks for an answer that ends in `#### number`; the ground truth is that number of the
    given answer, without commas.
    """
    rows = []
    for index, (where, source) in enumerate(read_rows(split_files(config, split))):
        question = _text(source, "question", where)
        answer = _text(source, "answer", where)
        numbers = GSM8K_ANSWER.findall(answer)
        if not numbers:
            raise DataError(f"{where}: answer must end in '#### number', got ...{answer[-60:]!r}")
        extra_info = {"split": split, "index": index, "question": question, "answer": answer}
        prompt = f"{question} {GSM8K_INSTRUCTION}"
        row = _row(_GSM8K.data_source, prompt, numbers[-1].replace(",", ""), extra_info)
        rows.append({**row, "where": where})
    return rows


def _file_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    return [
        {**prompt_row(config, row, where), "entry": entry}
        for entry, path in enumerate(split_files(config, split))
        for where, row in read_rows([path])
    ]


def prompt_row(config: DataConfig, row: Row, where: str) -> Row:
    """Returns a row of a file in verl's schema, checked, with its template's options and origin."""
    row = prompt_columns(config, row, where)
    options = template_options(row, where)
    roles = role_aliases(config.role_aliases)
    checked = checked_row(row, where, config.prompt_column, roles)
    return {**checked, "options": options, "where": where}


def split_files(config: DataConfig, split: Split) -> tuple[str, ...]:
    """Returns the files of a split; that there are none is a DataError."""
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


def _seed_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    """Returns rows that are a number each: for harnesses and environments that begin by themselves.

    `extra_info` has `seed`, different in all rows of both splits, and `split`.
    """
    num_eval = config.arithmetic_eval_prompts
    numbers = random.Random(f"seeds {seed}").sample(
        range(2**31), num_eval + config.arithmetic_train_prompts
    )
    numbers = numbers[:num_eval] if split == "eval" else numbers[num_eval:]
    infos = ({"split": split, "index": i, "seed": n} for i, n in enumerate(numbers))
    return [_row("seeds", "Begin.", "", info) for info in infos]


def _reasoning_gym_rows(config: DataConfig, split: Split, seed: int) -> list[Row]:
    counts = config.arithmetic_train_prompts, config.arithmetic_eval_prompts
    return reasoning_gym_task.rows(config.reasoning_gym, split, seed, *counts)


TASKS = {
    "arithmetic": _arithmetic_rows,
    "stories": _stories_rows,
    "products": _products_rows,
    "shapes": _shapes_rows,
    "gsm8k": _gsm8k_rows,
    "files": _file_rows,
    "reasoning_gym": _reasoning_gym_rows,
    "seeds": _seed_rows,
}
