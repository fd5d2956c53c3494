"""The task "reasoning_gym": problems of the generators of the package of that name.

The problems are made in a process of its own, whose hashes of texts are not random: some generators
draw from sets, and all hosts of a run, and a resumed run, must get the same rows.
"""

import functools
import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_llm.config.rollout_data import ReasoningGymConfig
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.typed_json import to_typed_json
from jaxrl_llm.errors import UserError, check_package, name_hint

logger = logging.getLogger(__name__)

DATA_SOURCE = "reasoning_gym"
_PARTS_REMEDY = "name its parts as generators of their own"
_MAX_REPEATS = 20  # times as many problems are made to find enough that an evaluation has not


def rows(
    config: ReasoningGymConfig, split: str, seed: int, num_train: int, num_eval: int
) -> list[dict[str, Any]]:
    """Rows of a split's problems, the generators and their levels in turn; none is in both splits.

    `data_source` is `reasoning_gym/GENERATOR`. `extra_info` has `generator`, `level` (-1 without
    levels), `settings` and `entry`, the problem as the package made it.

    Raises:
      ConfigError: If the package is missing.
      DataError: If a generator is unknown, has no levels, or refuses its settings.
    """
    check_package("reasoning_gym", extra="reasoning_gym", where="data.task='reasoning_gym'")
    request = {**vars(config), "split": split, "seed": seed}
    request |= {"num_train": num_train, "num_eval": num_eval}
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(request),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in process.stdout.splitlines()]
    if process.returncode or not lines or "problem" in lines[-1]:
        problem = lines[-1].get("problem", "") if lines else ""
        raise DataError(f"config.data.reasoning_gym: {problem or process.stderr.strip()[-2000:]}")
    if left_out := lines[0]["left_out"]:
        message = "config.data.reasoning_gym.generators: 'all' leaves out %s: the package refuses"
        logger.warning(message + " its own curriculum there", ", ".join(left_out))
    return lines[1:]


def generator_names() -> list[str]:
    """The names of all generators of the installed package."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


@functools.lru_cache(maxsize=512)
def make_dataset(name: str, level: int, settings: str, seed: int = 0, size: int = 1) -> Any:
    """A generator at a level of its curriculum (-1: its default difficulty).

    Args:
      settings: JSON; those that belong to a level are set by it.

    Raises:
      DataError: If it is unknown, has no curriculum, or refuses the settings.
    """
    from reasoning_gym import factory

    if name not in factory.DATASETS:
        hint = name_hint(name, factory.DATASETS, "jaxrl_llm envs --names=reasoning_gym")
        raise DataError(f"no generator is called {name!r}; {hint}")
    if name == "composite":
        raise DataError(f"'composite' is made of other generators; {_PARTS_REMEDY}")
    arguments = {**json.loads(settings or "{}"), "seed": seed, "size": size}
    try:
        if level < 0:
            return factory.create_dataset(name, **arguments)
        if not factory.has_curriculum(name):
            raise DataError(f"{name!r} has no curriculum; set data.reasoning_gym.levels=0")
        curriculum = factory.create_curriculum(name)
        curriculum.set_global_level(level)
        generator_config = curriculum.generate_configuration(arguments)
        if validate := getattr(generator_config, "validate", None):
            validate()
        return factory.DATASETS[name][0](config=generator_config)
    except (AssertionError, TypeError, ValueError) as error:
        where = f"{name!r} at level {level}" if level >= 0 else repr(name)
        message = f"{where} refuses its settings {settings or '{}'}: {error}"
        raise DataError(f"{message}; correct them, or lower data.reasoning_gym.levels") from error


def _generated_rows(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A header with the kinds that "all" leaves out, then the rows of a request of `rows`."""
    from reasoning_gym import factory
    from reasoning_gym.utils import SYSTEM_PROMPTS

    levels = range(request["levels"]) if request["levels"] else (-1,)
    generators: Sequence[str] = request["generators"]
    is_all, left_out = tuple(generators) == ("all",), []
    if is_all:
        known = [name for name in generator_names() if name != "composite"]
        generators = [name for name in known if levels == (-1,) or factory.has_curriculum(name)]
    kinds = []
    for level, text in itertools.product(levels, generators):
        name, _, settings = text.partition(" ")
        try:
            make_dataset(name, level, settings, request["seed"], size=1)  # all are checked first
        except DataError:
            if not is_all:
                raise
            left_out.append(f"{name} at level {level}")
        else:
            kinds.append((name, level, settings))
    yield {"left_out": left_out}
    system = SYSTEM_PROMPTS.get(request["system_prompt"], "")
    messages = [{"role": "system", "content": system}] * bool(system)
    is_training, seed = request["split"] == "train", request["seed"]
    counts, made = (request["num_train"], request["num_eval"]), []
    for kind, (name, level, settings) in enumerate(kinds):
        num_train, num_eval = (len(range(kind, count, len(kinds))) for count in counts)
        problems = _problems(
            name,
            level,
            settings,
            seed,
            num_train=num_train,
            num_eval=num_eval,
            is_training=is_training,
        )
        made.append(problems)
    worked = "<answer>{}</answer>" if system else "{}"  # as the prompt asks for it, for SFT
    for index in range(counts[not is_training]):
        name, level, settings = kinds[index % len(kinds)]
        entry = next(made[index % len(kinds)])
        yield {
            "data_source": f"{DATA_SOURCE}/{name}",
            "prompt": [*messages, {"role": "user", "content": entry["question"]}],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": str(entry["answer"] or "")},
            "extra_info": {
                "split": request["split"],
                "index": index,
                "question": entry["question"],
                "answer": worked.format(entry["answer"] or ""),
                "generator": name,
                "level": level,
                "settings": settings,
                "has_answer_tag": bool(system),
                "entry": to_typed_json(entry),
            },
        }


def _problems(
    name: str,
    level: int,
    settings: str,
    seed: int,
    *,
    num_train: int,
    num_eval: int,
    is_training: bool,
) -> Iterator[dict[str, Any]]:
    """Problems of one generator: those of an evaluation, or of a training, none of the former.

    Both are drawn with seeds of their own, so that the number of one changes nothing in the other
    but what it must leave out.
    """
    held_out = make_dataset(name, level, settings, 2 * seed + 1, max(1, num_eval))
    problems = [held_out[i] for i in range(num_eval)]
    if not is_training:
        yield from problems
        return
    questions = {problem["question"] for problem in problems}
    size = num_train + _MAX_REPEATS * (num_train + num_eval)
    dataset, num_made = make_dataset(name, level, settings, 2 * seed, max(1, size)), 0
    for i in range(size):
        if (problem := dataset[i])["question"] not in questions:
            yield problem
            num_made += 1
        if num_made == num_train:
            return
    raise DataError(
        f"{name!r} makes hardly any problem that is not among the {num_eval} of the evaluation;"
        " lower data.arithmetic_eval_prompts, or choose settings with more problems"
    )


def main() -> None:
    """Reads a request as JSON from stdin and prints its rows as JSON lines, or the problem."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # generators may print
    try:
        for row in _generated_rows(json.load(sys.stdin)):
            print(json.dumps(row), file=output)
    except UserError as error:
        print(json.dumps({"problem": str(error)}), file=output)
    except Exception as error:  # of a generator
        text = f"a generator failed: {type(error).__name__}: {error}; leave it out"
        print(json.dumps({"problem": text}), file=output)
    output.flush()


if __name__ == "__main__":
    main()
