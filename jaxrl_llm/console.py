"""Console output: progress of long operations, the steps of a run, and the log.

On a terminal: progress bars at the bottom, removed when done, with the log above them. Elsewhere:
log lines, for long operations only.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jax import monitoring
from rich import box, progress
from rich import console as rich_console
from rich import table as rich_table

MIN_SHOWN_S = 2.0  # shorter operations are not shown
MAX_LINE_INTERVAL_S = 60.0
_REFRESH_S = 0.2

# JAX monitoring events of a compilation with a cache, in order.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_CACHE_REQUESTED = "/jax/compilation_cache/compile_requests_use_cache"
_COMPILED = "/jax/core/compile/backend_compile_duration"

_EVALUATION_PREFIXES = ("val-core/", "val/")  # of sampled answers; of supervised rows
_SPEED_STEPS = 20  # window of the remaining-time estimate
_WIDTH = 100  # without a terminal
# Label, metric, format.
_LINE_METRICS = (
    *(("loss", f"{job}/loss", "{:.4g}") for job in ("sft", "dpo", "reward_model")),
    ("reward", "critic/score/mean", "{:.4g}"),
    ("length", "response_length/mean", "{:.4g}"),
    ("kl", "actor/ppo_kl", "{:.3g}"),
    ("entropy", "actor/entropy", "{:.3g}"),
    ("", "timing_s/step", "{:.3g} s"),
    ("", "tokens/s", "{:.0f} tokens/s"),
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Operation:
    """An operation in progress."""

    description: str  # for example "reading rows"
    total: int = 0  # steps; 0: unknown
    note: str = ""  # text behind the bar
    done: int = 0
    start_time: float = dataclasses.field(default_factory=time.monotonic)
    next_line_s: float = MIN_SHOWN_S  # seconds after its begin
    bar: progress.TaskID | None = None


class ProgressDisplay:
    """Shows all operations in progress; one per process, `DISPLAY`."""

    def __init__(self) -> None:
        self._active: list[Operation] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._bars: progress.Progress | None = None  # while one is visible
        self.silent = False  # true in all but the first process of a run

    def is_terminal(self) -> bool:
        """Whether stdout and stderr are both terminals."""
        return sys.stderr.isatty() and sys.stdout.isatty()

    def begin(self, work: Operation) -> None:
        with self._lock:
            self._active.append(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._refresh_loop, name="screen", daemon=True
                )
                self._thread.start()

    def end(self, work: Operation) -> None:
        """Removes an operation; if it was shown, logs how long it took."""
        with self._lock:
            if work not in self._active:
                return
            self._active.remove(work)
            if self._bars and work.bar is not None:
                self._bars.remove_task(work.bar)
                if not self._bars.tasks:
                    self._stop_bars()
        if work.description and (work.bar is not None or work.next_line_s > MIN_SHOWN_S):
            logger.info(
                "%s: done in %s",
                work.description,
                format_duration(time.monotonic() - work.start_time),
            )

    def close(self) -> None:
        """Removes all bars, before the process exits."""
        with self._lock:
            self._active.clear()
            self._stop_bars()

    def _stop_bars(self) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None

    def _refresh_loop(self) -> None:
        while True:
            with self._lock:
                lines = [] if self.silent else [self._update_bar(work) for work in self._active]
            for line in filter(None, lines):
                logger.info("%s", line)
            time.sleep(_REFRESH_S)

    def _update_bar(self, work: Operation) -> str:
        """Updates the bar of an operation; returns the line to log, if one is due."""
        seconds = time.monotonic() - work.start_time
        facts = [f"{100 * work.done / work.total:.0f} %"] if work.total else []
        if self.is_terminal():
            if seconds < MIN_SHOWN_S and work.description:
                return ""
            if self._bars is None:
                self._bars = progress.Progress(
                    progress.TextColumn("{task.description}"),
                    progress.BarColumn(bar_width=24),
                    progress.TextColumn("{task.fields[note]}"),
                    console=rich_console.Console(stderr=True),
                    refresh_per_second=4,
                    transient=True,
                )
                self._bars.start()
                # Keep the cursor: the process may be killed before it could restore it.
                self._bars.console.show_cursor(True)
            if work.bar is None:
                work.bar = self._bars.add_task(work.description, total=work.total or None, note="")
            note = work.note or " ".join([*facts, format_duration(seconds)])
            self._bars.update(work.bar, completed=work.done, note=note)
            return ""
        if not work.description or seconds < work.next_line_s:
            return ""
        first = work.next_line_s == MIN_SHOWN_S
        work.next_line_s = seconds + min(max(2 * seconds, 4 * MIN_SHOWN_S), MAX_LINE_INTERVAL_S)
        if first and not facts:
            return f"{work.description} ..."
        return f"{work.description}: {', '.join([*facts, format_duration(seconds)])}"


DISPLAY = ProgressDisplay()


@contextlib.contextmanager
def show_progress(what: str, total: int = 0) -> Iterator[Callable[[int], None]]:
    """Shows progress of a block; yields a function that advances it by a number of steps."""
    operation = Operation(what, total)

    def advance(steps: int) -> None:
        operation.done += steps

    DISPLAY.begin(operation)
    try:
        yield advance
    finally:
        DISPLAY.end(operation)


def track(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yields the items with a progress display, as `show_progress` does."""
    with show_progress(what, len(items)) as advance:
        for item in items:
            yield item
            advance(1)


