"""A timeline of a run's devices, from the trace that `profiler.*` writes into its folder."""

import collections
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import files

# Kinds of programs in the order of the legend: colour, pattern of the names of their programs.
PROGRAM_KINDS: Mapping[str, tuple[str, str]] = {
    "sample": ("#4477aa", r"(generate|inner)"),
    "read prompts": ("#66ccee", r"(read|prefill|extend|insert|move|release|empty)"),
    "score": ("#ccbb44", r"(of_\w+|_estimate\w*|estimate\w*)"),
    "learn": ("#228833", r"update"),
    "hand over weights": ("#ee6677", r"(layer|ends|<lambda>|_lambda_?|lambda)"),
    "other": ("#bbbbbb", r".*"),
}
_RESHARD_PHASE = "reshard"  # phase of the loop that hands new weights to the rollout engine


class NoTraceError(UserError, ValueError):
    """The run has no trace."""


@dataclasses.dataclass(frozen=True)
class ProgramRun:
    """One execution of a program on one device, from its first operation to its last."""

    program: str
    device: int
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """The trace of one process."""

    program_runs: Sequence[ProgramRun]
    reshard_times_s: Sequence[float]  # when the loop asked for new weights in the rollout layout


def read_traces(workdir: str | os.PathLike[str]) -> list[Trace]:
    """The trace of each process of a run; times are in seconds on the clock of its machine.

    Raises:
      NoTraceError: If the run has none.
    """
    from jax.profiler import ProfileData

    folder = files.run_path(workdir) / "profile"
    traces = sorted(name for name in files.files_below(folder) if name.endswith(".xplane.pb"))
    if not traces:
        raise NoTraceError(
            f"{workdir}: no trace of this run; record one with"
            " --config.profiler.first_step=5 --config.profiler.num_steps=3"
        )
    contents = (files.read_bytes(folder / name) for name in traces)
    return [_trace(ProfileData.from_serialized_xspace(content)) for content in contents]


def _trace(profile) -> Trace:
    operations = collections.defaultdict(list)
    modules, handed_over = [], []
    for plane in profile.planes:
        device = re.fullmatch(r"/device:\w+:(\d+)(?: .*)?", plane.name)
        for line in plane.lines:
            for event in line.events:
                begin, end = event.start_ns / 1e9, event.end_ns / 1e9
                if device and line.name == "XLA Modules":  # as TPUs record programs
                    modules.append(
                        ProgramRun(_program_name(event.name), int(device[1]), begin, end)
                    )
                    continue
                stats: dict[str, Any] = dict(event.stats)
                if "hlo_module" in stats and "run_id" in stats:
                    ordinal = stats.get("device_ordinal", device[1] if device else 0)
                    key = (
                        _program_name(str(stats["hlo_module"])),
                        int(ordinal or 0),
                        stats["run_id"],
                    )
                    operations[key].append((begin, end))
                elif event.name == _RESHARD_PHASE:
                    handed_over.append(end)
    busy = modules or [
        ProgramRun(program, ordinal, min(begin for begin, _ in times), max(end for _, end in times))
        for (program, ordinal, _), times in operations.items()
    ]
    return Trace(sorted(busy, key=lambda run: run.begin_s), sorted(handed_over))


def _program_name(module: str) -> str:
    """The name of a program without its compilation id, which is in parentheses."""
    return module.partition("(")[0]


def program_kind(program: str) -> str:
    """The key of `PROGRAM_KINDS` that a program belongs to.

    >>> program_kind("jit_update"), program_kind("jit_generate")
    ('learn', 'sample')
    """
    name = program.removeprefix("jit_")
    return next(key for key, (_, names) in PROGRAM_KINDS.items() if re.fullmatch(names, name))


def busy_spans(busy: Iterable[ProgramRun], gap_s: float) -> list[tuple[float, float]]:
    """(begin, end) of the times in which any of `program_runs` ran; gaps of at most `gap_s` are
    closed.

    >>> times = (0.0, 2.0), (2.1, 3.0), (5.0, 6.0)
    >>> busy_spans([ProgramRun("a", 0, *span) for span in times], 0.5)
    [(0.0, 3.0), (5.0, 6.0)]
    """
    spans: list[tuple[float, float]] = []
    for run in sorted(busy, key=lambda run: run.begin_s):
        if spans and run.begin_s - spans[-1][1] <= gap_s:
            spans[-1] = spans[-1][0], max(spans[-1][1], run.end_s)
        else:
            spans.append((run.begin_s, run.end_s))
    return spans


def busy_share(busy: Iterable[ProgramRun], begin_s: float, end_s: float) -> float:
    """The share of the interval in which any of `program_runs` ran.

    >>> busy_share([ProgramRun("a", 0, 0.0, 2.0), ProgramRun("b", 0, 1.0, 3.0)], 0.0, 4.0)
    0.75
    """
    covered = sum(
        max(0.0, min(last, end_s) - max(first, begin_s)) for first, last in busy_spans(busy, 0.0)
    )
    return covered / (end_s - begin_s)


def save_timeline(workdir: str | os.PathLike[str], path: str) -> None:
    """Draws which kind of program each device ran when; PNG, SVG or PDF by the suffix of `path`.

    Raises NoTraceError as `read_traces` does.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    traces = read_traces(workdir)
    if not any(trace.program_runs for trace in traces):
        raise NoTraceError(f"{workdir}: its trace contains no program; record later steps")
    begin = min(run.begin_s for trace in traces for run in trace.program_runs)
    end = max(run.end_s for trace in traces for run in trace.program_runs)
    rows = [
        (f"process {process}, device {device}" if len(traces) > 1 else f"device {device}", runs)
        for process, trace in enumerate(traces)
        for device, runs in enumerate(_by_device(trace.program_runs))
    ]
    figure = Figure(figsize=(11.0, 1.1 + 0.45 * len(rows)), layout="constrained")
    axes = figure.subplots()
    kinds = {program_kind(run.program) for _, runs in rows for run in runs}
    min_gap_s = (end - begin) / 2000  # less than a pixel
    for row, (_, runs) in enumerate(rows):
        for name, (colour, _) in PROGRAM_KINDS.items():
            runs_of_kind = [run for run in runs if program_kind(run.program) == name]
            spans = [
                (first - begin, last - first) for first, last in busy_spans(runs_of_kind, min_gap_s)
            ]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=colour, linewidth=0)
    for time_s in traces[0].reshard_times_s:
        axes.axvline(time_s - begin, color="black", linewidth=0.7, linestyle=":")
    labels = [f"{name}, {busy_share(runs, begin, end):.0%} at work" for name, runs in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0.0, end - begin)
    axes.set_xlabel("seconds; dotted: new weights for sampling", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    legend = [
        Patch(color=colour, label=name)
        for name, (colour, _) in PROGRAM_KINDS.items()
        if name in kinds
    ]
    figure.legend(
        handles=legend,
        loc="outside upper center",
        ncols=len(PROGRAM_KINDS),
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=120)


def _by_device(busy: Sequence[ProgramRun]) -> list[list[ProgramRun]]:
    """The programs that each device of a process ran, ordered by device number."""
    runs_of_device: dict[int, list[ProgramRun]] = {}
    for run in busy:
        runs_of_device.setdefault(run.device, []).append(run)
    return [runs_of_device[device] for device in sorted(runs_of_device)]
