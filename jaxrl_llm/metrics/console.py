"""What a run prints: a line for each step (on a terminal, in a bar), and a summary."""

import collections
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from rich import box
from rich import console as rich_console
from rich import table as rich_table

from jaxrl_llm.console.screen import SCREEN, Work, duration

Numbers = Mapping[str, float]

EVALUATION = "val-core/"
_SPEED_STEPS = 20  # that the time left is reckoned from
_WIDTH = 100  # where there is no terminal
# Label, metric, format.
_SHOWN = (
    ("reward", "critic/score/mean", "{:.4g}"),
    ("length", "response_length/mean", "{:.4g}"),
    ("kl", "actor/ppo_kl", "{:.3g}"),
    ("entropy", "actor/entropy", "{:.3g}"),
    ("", "timing_s/step", "{:.3g} s"),
    ("", "tokens/s", "{:.0f} tokens/s"),
)


class StepLines:
    """Shows the steps of a run as their numbers come."""

    def __init__(self, first_step: int, total_steps: int):
        self._total = total_steps
        self._terminal = SCREEN.is_terminal()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_SPEED_STEPS)
        self._bar = Work("", total_steps, "waits for its first step", max(0, first_step - 1))
        SCREEN.begin(self._bar)

    def show(self, step: int, data: Numbers) -> None:
        """Shows the numbers of one step, an evaluation on a line of its own."""
        if line := step_line(data):
            if "timing_s/step" in data:
                self._seconds.append(data["timing_s/step"])
            if left := max(0, self._total - step) * statistics.median_low(self._seconds or [0.0]):
                line += f"  {duration(left)} left"
            self._bar.done = step
            self._bar.note = f"step {step}/{self._total}  {line}"
            if not self._terminal:
                print(self._bar.note, flush=True)
        if found := evaluation_line(data):
            print(f"step {step}/{self._total}  evaluation: {found}", flush=True)

    def close(self) -> None:
        """Takes the bar away; the line of the last step stays."""
        SCREEN.end(self._bar)
        if self._terminal and self._bar.done:
            print(self._bar.note, flush=True)


def step_line(data: Numbers) -> str:
    """Returns the most important numbers of a step on one line.

    >>> step_line({"critic/score/mean": 0.5, "timing_s/step": 2.0, "perf/total_num_tokens": 300})
    'reward 0.5  2 s  150 tokens/s'
    """
    if {"perf/total_num_tokens", "timing_s/step"} <= data.keys():
        data = {**data, "tokens/s": data["perf/total_num_tokens"] / data["timing_s/step"]}
    return "  ".join(
        f"{label} {form.format(round(data[name], 4) + 0.0)}".strip()  # no "-0", no "1e-08"
        for label, name, form in _SHOWN
        if name in data
    )


def evaluation_line(data: Numbers) -> str:
    """Returns the results of an evaluation on one line; "" without one."""
    sources: dict[str, list[str]] = collections.defaultdict(list)
    for name, value in _results(data).items():
        source, _, kind = name.rpartition("/")
        sources[source].append(f"{kind} {value:.4g}")
    return "; ".join(f"{source} {', '.join(found)}" for source, found in sources.items())


def closing(
    workdir: pathlib.Path, seconds: float, files: Sequence[tuple[str, pathlib.Path]]
) -> None:
    """Prints the result of a run: first and last evaluation, seconds of this start, its files."""
    evaluations = _evaluations(workdir)
    first_and_last = evaluations[:1] + evaluations[1:][-1:]
    table = rich_table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", overflow="fold")
    for step, _ in first_and_last:
        table.add_column(f"step {step}", justify="right", overflow="fold")
    for name in evaluations[-1][1] if evaluations else ():
        values = (results.get(name, float("nan")) for _, results in first_and_last)
        table.add_row(name, *(f"{value:.4g}" for value in values))
    console = rich_console.Console(
        highlight=False, width=None if SCREEN.is_terminal() else _WIDTH, soft_wrap=True
    )
    console.print(f"done in {duration(seconds)}")
    if evaluations:
        console.print(table)
    for what, path in files:
        console.print(f"{what:<12}{path}", markup=False)


def _evaluations(workdir: pathlib.Path) -> list[tuple[int, dict[str, float]]]:
    """Returns step and results of every evaluation of the run so far."""
    path = workdir / "metrics.jsonl"
    records = map(json.loads, path.read_text("utf-8").splitlines() if path.exists() else ())
    of_steps = [(record["step"], _results(record["data"])) for record in records]
    return [(step, results) for step, results in of_steps if results]


def _results(data: Mapping[str, float | None]) -> dict[str, float]:
    """Returns what an evaluation found, by name; NaN is null in the file."""
    found = {k.removeprefix(EVALUATION): v for k, v in data.items() if k.startswith(EVALUATION)}
    return {name: float("nan") if value is None else value for name, value in found.items()}
