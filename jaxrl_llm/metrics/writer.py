"""Outputs for the metrics and samples of a run. Only process 0 writes."""

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
from jaxrl_llm.metrics import rollout_dump, trackers
from jaxrl_llm.storage import files, line_log, mirror
from jaxrl_llm.text import json_value
from jaxrl_llm.types import Rewards, Rollouts


class Writer(contextlib.ExitStack):
    """Writes `WORKDIR/metrics.jsonl`, a line `{"step": int, "data": {name: float}}` per call.

    Non-finite numbers become null. A line has been handed to the operating system when `write`
    returns; in a bucket it is there after `flush`, or half a minute later. Opening it drops
    lines from `first_step` on, which a resumed run writes again, and a line truncated by a
    crash. `total_steps` is for the progress bar; `position` is the `get_state()` at the
    beginning of `first_step`. A local file system must support appending. `settings` are the
    job's config as nested dicts, for experiment trackers. `check_owner` raises if another
    process has taken over the folder.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        config: MetricsConfig,
        first_step: int = 0,
        total_steps: int = 0,
        position: Mapping[str, int] = {},
        settings: Mapping[str, Any] = {},
        check_owner: Callable[[], None] = lambda: None,
    ):
        super().__init__()
        self._workdir, self._config = files.run_path(workdir), config
        self._check_owner = check_owner
        self._sinks: list[trackers.Sink] = []
        self._bucket_log: line_log.BucketLog | None = None
        self.callback(self._sinks.clear)  # no writes after close
        if jax.process_index() != 0:
            return
        self._open_jsonl(first_step, position.get("num_bytes", 0))
        if config.console:
            lines = console.StepProgress(first_step, total_steps)
            self._sinks.append(lines.show)
            self.callback(lines.close)
        if config.tensorboard:
            self._open_tensorboard(first_step)
        for sink, end in trackers.open_trackers(config, self._workdir, settings):
            self._sinks.append(sink)
            self.callback(end)

    def is_due(self, step: int) -> bool:
        return step % self._config.every == 0

    def write(self, step: int, *groups: Mapping[str, Any]) -> None:
        """Writes all `groups` as one line; later groups override earlier ones."""
        if not self._sinks:
            return
        data = {name: float(value) for group in groups for name, value in group.items()}
        for sink in self._sinks:
            with self._handle_write_failure(f"numbers of step {step}"):
                sink(step, data)

    def write_rollouts(
        self,
        step: int,
        rollouts: Rollouts,
        rewards: Rewards,
        make_token_records: Callable[[], Iterable[Mapping[str, Any]]] = lambda: (),
    ) -> None:
        """Writes `WORKDIR/rollouts/STEP.jsonl` every `rollouts_every` steps, atomically.

        A line per sequence, as in `rollout_dump.sequence_records`; with `rollout_tokens`, merged
        with the records of `make_token_records()`.
        """
        interval = self._config.rollouts_every
        if not self._sinks or not interval or step % interval:
            return
        token_records = (
            make_token_records() if self._config.rollout_tokens else itertools.repeat({})
        )
        records = rollout_dump.sequence_records(step, rollouts, rewards)
        lines = [
            json.dumps(to_jsonable({**a, **b}), ensure_ascii=False, allow_nan=False) + "\n"
            for a, b in zip(records, token_records, strict=False)
        ]
        with self._handle_write_failure(f"rollouts of step {step}"):
            self._check_owner()
            files.replace_text(self._workdir / "rollouts" / f"{step}.jsonl", "".join(lines))

    def flush(self) -> None:
        """Puts all lines so far into the bucket, if the folder is in one."""
        if self._bucket_log is not None:
            with self._handle_write_failure("metrics.jsonl"):
                self._bucket_log.flush()

    def get_state(self) -> dict[str, int]:
        if self._bucket_log is not None:
            return {"num_bytes": self._bucket_log.num_bytes}
        path = self._workdir / "metrics.jsonl"
        return {"num_bytes": path.stat().st_size} if self._sinks and path.exists() else {}

    @contextlib.contextmanager
    def _handle_write_failure(self, what: str) -> Iterator[None]:
        """Re-raises an OSError of the block, or logs it, by `config.metrics.on_failure`."""
        try:
            yield
        except OSError as error:
            if self._config.on_failure == "stop":
                raise
            logging.warning("%s could not be written: %s; going on", what, error)

    def _open_jsonl(self, first_step: int, num_bytes: int) -> None:
        path = self._workdir / "metrics.jsonl"
        size = keep_lines_before(path, first_step)
        if size < num_bytes:
            warning = (
                "%s: %d bytes up to step %d, %d when the checkpoint was saved; lines are missing"
            )
            logging.warning(warning, path, size, first_step - 1, num_bytes)
        if files.in_bucket(path):
            log = self._bucket_log = line_log.BucketLog(path, self._check_owner)
            self.callback(self._close_log)
            self._sinks.append(lambda step, data: log.append(jsonl_line(step, data)))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        file = self.enter_context(path.open("ab", buffering=0))
        pending: list[bytes] = []  # lines not written yet

        def sink(step: int, data: Mapping[str, float]) -> None:
            pending.append(jsonl_line(step, data))
            size = os.fstat(file.fileno()).st_size
            try:
                with files.naming_file(path):
                    write_all(file, b"".join(pending))
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(file.fileno(), size)  # leave no partial line
                raise
            pending.clear()

        self._sinks.append(sink)

    def _open_tensorboard(self, first_step: int) -> None:
        folder = self.enter_context(mirror.mirrored_folder(self._workdir / "tensorboard"))
        writer = tensorboardX.SummaryWriter(str(folder), purge_step=first_step)

        def sink(step: int, data: Mapping[str, float]) -> None:
            for name, value in data.items():
                if math.isfinite(value):
                    writer.add_scalar(name.replace("@", "_at_"), value, step)

        self._sinks.append(sink)
        self.callback(writer.close)

    def _close_log(self) -> None:
        log, self._bucket_log = self._bucket_log, None
        if log is not None:
            with self._handle_write_failure("metrics.jsonl"):
                log.close()


def jsonl_line(step: int, data: Mapping[str, float]) -> bytes:
    """A line of `metrics.jsonl`."""
    record = {"step": step, "data": to_jsonable(data)}
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def keep_lines_before(path: pathlib.Path, first_step: int) -> int:
    """Removes lines of steps from `first_step` on and, with a warning, invalid lines.

    Returns the bytes that are left.
    """
    kept_lines = []
    try:
        content = line_log.read_log(path)
    except FileNotFoundError:
        return 0
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            is_earlier = json_value(line)["step"] < first_step
        except (ValueError, KeyError, TypeError):
            if content:
                logging.warning("%s:%d: not a metrics record, dropped: %.40r", path, number, line)
            continue
        if is_earlier:
            kept_lines.append(line.decode() + "\n")
    new_content = "".join(kept_lines).encode()
    if new_content != content:
        line_log.replace_log(path, new_content)
    return len(new_content)


def to_jsonable(value: Any) -> Any:
    """`value` in types that JSON can represent: NaN and infinities as None, other objects as text.

    >>> to_jsonable({"a": np.float32(0.5), "b": (1, float("nan"))})
    {'a': 0.5, 'b': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_jsonable(entry) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return to_jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def write_all(file: io.RawIOBase, data: bytes) -> None:
    """Writes all of `data` to an unbuffered file, whose `write` may be partial."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) or 0 :]
