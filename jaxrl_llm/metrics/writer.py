"""Outputs for the numbers and samples of a run. Only process 0 writes."""

import contextlib
import io
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tensorboardX
from absl import logging

from jaxrl_llm import console
from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.config.folder import naming, replace_text
from jaxrl_llm.metrics import dumps, trackers
from jaxrl_llm.text import json_value
from jaxrl_llm.types import Rewards, Rollouts


class Writer(contextlib.ExitStack):
    """Writes `WORKDIR/metrics.jsonl`: `{"step": int, "data": {name: float}}`, a line a call.

    A number that is not finite becomes null. Each line is on disk when `write` returns. Lines of
    steps from `first_step` on, which a resumed run takes again, are dropped first, and a line that
    a crash cut off. `total_steps` is for the progress bar; `position` is `get_state()` of when
    `first_step` began. The file system must be able to append. `settings` are the job's config as
    nested dicts, for trackers of experiments.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        config: MetricsConfig,
        first_step: int = 0,
        total_steps: int = 0,
        position: Mapping[str, int] = {},
        settings: Mapping[str, Any] = {},
    ):
        super().__init__()
        self._workdir, self._config = pathlib.Path(workdir), config
        self._sinks: list[trackers.Sink] = []
        self.callback(self._sinks.clear)  # nothing is written after the end
        if jax.process_index() != 0:
            return
        self._open_jsonl(first_step, position.get("num_bytes", 0))
        if config.console:
            lines = console.StepLines(first_step, total_steps)
            self._sinks.append(lines.show)
            self.callback(lines.close)
        if config.tensorboard:
            self._open_tensorboard(first_step)
        for sink, end in trackers.opened(config, self._workdir, settings):
            self._sinks.append(sink)
            self.callback(end)

    def due(self, step: int) -> bool:
        return step % self._config.every == 0

    def write(self, step: int, *groups: Mapping[str, Any]) -> None:
        """Writes all `groups` as one line; of numbers with one name, the last group's."""
        if not self._sinks:
            return
        data = {name: float(value) for group in groups for name, value in group.items()}
        for sink in self._sinks:
            with self._tolerated(f"numbers of step {step}"):
                sink(step, data)

    def write_rollouts(
        self,
        step: int,
        rollouts: Rollouts,
        rewards: Rewards,
        of_tokens: Callable[[], Iterable[Mapping[str, Any]]] = lambda: (),
    ) -> None:
        """Writes `WORKDIR/rollouts/STEP.jsonl` in every `rollouts_every`-th step, whole or not.

        A line for each sequence, as `dumps.records` says; with `rollout_tokens` joined with the
        lines of `of_tokens()`.
        """
        every = self._config.rollouts_every
        if not self._sinks or not every or step % every:
            return
        more = of_tokens() if self._config.rollout_tokens else itertools.repeat({})
        found = dumps.records(step, rollouts, rewards)
        lines = [
            json.dumps(jsonable({**a, **b}), ensure_ascii=False, allow_nan=False) + "\n"
            for a, b in zip(found, more, strict=False)
        ]
        with self._tolerated(f"rollouts of step {step}"):
            replace_text(self._workdir / "rollouts" / f"{step}.jsonl", "".join(lines))

    def get_state(self) -> dict[str, int]:
        path = self._workdir / "metrics.jsonl"
        return {"num_bytes": path.stat().st_size} if self._sinks and path.exists() else {}

    @contextlib.contextmanager
    def _tolerated(self, what: str) -> Iterator[None]:
        """Ends the run where the disk cannot be written, or warns, as `on_failure` says."""
        try:
            yield
        except OSError as error:
            if self._config.on_failure == "stop":
                raise
            logging.warning("%s could not be written: %s; going on", what, error)

    def _open_jsonl(self, first_step: int, num_bytes: int) -> None:
        path = self._workdir / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_lines_before(path, first_step)
        if path.exists() and (size := path.stat().st_size) < num_bytes:
            said = "%s: %d bytes up to step %d, %d when the checkpoint was saved; lines are missing"
            logging.warning(said, path, size, first_step - 1, num_bytes)
        file = self.enter_context(path.open("ab", buffering=0))
        waiting: list[bytes] = []  # lines that the disk has not taken

        def sink(step: int, data: Mapping[str, float]) -> None:
            record = {"step": step, "data": jsonable(data)}
            waiting.append(json.dumps(record, allow_nan=False).encode() + b"\n")
            size = os.fstat(file.fileno()).st_size
            try:
                with naming(path):
                    write_all(file, b"".join(waiting))
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(file.fileno(), size)  # no half line stays
                raise
            waiting.clear()

        self._sinks.append(sink)

    def _open_tensorboard(self, first_step: int) -> None:
        folder = str(self._workdir / "tensorboard")
        writer = tensorboardX.SummaryWriter(folder, purge_step=first_step)

        def sink(step: int, data: Mapping[str, float]) -> None:
            for name, value in data.items():
                if math.isfinite(value):
                    writer.add_scalar(name.replace("@", "_at_"), value, step)

        self._sinks.append(sink)
        self.callback(writer.close)


def keep_lines_before(path: pathlib.Path, first_step: int) -> None:
    """Removes lines of steps from `first_step` on and, with a warning, lines that are no record."""
    if not path.exists():
        return
    kept = []
    before = path.read_bytes()
    for number, line in enumerate(before.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            is_earlier = json_value(line)["step"] < first_step
        except (ValueError, KeyError, TypeError):
            if before:
                logging.warning("%s:%d: not a metrics record, dropped: %.40r", path, number, line)
            continue
        if is_earlier:
            kept.append(line.decode() + "\n")
    if (after := "".join(kept)).encode() != before:
        replace_text(path, after)


def jsonable(value: Any) -> Any:
    """Returns `value` as JSON can hold it: NaN and infinities as None, other objects as text.

    >>> jsonable({"a": np.float32(0.5), "b": (1, float("nan"))})
    {'a': 0.5, 'b': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [jsonable(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def write_all(file: io.RawIOBase, data: bytes) -> None:
    """Writes all of `data` to an unbuffered file, which may take a part at a time."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
