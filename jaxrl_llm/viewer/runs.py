"""The files of a run as numbers and samples; read anew only where they have grown."""

import array
import collections
import dataclasses
import math
import os
import pathlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.text import json_value

# What to show first, in this order: title, names of which the first that exists is shown.
CURVES: Sequence[tuple[str, Sequence[str]]] = (
    ("reward", ("critic/score/mean", "critic/rewards/mean")),
    ("loss", ("sft/loss", "dpo/loss", "reward_model/loss", "actor/pg_loss")),
    ("KL to the start of the step", ("actor/ppo_kl",)),
    ("KL to the reference", ("actor/reward_kl_penalty", "actor/kl_loss")),
    ("entropy", ("actor/entropy",)),
    ("response length", ("response_length/mean",)),
    ("log-prob difference", ("training/rollout_probs_diff_mean",)),
    ("gradient norm", ("actor/grad_norm", "sft/grad_norm")),
    ("seconds of a step", ("timing_s/step",)),
    ("tokens per second and device", ("perf/throughput",)),
)
# Planned and measured memory, GiB.
MEMORY = ("perf/planned_memory_gb", "perf/max_memory_allocated_gb", "perf/max_cpu_memory_used_gb")
MOST_POINTS = 800  # of a curve, on a screen
_MAX_NUMBER = 2**53  # of steps: larger integers are not exact in a browser
# What the page takes for a number, null where it was not finite, and for a list of numbers.
_NUMBERS = ("score", "num_tokens")
_LISTS = ("tokens", "mask", "log_probs", "rollout_log_probs", "advantages", "versions")
_SHOWN = 400  # characters of texts in a list of samples


class NotARun(UserError, ValueError):
    """A folder that holds no run."""


@dataclasses.dataclass(frozen=True)
class Filter:
    """Which samples of a step are wanted."""

    text: str = ""  # in input or output, upper or lower case
    min_score: float = -math.inf
    max_score: float = math.inf
    data_source: str = ""  # "": any
    stopped: str = ""  # "yes", "no"; "": any
    order: str = ""  # "score", "-score" or "": as in the file

    def takes(self, sample: Mapping[str, Any]) -> bool:
        score, text = sample.get("score"), self.text.lower()
        if text and not any(text in str(sample.get(k, "")).lower() for k in ("input", "output")):
            return False
        if self.data_source and sample.get("data_source") != self.data_source:
            return False
        if self.stopped and sample.get("stopped") is not (self.stopped == "yes"):
            return False
        if score is None:  # was not finite
            return (self.min_score, self.max_score) == (-math.inf, math.inf)
        return self.min_score <= score <= self.max_score


