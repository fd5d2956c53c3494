"""What the devices of a run did, and when, by the trace that `profiler.*` leaves in its folder."""

import collections
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError

# What programs are for: the kinds of the legend, in its order, with a colour and their names.
KINDS: Mapping[str, tuple[str, str]] = {
    "sample": ("#4477aa", r"(generate|inner)"),
    "read prompts": ("#66ccee", r"(read|prefill|extend|insert|move|release|empty)"),
    "score": ("#ccbb44", r"(of_\w+|_estimate\w*|estimate\w*)"),
    "learn": ("#228833", r"update"),
    "hand over weights": ("#ee6677", r"(layer|ends|<lambda>|_lambda_?|lambda)"),
    "other": ("#bbbbbb", r".*"),
}
_HANDS_OVER = "reshard"  # a phase of the loop: the next version of the weights


class NoTraceError(UserError, ValueError):
    """A folder of a run without a trace."""


@dataclasses.dataclass(frozen=True)
class Busy:
    """One run of a program on one device, from its first operation to its last."""

    program: str
    device: int
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one process recorded."""

    busy: Sequence[Busy]
    handed_over_s: Sequence[float]  # when the loop asked for new weights in the rollout layout


def read(workdir: str | os.PathLike[str]) -> list[Trace]:
    """Returns the trace of each process of a run; times are those of its machine's clock.

    Raises:
      NoTraceError: If the run left none.
    """
    from jax.profiler import ProfileData

    files = sorted(pathlib.Path(workdir, "profile").rglob("*.xplane.pb"))
    if not files:
        raise NoTraceError(
            f"{workdir}: no trace of this run; record one with"
            " --config.profiler.first_step=5 --config.profiler.num_steps=3"
        )
    return [_trace(ProfileData.from_file(str(path))) for path in files]


def _trace(profile) -> Trace:
    operations = collections.defaultdict(list)
    modules, handed = [], []
    for plane in profile.planes:
        device = re.fullmatch(r"/device:\w+:(\d+)(?: .*)?", plane.name)
        for line in plane.lines:
            for event in line.events:
                begin, end = event.start_ns / 1e9, event.end_ns / 1e9
                if device and line.name == "XLA Modules":  # as TPUs record programs
                    modules.append(Busy(_name(event.name), int(device[1]), begin, end))
                    continue
                of: dict[str, Any] = dict(event.stats)
                if "hlo_module" in of and "run_id" in of:
                    ordinal = of.get("device_ordinal", device[1] if device else 0)
                    run = _name(str(of["hlo_module"])), int(ordinal or 0), of["run_id"]
                    operations[run].append((begin, end))
                elif event.name == _HANDS_OVER:
                    handed.append(end)
    busy = modules or [
        Busy(program, ordinal, min(begin for begin, _ in times), max(end for _, end in times))
        for (program, ordinal, _), times in operations.items()
    ]
    return Trace(sorted(busy, key=lambda run: run.begin_s), sorted(handed))


def _name(module: str) -> str:
    """Returns a program's name without the number of its compilation."""
    return module.partition("(")[0]


def kind(program: str) -> str:
    """Returns the key of `KINDS` that a program belongs to.

    >>> kind("jit_update"), kind("jit_generate"), kind("jit_of_policy"), kind("jit_add")
    ('learn', 'sample', 'score', 'other')
    """
    name = program.removeprefix("jit_")
    return next(key for key, (_, names) in KINDS.items() if re.fullmatch(names, name))


def spans_of(busy: Iterable[Busy], gap_s: float) -> list[tuple[float, float]]:
    """Returns when at least one of some programs ran, but for gaps of at most `gap_s`.

    >>> spans_of([Busy("a", 0, 0.0, 2.0), Busy("b", 0, 2.1, 3.0), Busy("c", 0, 5.0, 6.0)], 0.5)
    [(0.0, 3.0), (5.0, 6.0)]
    """
    found: list[tuple[float, float]] = []
    for run in sorted(busy, key=lambda run: run.begin_s):
        if found and run.begin_s - found[-1][1] <= gap_s:
            found[-1] = found[-1][0], max(found[-1][1], run.end_s)
        else:
            found.append((run.begin_s, run.end_s))
    return found


def share(busy: Iterable[Busy], begin_s: float, end_s: float) -> float:
    """Returns the share of a time in which at least one of some programs ran.

    >>> share([Busy("a", 0, 0.0, 2.0), Busy("b", 0, 1.0, 3.0)], 0.0, 4.0)
    0.75
    """
    covered = sum(
        max(0.0, min(last, end_s) - max(first, begin_s)) for first, last in spans_of(busy, 0.0)
    )
    return covered / (end_s - begin_s)


def save(workdir: str | os.PathLike[str], path: str) -> None:
    """Draws when each device of a run was at work on what; PNG, SVG or PDF by the path's ending.

    Raises NoTraceError as `read`.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    traces = read(workdir)
    if not any(trace.busy for trace in traces):
        raise NoTraceError(f"{workdir}: its trace holds no program; record steps later in the run")
    begin = min(run.begin_s for trace in traces for run in trace.busy)
    end = max(run.end_s for trace in traces for run in trace.busy)
    rows = [
        (f"process {process}, device {device}" if len(traces) > 1 else f"device {device}", runs)
        for process, trace in enumerate(traces)
        for device, runs in enumerate(_by_device(trace.busy))
    ]
    figure = Figure(figsize=(11.0, 1.1 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    found = {kind(run.program) for _, runs in rows for run in runs}
    thin = (end - begin) / 2000  # less than a pixel
    for height, (_, runs) in enumerate(rows):
        for name, (colour, _) in KINDS.items():
            own = [run for run in runs if kind(run.program) == name]
            spans = [(first - begin, last - first) for first, last in spans_of(own, thin)]
            axes.broken_barh(spans, (height - 0.4, 0.8), color=colour, linewidth=0)
    for moment in traces[0].handed_over_s:
        axes.axvline(moment - begin, color="black", linewidth=0.7, linestyle=":")
    labels = [f"{name}, {share(runs, begin, end):.0%} at work" for name, runs in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0.0, end - begin)
    axes.set_xlabel("seconds; dotted: new weights for sampling", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    legend = [
        Patch(color=colour, label=name) for name, (colour, _) in KINDS.items() if name in found
    ]
    figure.legend(
        handles=legend, loc="outside upper center", ncols=len(KINDS), fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=120)


def _by_device(busy: Sequence[Busy]) -> list[list[Busy]]:
    """Returns what each device of a process did, in the order of their numbers."""
    found: dict[int, list[Busy]] = {}
    for run in busy:
        found.setdefault(run.device, []).append(run)
    return [found[device] for device in sorted(found)]
