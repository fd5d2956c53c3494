"""Where numbers go: a JSONL file always, console, TensorBoard and Weights & Biases by config.

One process of a run writes; the others hold a `Writer` that does nothing. Which numbers
there are is not decided here.
"""

import contextlib
import importlib
import json
import math
import os
import pathlib
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import tensorboardX
from absl import logging

from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.errors import check_package, naming
from jaxrl_llm.metrics import console, dumps
from jaxrl_llm.types import Rewards, Rollouts

Sink = Callable[[int, Mapping[str, float]], None]


class Writer:
    """Writes `WORKDIR/metrics.jsonl`: `{"step": int, "data": {name: float}}`, a line a call.

    A number that is not finite is written as null: JSON has no NaN. Lines are flushed one
    by one. A resumed run first drops the lines of steps it will take again, and a last line
    cut by a crash, so that the file ends up as that of a run never interrupted.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        config: MetricsConfig,
        first_step: int = 0,
        total_steps: int = 0,
        position: Mapping[str, int] = {},
    ):
        """Opens the outputs.

        Args:
          workdir: Folder of the run, on a file system that can append.
          config: Which outputs, and how often.
          first_step: First step that this process writes; lines from it on are dropped.
          total_steps: Last step, for the progress bar.
          position: `get_state()` of when `first_step` began; empty, lines alone decide.
        """
        self._workdir = pathlib.Path(workdir)
        self._config = config
        self._sinks: list[Sink] = []
        self._closers: list[Callable[[], Any]] = []
        if jax.process_index() != 0:
            return
        self._open_jsonl(first_step, position.get("num_bytes", 0))
        if config.console:
            self._open_console(first_step, total_steps)
        if config.tensorboard:
            self._open_tensorboard(first_step)
        if config.wandb_project:
            self._open_wandb(config.wandb_project)

    def due(self, step: int) -> bool:
        """Returns whether numbers of `step` are wanted."""
        return step % self._config.every == 0

    def write(self, step: int, *groups: Mapping[str, Any]) -> None:
        """Writes one line of all `groups` together.

        Args:
          step: Step the numbers are about.
          groups: Numbers by name: floats or arrays of one element; a later group wins.
        """
        if not self._sinks:
            return
        data = {name: float(value) for group in groups for name, value in group.items()}
        for sink in self._sinks:
            with self._tolerated(f"numbers of step {step}"):
                sink(step, data)

    def write_rollouts(self, step: int, rollouts: Rollouts, rewards: Rewards) -> None:
        """Writes `WORKDIR/rollouts/STEP.jsonl`, on steps where the config asks for it."""
        every = self._config.rollouts_every
        if self._sinks and every and step % every == 0:
            with self._tolerated(f"rollouts of step {step}"):
                dumps.write_rollouts(self._workdir / "rollouts", step, rollouts, rewards)

    def get_state(self) -> dict[str, int]:
        """Returns the length of the metrics file, as JSON can hold it; for the checkpoint."""
        path = self._workdir / "metrics.jsonl"
        return {"num_bytes": path.stat().st_size} if self._sinks and path.exists() else {}

    @contextlib.contextmanager
    def _tolerated(self, what: str) -> Iterator[None]:
        """Lets a disk that refuses to be written end the run, or only warns of it."""
        try:
            yield
        except OSError as error:
            if self._config.on_failure == "stop":
                raise
            logging.warning("%s could not be written: %s; going on", what, error)

    def close(self) -> None:
        """Closes the outputs; nothing may be written after."""
        while self._closers:
            self._closers.pop()()
        self._sinks.clear()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _open_jsonl(self, first_step: int, num_bytes: int) -> None:
        path = self._workdir / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_lines_before(path, first_step)
        if path.exists() and path.stat().st_size < num_bytes:
            logging.warning(
                "%s: %d bytes up to step %d, the checkpoint was saved when it had %d; lines are"
                " missing",
                path,
                path.stat().st_size,
                first_step - 1,
                num_bytes,
            )
        file = path.open("ab", buffering=0)
        waiting: list[bytes] = []  # lines that the disk has not taken

        def sink(step: int, data: Mapping[str, float]) -> None:
            record = {"step": step, "data": dumps.jsonable(data)}
            waiting.append(json.dumps(record, allow_nan=False).encode() + b"\n")
            size = os.fstat(file.fileno()).st_size
            try:
                with naming(path):
                    dumps.write_all(file, b"".join(waiting))
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(file.fileno(), size)  # no half line stays
                raise
            waiting.clear()

        self._sinks.append(sink)
        self._closers.append(file.close)

    def _open_console(self, first_step: int, total_steps: int) -> None:
        lines = console.StepLines(first_step, total_steps)
        self._sinks.append(lines.show)
        self._closers.append(lines.close)

    def _open_tensorboard(self, first_step: int) -> None:
        writer = tensorboardX.SummaryWriter(
            str(self._workdir / "tensorboard"), purge_step=first_step
        )

        def sink(step: int, data: Mapping[str, float]) -> None:
            for name, value in data.items():
                if math.isfinite(value):
                    writer.add_scalar(name.replace("@", "_at_"), value, step)

        self._sinks.append(sink)
        self._closers.append(writer.close)

    def _open_wandb(self, project: str) -> None:
        wandb = importlib.import_module("wandb")
        name = self._workdir / "wandb_id"
        if not name.exists():
            dumps.replace_text(name, uuid.uuid4().hex)
        run = wandb.init(
            project=project, dir=str(self._workdir), id=name.read_text(), resume="allow"
        )
        self._sinks.append(lambda step, data: run.log(dict(data), step=step))
        self._closers.append(run.finish)


def check(config: MetricsConfig) -> None:
    """Raises ConfigError if an output needs a package that is not there; before any work."""
    if config.wandb_project:
        check_package("wandb", "wandb", f"config.metrics.wandb_project: {config.wandb_project!r}")


def keep_lines_before(path: pathlib.Path, first_step: int) -> None:
    """Rewrites a metrics file with only the lines of steps before `first_step`.

    A line that is no JSON record (cut by a crash) goes too, with a warning. The file is
    replaced at once, so a crash here loses nothing.
    """
    if not path.exists():
        return
    kept = []
    before = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(before.splitlines(), start=1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            logging.warning("%s:%d: not a metrics record, dropped: %.40r", path, number, line)
            continue
        if step < first_step:
            kept.append(line + "\n")
    if (after := "".join(kept)) != before:
        dumps.replace_text(path, after)
