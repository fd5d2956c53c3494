"""Metrics and samples of a run, read from its files incrementally."""

import array
import collections
import dataclasses
import io
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import files, line_log
from jaxrl_llm.text import json_value

# The curves shown first, in this order: title, metrics of which the first available is shown.
DEFAULT_CURVES: Sequence[tuple[str, Sequence[str]]] = (
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
# Planned and measured memory in GiB.
MEMORY_METRICS = (
    "perf/planned_memory_gb",
    "perf/max_memory_allocated_gb",
    "perf/max_cpu_memory_used_gb",
)
MAX_POINTS = 800  # of a curve
_MAX_NUMBER = 2**53  # of steps: larger integers are not exact in a browser
# Fields that the page draws as a number (null: not finite) and as a list of numbers.
_NUMBER_FIELDS = ("score", "num_tokens")
_LIST_FIELDS = ("tokens", "mask", "log_probs", "rollout_log_probs", "advantages", "versions")
_SUMMARY_CHARACTERS = 400  # of each text in a list of samples


class NotARunError(UserError, ValueError):
    """The folder does not contain a run."""


@dataclasses.dataclass(frozen=True)
class SampleFilter:
    """A query for samples: conditions, and the order of the results."""

    text: str = ""  # in input or output, case-insensitive
    min_score: float = -math.inf
    max_score: float = math.inf
    data_source: str = ""  # "": any
    stopped: str = ""  # "yes", "no"; "": any
    order: str = ""  # "score", "-score" or "": as in the file

    def matches(self, sample: Mapping[str, Any]) -> bool:
        score, text = sample.get("score"), self.text.lower()
        if text and not any(text in str(sample.get(k, "")).lower() for k in ("input", "output")):
            return False
        if self.data_source and sample.get("data_source") != self.data_source:
            return False
        if self.stopped and sample.get("stopped") is not (self.stopped == "yes"):
            return False
        if score is None:  # not finite
            return (self.min_score, self.max_score) == (-math.inf, math.inf)
        return self.min_score <= score <= self.max_score


class RecordedRun:
    """The folder of a run; metrics are held in memory as columns of numbers."""

    def __init__(self, workdir: str | os.PathLike[str]):
        """Reads the metrics; raises NotARun if the folder does not contain a run."""
        self.path = files.run_path(workdir)
        self.name = files.absolute(self.path).name
        if not {"metrics.jsonl", "config.json"} & set(files.names(self.path)):
            raise NotARunError(f"{workdir}: not a run folder, it has no metrics.jsonl")
        self._lock = threading.Lock()  # several browsers may ask at the same time
        self._reset()
        self.refresh()

    def _reset(self) -> None:
        self.bad_lines = 0  # of metrics.jsonl, invalid and skipped
        self.columns: dict[str, tuple[array.array, array.array]] = {}  # steps, values
        self.last_step = 0
        self._offset, self._last_line = 0, b""

    def refresh(self) -> None:
        """Reads the lines added since the last call, or all of them if the run was resumed.

        Raises NotARun if the file cannot be read.
        """
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        try:
            path = self.path / "metrics.jsonl"
            content = line_log.read_log(path, self._offset - len(self._last_line))
            if content.startswith(self._last_line):
                content = content[len(self._last_line) :]
            else:
                self._reset()
                content = line_log.read_log(path)
            for line in io.BytesIO(content):
                if not line.endswith(b"\n"):
                    break  # still being written
                self._offset += len(line)
                self._last_line = line
                self._append(line)
        except FileNotFoundError:
            self._reset()
        except OSError as error:
            cause = error.strerror or error
            raise NotARunError(f"{self.path / 'metrics.jsonl'}: {cause}") from error

    def _append(self, line: bytes) -> None:
        try:
            step, numbers = _metrics_record(line)
        except ValueError:
            self.bad_lines += 1  # truncated by a crash, or not written by the run
            return
        self.last_step = max(self.last_step, step)
        for name, value in numbers.items():
            if name not in self.columns:
                self.columns[name] = array.array("q"), array.array("d")
            steps, values = self.columns[name]
            values.append(value)  # before `dumped_steps`: concurrent readers go by its length
            steps.append(step)

    def curve(
        self, name: str, max_points: int = MAX_POINTS
    ) -> tuple[list[int], list[float | None]]:
        """Steps and values, downsampled to `max_points`: minimum and maximum of each bucket."""
        steps, values = self.columns.get(name, ((), ()))
        indices: Sequence[int] = range(len(steps))
        if len(steps) > max_points:
            bucket_size = -(-2 * len(steps) // max_points)
            indices = []
            for start in range(0, len(steps), bucket_size):
                bucket = range(start, min(start + bucket_size, len(steps)))
                not_nan = [i for i in bucket if values[i] == values[i]] or list(bucket[:1])
                extremes = {
                    min(not_nan, key=values.__getitem__),
                    max(not_nan, key=values.__getitem__),
                }
                indices.extend(sorted(extremes))
        return [steps[i] for i in indices], [
            values[i] if math.isfinite(values[i]) else None for i in indices
        ]

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that fired: first and last step, and the number of steps, of each."""
        summaries = []
        for name, (steps, values) in self.columns.items():
            if name.startswith("alerts/") and (fired_steps := [
                step for step, value in zip(steps, values, strict=False) if value > 0
            ]):  # fmt: skip
                span = {"first": fired_steps[0], "last": fired_steps[-1], "steps": len(fired_steps)}
                summaries.append({"alert": name.partition("/")[2], **span})
        return summaries

    def memory(self) -> dict[str, float]:
        """The newest finite value of each metric in `MEMORY_METRICS`, in GiB."""
        newest = {}
        for name in MEMORY_METRICS:
            values = self.columns[name][1] if name in self.columns else ()
            finite = (value for value in reversed(values) if math.isfinite(value))
            newest[name] = next(finite, math.nan)
        return {name: value for name, value in newest.items() if math.isfinite(value)}

    def dumped_steps(self) -> list[int]:
        """The steps with a dump of their samples, ascending."""
        names = files.names(self.path / "rollouts")
        return sorted(int(n[:-6]) for n in names if re.fullmatch(r"[0-9]{1,15}\.jsonl", n))

    def read_samples(self, step: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yields (line number, sample) of a step; the sample is None for an invalid line.

        Yields nothing if the step has no dump.
        """
        try:
            path = self.path / "rollouts" / f"{step}.jsonl"
            for row, line in enumerate(io.BytesIO(files.read_bytes(path))):
                try:
                    yield row, _parsed_sample(line)
                except ValueError:
                    yield row, None
        except OSError:  # not a file, or removed
            return

    def search(
        self, step: int | None, sample_filter: SampleFilter, first: int = 0, count: int = 50
    ) -> dict[str, Any]:
        """The samples of a step that match the filter, without their tokens.

        `step=None` searches all steps, newest first, until `first + count` samples match.
        """
        matches: list[dict[str, Any]] = []
        sources: collections.Counter[str] = collections.Counter()
        steps = [step] if step is not None else self.dumped_steps()[::-1]
        bad_lines = 0
        for step_number in steps:
            for row, sample in self.read_samples(step_number):
                if sample is None:
                    bad_lines += 1
                    continue
                sources[str(sample.get("data_source", ""))] += 1
                if sample_filter.matches(sample):
                    matches.append(_summary(sample) | {"row": row, "step": step_number})
            if step is None and len(matches) >= first + count:
                break
        if sample_filter.order.endswith("score"):
            matches.sort(key=lambda r: (r["score"] is None, r["score"] or 0.0))
            matches = matches[::-1] if sample_filter.order.startswith("-") else matches
        return {
            "total": len(matches),
            "samples": matches[first : first + count],
            "data_sources": sorted(sources),
            "bad_lines": bad_lines,
        }

    def read_sample(self, step: int, row: int) -> dict[str, Any]:
        """One sample with all its fields; empty if there is none."""
        for number, sample in self.read_samples(step):
            if number == row:
                return sample or {}
        return {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _metrics_record(line: bytes) -> tuple[int, dict[str, float]]:
    """Step and metrics of a line of `metrics.jsonl`; NaN for values that were not finite.

    Raises ValueError for an invalid line.
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


def _parsed_sample(line: bytes) -> dict[str, Any]:
    """The sample in a line of a dump, its types checked; raises ValueError."""
    sample = json_value(line)
    if not isinstance(sample, dict):
        raise ValueError("no sample")
    numbers = [[sample.get(name)] for name in _NUMBER_FIELDS]
    for name in _LIST_FIELDS:
        if not isinstance(values := sample.get(name, []), list):
            raise ValueError(f"{name} is no list")
        numbers.append(values)
    if any({*map(type, values)} - {int, float, bool, type(None)} for values in numbers):
        raise ValueError("a value is not finite")
    if not all(isinstance(piece, str) for piece in _list_field(sample, "pieces")):
        raise ValueError("pieces are no texts")
    if "pieces" in sample and not all(
        len(sample.get(n, ())) == len(sample["pieces"]) for n in _LIST_FIELDS
    ):
        raise ValueError("pieces and tokens differ in number")
    for turn in _list_field(sample, "messages") + _list_field(sample, "turns"):
        if not isinstance(turn, dict) or not isinstance(turn.get("tool_calls") or [], list):
            raise ValueError("messages are none")
        if not all(isinstance(call, dict) for call in turn.get("tool_calls") or []):
            raise ValueError("calls are none")
    return sample


def _list_field(sample: Mapping[str, Any], name: str) -> list[Any]:
    values = sample.get(name) or []
    if not isinstance(values, list):
        raise ValueError(f"{name} is no list")
    return values


def _summary(sample: Mapping[str, Any]) -> dict[str, Any]:
    short = {
        key: str(sample.get(key, ""))[:_SUMMARY_CHARACTERS] for key in ("input", "output", "gts")
    }
    copied_keys = ("score", "data_source", "num_tokens", "stopped", "terms")
    failure_fields = {key: sample[key] for key in ("failure", "left_out") if sample.get(key)}
    return short | {key: sample.get(key) for key in copied_keys} | failure_fields


def default_curves(runs: Sequence[RecordedRun]) -> list[tuple[str, str]]:
    """(title, metric) of the curves to show first; of alternatives, each run's first available."""
    metric_names = {name for run in runs for name in run.columns}
    curves = []
    for title, names in DEFAULT_CURVES:
        first_available = {
            next((name for name in names if name in run.columns), "") for run in runs
        }
        curves += [(title, name) for name in names if name in first_available]
    validation = [name for name in sorted(metric_names) if name.startswith(("val-core/", "val/"))]
    return curves + [(name, name) for name in validation[:4]]