def format_duration(seconds: float) -> str:
    """A time in seconds as text.

    >>> format_duration(3.21), format_duration(75), format_duration(7384)
    ('3.2 s', '1 min 15 s', '2 h 03 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@functools.cache
def show_compilations() -> None:
    """Shows progress of every compilation from now on; needs a compilation cache."""
    thread_state = threading.local()

    def on_event(event: str, **_: Any) -> None:
        if event == _CACHE_REQUESTED:
            DISPLAY.end(getattr(thread_state, "work", Operation("")))  # one that failed
            name = re.sub(r"^jit\(_*|\)$", "", getattr(thread_state, "name", "a program"))
            thread_state.work = Operation(f"compiling {name.replace('_', ' ')}")
            DISPLAY.begin(thread_state.work)

    def on_duration(event: str, duration_secs: float, **details: Any) -> None:
        del duration_secs
        if event == _LOWERED:
            thread_state.name = str(details.get("fun_name", "a program"))
        elif event == _COMPILED:
            DISPLAY.end(getattr(thread_state, "work", Operation("")))

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)


class LogHandler(logging.StreamHandler):
    """Writes log lines to the current `sys.stderr`: time, level from warning on, text."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{when} {level}{super().format(record)}"


class StepProgress:
    """Shows the metrics of each step: on a terminal in a bar, elsewhere as lines."""

    def __init__(self, first_step: int, total_steps: int):
        self._total = total_steps
        self._terminal = DISPLAY.is_terminal()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_SPEED_STEPS)
        self._bar = Operation("", total_steps, "waits for its first step", max(0, first_step - 1))
        DISPLAY.begin(self._bar)

    def show(self, step: int, data: Mapping[str, float]) -> None:
        """Shows the metrics of one step; an evaluation gets its own line."""
        if line := format_step(data):
            if "timing_s/step" in data:
                self._seconds.append(data["timing_s/step"])
            if left := max(0, self._total - step) * statistics.median_low(self._seconds or [0.0]):
                line += f"  {format_duration(left)} left"
            self._bar.done = step
            self._bar.note = f"step {step}/{self._total}  {line}"
            if not self._terminal:
                print(self._bar.note, flush=True)
        sources: dict[str, list[str]] = collections.defaultdict(list)
        for name, value in _evaluation_results(data).items():
            source, _, kind = name.rpartition("/")
            sources[source].append(f"{kind} {value:.4g}")
        if sources:
            results = "; ".join(f"{source} {', '.join(parts)}" for source, parts in sources.items())
            print(f"step {step}/{self._total}  evaluation: {results}", flush=True)

    def close(self) -> None:
        """Removes the bar; the line of the last step stays."""
        DISPLAY.end(self._bar)
        if self._terminal and self._bar.done:
            print(self._bar.note, flush=True)


def format_step(data: Mapping[str, float]) -> str:
    """The most important metrics of a step on one line.

    >>> format_step({"critic/score/mean": 0.5, "timing_s/step": 2.0, "perf/total_num_tokens": 300})
    'reward 0.5  2 s  150 tokens/s'
    """
    if {"perf/total_num_tokens", "timing_s/step"} <= data.keys():
        data = {**data, "tokens/s": data["perf/total_num_tokens"] / data["timing_s/step"]}
    return "  ".join(
        f"{label} {form.format(round(data[name], 4) + 0.0)}".strip()  # no "-0", no "1e-08"
        for label, name, form in _LINE_METRICS
        if name in data
    )


def _evaluation_results(data: Mapping[str, float | None]) -> dict[str, float]:
    """Evaluation results by name; null, as the file writes NaN, becomes NaN."""
    values = {k.partition("/")[2]: v for k, v in data.items() if k.startswith(_EVALUATION_PREFIXES)}
    return {name: float("nan" if value is None else value) for name, value in values.items()}


def print_summary(
    metrics: bytes,
    seconds: float,
    files: Sequence[tuple[str, pathlib.Path]],
    reason: str = "",
) -> None:
    """Prints the result of a run: first and last evaluation, time since this start, its files.

    `metrics` is the content of its `metrics.jsonl`; `reason` says why it ended before its last
    step, if it did.
    """
    steps = []
    for line in metrics.split(b"\n") if metrics else ():
        # Skip lines that are no records: the writer has warned about them.
        with contextlib.suppress(
            ValueError, TypeError, LookupError, AttributeError, RecursionError
        ):
            record = json.loads(line.decode())
            steps.append((record["step"], _evaluation_results(record["data"])))
    evaluations = [(step, results) for step, results in steps if results]
    first_and_last = evaluations[:1] + evaluations[1:][-1:]
    table = rich_table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", overflow="fold")
    for step, _ in first_and_last:
        table.add_column(f"step {step}", justify="right", overflow="fold")
    for name in evaluations[-1][1] if evaluations else ():
        values = (results.get(name, float("nan")) for _, results in first_and_last)
        table.add_row(name, *(f"{value:.4g}" for value in values))
    width = None if DISPLAY.is_terminal() else _WIDTH
    console = rich_console.Console(highlight=False, width=width, soft_wrap=True)
    console.print(f"done in {format_duration(seconds)}")
    if reason:
        console.print(f"ended: {reason}", markup=False)
    if evaluations:
        console.print(table)
    for what, path in files:
        console.print(f"{what:<12}{path}", markup=False)
