"""The files of a run as numbers and samples; read anew only where they have grown."""

import array
import collections
import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError

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
        self._begin()
        self.refresh()

    def _begin(self) -> None:
        self.columns: dict[str, tuple[array.array, array.array]] = {}  # steps, values
        self.last_step = 0
        self._offset, self._last_line = 0, b""

    def refresh(self) -> None:
        """Reads the lines that were written since; all of them if the run was resumed."""
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

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step, data = int(record["step"]), record["data"].items()
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # a crash cut it off; the writer says so
        self.last_step = max(self.last_step, step)
        for name, value in data:
            if name not in self.columns:
                self.columns[name] = array.array("q"), array.array("d")
            steps, values = self.columns[name]
            steps.append(step)
            values.append(math.nan if value is None else value)

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
                step for step, value in zip(steps, values, strict=True) if value > 0
            ]):  # fmt: skip
                about = {"first": fired[0], "last": fired[-1], "steps": len(fired)}
                found.append({"alert": name.partition("/")[2], **about})
        return found

    def memory(self) -> dict[str, float]:
        """Returns the newest of each number of memory that the run reports, in GiB."""
        return {name: self.columns[name][1][-1] for name in MEMORY if name in self.columns}

    def steps(self) -> list[int]:
        """Returns the steps whose samples were dumped."""
        folder = self.path / "rollouts"
        names = os.listdir(folder) if folder.is_dir() else []
        return sorted(int(n[:-6]) for n in names if re.fullmatch(r"\d+\.jsonl", n))

    def samples(self, step: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields line number and sample of a step; nothing if it was not dumped."""
        path = self.path / "rollouts" / f"{step}.jsonl"
        if not path.exists():
            return
        with path.open(encoding="utf-8") as file:
            for row, line in enumerate(file):
                try:
                    yield row, json.loads(line)
                except ValueError:
                    continue

    def found(
        self, step: int | None, wanted: Filter, first: int = 0, count: int = 50
    ) -> dict[str, Any]:
        """Returns the samples of a step that a filter takes, without their tokens.

        Without a step it looks through all, the newest first, and stops when it has enough.
        """
        rows: list[dict[str, Any]] = []
        sources: collections.Counter[str] = collections.Counter()
        steps = [step] if step is not None else self.steps()[::-1]
        for each in steps:
            for row, sample in self.samples(each):
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
        }

    def sample(self, step: int, row: int) -> dict[str, Any]:
        """Returns one sample whole; empty if there is none."""
        for number, sample in self.samples(step):
            if number == row:
                return sample
        return {}


def _short(sample: Mapping[str, Any]) -> dict[str, Any]:
    short = {key: str(sample.get(key, ""))[:_SHOWN] for key in ("input", "output", "gts")}
    kept = ("score", "data_source", "num_tokens", "stopped", "terms")
    return short | {key: sample.get(key) for key in kept}


def chosen_curves(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Returns title and metric of the curves to show first, of each run the one that it has."""
    known = {name for run in runs for name in run.columns}
    found = []
    for title, names in CURVES:
        wanted = {next((name for name in names if name in run.columns), "") for run in runs}
        found += [(title, name) for name in names if name in wanted]
    held_out = [name for name in sorted(known) if name.startswith(("val-core/", "val/"))]
    return found + [(name, name) for name in held_out[:4]]
