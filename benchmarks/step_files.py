"""The files of the package that a GRPO step calls on the host.

`python benchmarks/step_files.py [--step=8]` trains `configs/grpo_tiny.py` up to a step that
compiles nothing. It prints the files of that step with the number of calls to each.
"""

import collections
import importlib.util
import pathlib
import sys
import tempfile
from types import FrameType
from typing import Any

from absl import app, flags

import jaxrl_llm
from jaxrl_llm.trainer.run import TrainingRun

PACKAGE = pathlib.Path(jaxrl_llm.__file__).parent
CONFIG = PACKAGE.parent / "configs" / "grpo_tiny.py"
STEP = flags.DEFINE_integer("step", 8, "Step to look at; the steps before it compile.")


def settings(num_steps: int):
    """Returns the config of `num_steps` steps without evaluations and checkpoints between them."""
    spec = importlib.util.spec_from_file_location("grpo_tiny", CONFIG)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.warm_start.num_steps = 2
    config.trainer.num_steps = num_steps
    config.evaluation.before = config.evaluation.after = False
    config.evaluation.every = config.checkpoint.every = 0
    return config


def calls_of_step(step: int) -> collections.Counter[str]:
    """Returns how often a step calls functions of each file, in the order of the first calls."""
    calls: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            calls[path.relative_to(PACKAGE).as_posix()] += 1

    begin = TrainingRun.begin_step

    def watched(run: TrainingRun, number: int, state: Any):
        is_job = run.workdir.name == "run"  # not a stage before RL
        sys.setprofile(count if is_job and number == step else None)
        return begin(run, number, state)

    TrainingRun.begin_step = watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            jaxrl_llm.train(settings(step + 1), f"{folder}/run")
    finally:
        sys.setprofile(None)
        TrainingRun.begin_step = begin  # type: ignore[method-assign]
    return calls


def main(_):
    calls = calls_of_step(STEP.value)
    for name, count in calls.items():
        print(f"{count:6d} {name}")
    print(f"{len(calls)} files")


if __name__ == "__main__":
    app.run(main)
