"""Goodput: the share of a run's time, over all restarts, that went into steps that counted.

`WORKDIR/goodput.jsonl` gets a line when a process begins the run, and one for each step:

    {"began": 1700000000.0, "step": 0}
    {"step": 1, "begin": 1700000009.1, "end": 1700000012.9, "compile": 2.1, "save": 0.3, ...}

Times are Unix times of process 0. Lines are never removed: a step that was lost with its process
stands there twice.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from absl import logging
from jax import monitoring

from jaxrl_llm.storage import files, line_log
from jaxrl_llm.text import json_value

FILE_NAME = "goodput.jsonl"
# Parts of a step that did not train; the rest is "steps".
_STEP_PARTS = ("compile", "save", "evaluation")
PARTS = ("steps", *_STEP_PARTS, "start", "stages", "lost", "down", "other")
# Tracing, lowering and compilation; the first may contain others.
_COMPILE_EVENTS = "/jax/core/compile/"

Record = Mapping[str, Any]


class Breakdown:
    """Seconds of a run by part, from the start of the first process to the last record.

    Parts:
      steps: Steps that counted, without what follows.
      compile: Time of steps in which a program was compiled, by the loop or by a thread beside it.
      save: Saves that the loop waited for.
      evaluation: Evaluation of held-out data.
      start: From the start of a process to its first step: checks, data, weights.
      stages: Warm start and reward models, which are trained before the first step.
      lost: Steps that a later process had to do again.
      down: From the last record of a process to the start of the next one. That a process began a
        step which it did not finish is not seen, so its time is here.
      other: Between steps.

    >>> records = [{"began": 0.0, "step": 0}, {"step": 1, "begin": 2.0, "end": 5.0, "compile": 1.0}]
    >>> records += [{"step": 2, "begin": 5.0, "end": 8.0}, {"began": 10.0, "step": 1}]
    >>> records += [{"step": 2, "begin": 11.0, "end": 13.0}, {"closed": 14.0}]
    >>> run = Breakdown(records)
    >>> {name: seconds for name, seconds in run.parts.items() if seconds}
    {'steps': 4.0, 'compile': 1.0, 'save': 1.0, 'start': 3.0, 'lost': 3.0, 'down': 2.0}
    >>> run.goodput == 4.0 / 14.0
    True
    """

    def __init__(self, records: Iterable[Record] = ()):
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._steps: dict[int, dict[str, float]] = {}  # parts of the steps that count so far
        self.last: float | None = None  # until where time has been given to a part
        self._is_starting = False  # no step since the process began
        for record in records:
            self.add(record)

    @property
    def goodput(self) -> float:
        """Seconds of steps that counted over all seconds; 1 before the first."""
        total = sum(self.parts.values())
        return self.parts["steps"] / total if total else 1.0

    def add(self, record: Record) -> None:
        """Adds the next record of the file."""
        if "began" in record:
            self.parts["down"] += self._since_last(record["began"])
            self._is_starting = True
            for number in [number for number in self._steps if number > record["step"]]:
                for name, seconds in self._steps.pop(number).items():
                    self.parts[name] -= seconds
                    self.parts["lost"] += seconds
        elif "closed" in record:
            self.parts["save"] += self._since_last(record["closed"])
        else:
            before = self._since_last(record["begin"])
            stages = min(before, record.get("stages", 0.0))
            self.parts["stages"] += stages
            self.parts["start" if self._is_starting else "other"] += before - stages
            left, parts = self._since_last(record["end"]), {}
            for name in _STEP_PARTS:
                parts[name] = min(left, record.get(name, 0.0))
                left -= parts[name]
            self._steps[record["step"]] = parts = {**parts, "steps": left}
            for name, seconds in parts.items():
                self.parts[name] += seconds
            self._is_starting = False

    def _since_last(self, now: float) -> float:
        """Seconds since the last time that was given to a part; clocks that go back give none."""
        seconds = max(0.0, now - self.last) if self.last is not None else 0.0
        self.last = now if self.last is None else max(now, self.last)
        return seconds


def read_records(workdir: pathlib.Path) -> list[Record]:
    """The records of a run; lines that a kill has cut are left out."""
    try:
        content = line_log.read_log(workdir / FILE_NAME)
    except FileNotFoundError:
        return []
    records: list[Record] = []
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError):
            record = json_value(line)
            if isinstance(record, dict) and ({"began", "begin", "closed"} & record.keys()):
                records.append(record)
    return records


class GoodputLog(contextlib.ExitStack):
    """The records of this process, which process 0 writes.

    A record that cannot be written is logged, not raised: it says nothing about the training.
    """

    def __init__(
        self,
        workdir: pathlib.Path | None,
        began: float,
        resumed_step: int,
        stages_s: float = 0.0,
        check_owner: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.time,
    ):
        """
        Args:
          workdir: The run's folder; None: another process writes.
          began: Unix time at which this process began the run.
          resumed_step: Completed steps of the checkpoint that it resumed from.
          stages_s: Seconds of stages before the first step.
          check_owner: Raises if another process has taken over the folder.
        """
        super().__init__()
        self._now, self._stages_s = now, stages_s
        self._run = Breakdown(() if workdir is None else read_records(workdir))
        self._write: Callable[[bytes], Any] = lambda line: None
        if workdir is not None:
            self._write = self._open(workdir / FILE_NAME, check_owner)
        self._compilations: list[tuple[float, float]] = []  # begin and end of each, all threads
        self._seconds: dict[str, float] = {}  # of the step, by part
        self._begin = began
        monitoring.register_event_duration_secs_listener(self._listen)
        self.callback(monitoring.unregister_event_duration_listener, self._listen)
        self._append({"began": began, "step": resumed_step})

    def begin_step(self) -> None:
        """Begins a step; what was compiled since the start belongs to the start."""
        self._begin, self._seconds, self._compilations = self._now(), {}, []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the time of the `with` block to a part of the step."""
        begin = self._now()
        try:
            yield
        finally:
            self.add(name, self._now() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds to a part of the step."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def end_step(self, step: int) -> None:
        """Ends and records a step."""
        end = self._now()
        seconds = self._step_seconds(end)
        self._compilations = []
        record = {"step": step, "begin": self._begin, "end": end, **seconds}
        if self._stages_s:
            record["stages"], self._stages_s = self._stages_s, 0.0
        self._append(record)

    def _step_seconds(self, now: float) -> dict[str, float]:
        """Seconds of the step's parts until now."""
        return {**self._seconds, "compile": _covered(self._compilations, self._begin, now)}

    def end(self) -> None:
        """Records that the last save is done."""
        self._append({"closed": self._now()})

    @property
    def goodput(self) -> float:
        """That of the run up to now, in a step, as if the step ended here."""
        now = self._now()
        step = max(0.0, now - self._begin - sum(self._step_seconds(now).values()))
        total = sum(self._run.parts.values()) + now - (self._run.last or now)
        return (self._run.parts["steps"] + step) / total if total > 0 else 1.0

    def summary(self) -> str:
        """The goodput of the run and where the rest of the time went, largest first."""
        total = sum(self._run.parts.values())
        rest = [(s / total, name) for name, s in self._run.parts.items() if name != "steps" and s]
        texts = [f"{name} {part:.0%}" for part, name in sorted(rest, reverse=True) if part >= 0.005]
        counted = f"{self._run.goodput:.0%} of the time in steps that counted"
        return "; ".join([counted, ", ".join(texts)])

    def _append(self, record: Record) -> None:
        self._run.add(record)
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in record.items()}
        try:
            self._write(json.dumps(rounded).encode() + b"\n")
        except OSError as error:
            logging.warning("%s: a line could not be written: %s; going on", FILE_NAME, error)

    def _open(self, path: pathlib.Path, check_owner: Callable[[], None]) -> Callable[[bytes], Any]:
        """The function that appends lines."""
        if files.in_bucket(path):
            log = line_log.BucketLog(path, check_owner)
            self.callback(self._close, log)
            return log.append
        path.parent.mkdir(parents=True, exist_ok=True)
        is_cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        file = self.enter_context(path.open("ab", buffering=0))
        if is_cut:
            file.write(b"\n")
        return file.write

    def _close(self, log: line_log.BucketLog) -> None:
        try:
            log.close()
        except OSError as error:
            logging.warning("%s: %s", FILE_NAME, error)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(_COMPILE_EVENTS):
            end = self._now()
            self._compilations.append((end - duration_secs, end))


def _covered(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The length of the union of intervals within [begin, end].

    >>> _covered([(0.0, 2.0), (1.0, 3.0), (5.0, 9.0)], 0.5, 6.0)
    3.5
    """
    covered, last = 0.0, begin
    for first, until in sorted(intervals):
        first, until = max(first, last), min(until, end)
        covered, last = covered + max(0.0, until - first), max(last, until)
    return covered
