"""Runs in a terminal, for a machine reached by ssh: curves as sparklines, and samples."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrl_llm.viewer.runs import RecordedRun, SampleFilter, default_curves

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # characters of a curve
_SAMPLES = 3


def sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """A curve as a sparkline, each character the mean of a bucket; a space if it has no value.

    >>> sparkline([0.0, 1.0, None, 2.0, 4.0], width=5)
    '▁▂ ▄█'
    """
    bucket_size = -(-len(values) // width) if values else 1
    means = []
    for start in range(0, len(values), bucket_size):
        bucket = [value for value in values[start : start + bucket_size] if value is not None]
        means.append(sum(value / len(bucket) for value in bucket) if bucket else None)
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return ""
    low, half = min(finite), (max(finite) / 2 - min(finite) / 2) or 0.5  # no overflow
    top = len(_BARS) - 1
    return "".join(
        " " if m is None else _BARS[int(top * ((m / 2 - low / 2) / half))] for m in means
    )


def print_runs(runs: Sequence[RecordedRun], console: Console) -> None:
    """Prints curves, alerts, memory and the newest samples of the runs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, justify in (("", "left"), ("run", "left"), ("first", "right"), ("", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_column("last", justify="right")
    for title, name in default_curves(runs):
        for run in runs:
            steps, values = run.curve(name)
            finite = [value for value in values if value is not None]
            if steps and finite:
                first, last = f"{finite[0]:.4g}", f"{finite[-1]:.4g}"
                table.add_row(Text(title), Text(run.name), first, sparkline(values), last)
    console.print(table)
    for run in runs:
        memory = ", ".join(
            f"{name.partition('/')[2]} {value:.3g}" for name, value in run.memory().items()
        )
        console.print(Text(f"{run.name}: step {run.last_step}" + (f"; {memory}" if memory else "")))
        if run.bad_lines:
            message = f"{run.name}: {run.bad_lines} lines of metrics.jsonl are no records, left out"
            console.print(Text(message, style="red"))
        for alert in run.alerts():
            text = "{alert} in {steps} steps, from {first} to {last}".format(**alert)
            console.print(Text(f"{run.name}: alert {text}", style="red"))
        for step in run.dumped_steps()[-1:]:
            for sample in run.search(step, SampleFilter(), count=_SAMPLES)["samples"]:
                score = sample["score"]
                console.print(Text(f"step {step}, score {score}{_marks(sample)}", style="bold"))
                console.print(Text(sample["input"].strip()[-200:]))
                console.print(Text(sample["output"].strip(), style="green"))


def _marks(sample: Mapping[str, Any]) -> str:
    """A note on a sample that is left out of learning or whose reward failed."""
    left_out = ", left out" if sample.get("left_out") else ""
    return left_out + (f", reward failed: {sample['failure']}" if sample.get("failure") else "")