class Run:
    """A run's folder; its metrics are kept as columns of numbers."""

    def __init__(self, workdir: str | os.PathLike[str]):
        """Raises NotARun if the folder is not that of a run."""
        self.path = pathlib.Path(workdir)
        self.name = self.path.absolute().name
        if not any((self.path / name).exists() for name in ("metrics.jsonl", "config.json")):
            raise NotARun(f"{workdir}: no folder of a run, it has no metrics.jsonl")
        self._lock = threading.Lock()  # several browsers ask at one time
        self._begin()
        self.refresh()

    def _begin(self) -> None:
        self.bad_lines = 0  # of metrics.jsonl, which are no records and left out
        self.columns: dict[str, tuple[array.array, array.array]] = {}  # steps, values
        self.last_step = 0
        self._offset, self._last_line = 0, b""

    def refresh(self) -> None:
        """Reads the lines that were written since; all of them if the run was resumed.

        Raises NotARun if the file cannot be read.
        """
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        try:
            with (self.path / "metrics.jsonl").open("rb") as file:
                file.seek(self._offset - len(self._last_line))
                if file.read(len(self._last_line)) != self._last_line:
                    self._begin()
                    file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # is being written
                    self._offset += len(line)
                    self._last_line = line
                    self._take(line)
        except FileNotFoundError:
            self._begin()
        except OSError as error:
            raise NotARun(f"{self.path / 'metrics.jsonl'}: {error.strerror}") from error

    def _take(self, line: bytes) -> None:
        try:
            step, numbers = _metrics_record(line)
        except ValueError:
            self.bad_lines += 1  # a crash cut it off, or the run did not write it
            return
        self.last_step = max(self.last_step, step)
        for name, value in numbers.items():
            if name not in self.columns:
                self.columns[name] = array.array("q"), array.array("d")
            steps, values = self.columns[name]
            values.append(value)  # first: a reader goes by the number of steps
            steps.append(step)

    def curve(self, name: str, most: int = MOST_POINTS) -> tuple[list[int], list[float | None]]:
        """Returns steps and values; of many points the least and the greatest of each stretch."""
        steps, values = self.columns.get(name, ((), ()))
        kept: Sequence[int] = range(len(steps))
        if len(steps) > most:
            stretch = -(-2 * len(steps) // most)
            kept = []
            for first in range(0, len(steps), stretch):
                here = range(first, min(first + stretch, len(steps)))
                known = [i for i in here if values[i] == values[i]] or list(here[:1])
                extremes = {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}
                kept.extend(sorted(extremes))
        return [steps[i] for i in kept], [
            values[i] if math.isfinite(values[i]) else None for i in kept
        ]

    def alerts(self) -> list[dict[str, Any]]:
        """Returns the alerts that fired, with the first and last step of each and their number."""
        found = []
        for name, (steps, values) in self.columns.items():
            if name.startswith("alerts/") and (fired := [
                step for step, value in zip(steps, values, strict=False) if value > 0
            ]):  # fmt: skip
                about = {"first": fired[0], "last": fired[-1], "steps": len(fired)}
                found.append({"alert": name.partition("/")[2], **about})
        return found

    def memory(self) -> dict[str, float]:
        """Returns the newest finite value of each number of memory, in GiB."""
        newest = {}
        for name in MEMORY:
            values = self.columns[name][1] if name in self.columns else ()
            finite = (value for value in reversed(values) if math.isfinite(value))
            newest[name] = next(finite, math.nan)
        return {name: value for name, value in newest.items() if math.isfinite(value)}

    def steps(self) -> list[int]:
        """Returns the steps whose samples were dumped."""
        folder = self.path / "rollouts"
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(int(n[:-6]) for n in names if re.fullmatch(r"[0-9]{1,15}\.jsonl", n))

    def samples(self, step: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yields line number and sample of a step, None for a line that is no sample.

        Nothing if the step was not dumped.
        """
        try:
            with (self.path / "rollouts" / f"{step}.jsonl").open("rb") as file:
                for row, line in enumerate(file):
                    try:
                        yield row, _sample(line)
                    except ValueError:
                        yield row, None
        except OSError:  # it is no file, or was removed
            return

    def found(
        self, step: int | None, wanted: Filter, first: int = 0, count: int = 50
    ) -> dict[str, Any]:
        """Returns the samples of a step that a filter takes, without their tokens.

        Without a step it looks through all, the newest first, and stops when it has enough.
        """
        rows: list[dict[str, Any]] = []
        sources: collections.Counter[str] = collections.Counter()
        steps = [step] if step is not None else self.steps()[::-1]
        bad_lines = 0
        for each in steps:
            for row, sample in self.samples(each):
                if sample is None:
                    bad_lines += 1
                    continue
                sources[str(sample.get("data_source", ""))] += 1
                if wanted.takes(sample):
                    rows.append(_short(sample) | {"row": row, "step": each})
            if step is None and len(rows) >= first + count:
                break
        if wanted.order.endswith("score"):
            rows.sort(key=lambda r: (r["score"] is None, r["score"] or 0.0))
            rows = rows[::-1] if wanted.order.startswith("-") else rows
        return {
            "total": len(rows),
            "samples": rows[first : first + count],
            "data_sources": sorted(sources),
            "bad_lines": bad_lines,
        }

    def sample(self, step: int, row: int) -> dict[str, Any]:
        """Returns one sample whole; empty if there is none."""
        for number, sample in self.samples(step):
            if number == row:
                return sample or {}
        return {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _metrics_record(line: bytes) -> tuple[int, dict[str, float]]:
    """The step and the numbers of a line of `metrics.jsonl`, NaN for those that were not finite.

    Raises ValueError if it is anything else.
    """
    record = json_value(line)
    if not isinstance(record, dict) or not isinstance(record.get("data"), dict):
        raise ValueError("no record")
    step: Any = record.get("step")
    if not _is_number(step) or step != int(step) or not 0 <= step <= _MAX_NUMBER:
        raise ValueError(f"{step!r} is no step")
    numbers = {}
    for name, value in record["data"].items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{name}: {value!r} is no number")
        try:
            numbers[name] = math.nan if value is None else float(value)
        except OverflowError as error:
            raise ValueError(f"{name}: out of range") from error
    return int(step), numbers


def _sample(line: bytes) -> dict[str, Any]:
    """The sample of a line of a dump, of the types that the page draws; else a ValueError."""
    sample = json_value(line)
    if not isinstance(sample, dict):
        raise ValueError("no sample")
    numbers = [[sample.get(name)] for name in _NUMBERS]
    for name in _LISTS:
        if not isinstance(values := sample.get(name, []), list):
            raise ValueError(f"{name} is no list")
        numbers.append(values)
    if any({*map(type, values)} - {int, float, bool, type(None)} for values in numbers):
        raise ValueError("a number is none")
    if not all(isinstance(piece, str) for piece in _list_of(sample, "pieces")):
        raise ValueError("pieces are no texts")
    if "pieces" in sample and not all(
        len(sample.get(n, ())) == len(sample["pieces"]) for n in _LISTS
    ):
        raise ValueError("pieces and tokens differ in number")
    for turn in _list_of(sample, "messages") + _list_of(sample, "turns"):
        if not isinstance(turn, dict) or not isinstance(turn.get("tool_calls") or [], list):
            raise ValueError("messages are none")
        if not all(isinstance(call, dict) for call in turn.get("tool_calls") or []):
            raise ValueError("calls are none")
    return sample


def _list_of(sample: Mapping[str, Any], name: str) -> list[Any]:
    values = sample.get(name) or []
    if not isinstance(values, list):
        raise ValueError(f"{name} is no list")
    return values


def _short(sample: Mapping[str, Any]) -> dict[str, Any]:
    short = {key: str(sample.get(key, ""))[:_SHOWN] for key in ("input", "output", "gts")}
    kept = ("score", "data_source", "num_tokens", "stopped", "terms")
    marks = {key: sample[key] for key in ("failure", "left_out") if sample.get(key)}
    return short | {key: sample.get(key) for key in kept} | marks


def chosen_curves(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Returns title and metric of the curves to show first, of each run the one that it has."""
    known = {name for run in runs for name in run.columns}
    found = []
    for title, names in CURVES:
        wanted = {next((name for name in names if name in run.columns), "") for run in runs}
        found += [(title, name) for name in names if name in wanted]
    held_out = [name for name in sorted(known) if name.startswith(("val-core/", "val/"))]
    return found + [(name, name) for name in held_out[:4]]
