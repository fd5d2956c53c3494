"""What a program shows: its long work while it goes on, the steps of a run, and the log.

On a terminal: bars at the bottom, removed when the work is done, with the log above them.
Elsewhere: lines, for long work only.
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

PATIENCE_S = 2.0  # shorter work is not shown
LONGEST_SILENCE_S = 60.0
_LOOK_S = 0.2

# JAX's events of a compilation with a cache, in their order.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_BEGUN = "/jax/compilation_cache/compile_requests_use_cache"
_COMPILED = "/jax/core/compile/backend_compile_duration"

_EVALUATION = ("val-core/", "val/")  # of sampled answers; of given ones
_SPEED_STEPS = 20  # that the time left is reckoned from
_WIDTH = 100  # where there is no terminal
# Label, metric, format.
_SHOWN = (
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
class Work:
    """Something that is going on."""

    what: str  # as "reading rows"
    total: int = 0  # steps; 0: not known
    note: str = ""  # stands behind the bar
    done: int = 0
    begin: float = dataclasses.field(default_factory=time.monotonic)
    next_line: float = PATIENCE_S  # seconds from its begin
    bar: progress.TaskID | None = None


class Screen:
    """Shows all work that goes on; one in each process, `SCREEN`."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._bars: progress.Progress | None = None  # while one is visible
        self.silent = False  # true in all processes of a run but the first

    def is_terminal(self) -> bool:
        """Returns whether both outputs are a terminal."""
        return sys.stderr.isatty() and sys.stdout.isatty()

    def begin(self, work: Work) -> None:
        with self._lock:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="screen", daemon=True)
                self._thread.start()

    def end(self, work: Work) -> None:
        """Removes a work; if it was shown, logs how long it took."""
        with self._lock:
            if work not in self._works:
                return
            self._works.remove(work)
            if self._bars and work.bar is not None:
                self._bars.remove_task(work.bar)
                if not self._bars.tasks:
                    self._stop_bars()
        if work.what and (work.bar is not None or work.next_line > PATIENCE_S):
            logger.info("%s: done in %s", work.what, duration(time.monotonic() - work.begin))

    def close(self) -> None:
        """Removes all, before the process ends."""
        with self._lock:
            self._works.clear()
            self._stop_bars()

    def _stop_bars(self) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None

    def _watch(self) -> None:
        while True:
            with self._lock:
                lines = [] if self.silent else [self._shown(work) for work in self._works]
            for line in filter(None, lines):
                logger.info("%s", line)
            time.sleep(_LOOK_S)

    def _shown(self, work: Work) -> str:
        """Updates a work's bar; returns the line to log, if it is time for one."""
        seconds = time.monotonic() - work.begin
        facts = [f"{100 * work.done / work.total:.0f} %"] if work.total else []
        if self.is_terminal():
            if seconds < PATIENCE_S and work.what:
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
                self._bars.console.show_cursor(True)  # the process may end without a word
            if work.bar is None:
                work.bar = self._bars.add_task(work.what, total=work.total or None, note="")
            note = work.note or " ".join([*facts, duration(seconds)])
            self._bars.update(work.bar, completed=work.done, note=note)
            return ""
        if not work.what or seconds < work.next_line:
            return ""
        first = work.next_line == PATIENCE_S
        work.next_line = seconds + min(max(2 * seconds, 4 * PATIENCE_S), LONGEST_SILENCE_S)
        if first and not facts:
            return f"{work.what} ..."
        return f"{work.what}: {', '.join([*facts, duration(seconds)])}"


SCREEN = Screen()


@contextlib.contextmanager
def work(what: str, total: int = 0) -> Iterator[Callable[[int], None]]:
    """Shows long work; yields a function for the number of steps done since its last call."""
    mine = Work(what, total)

    def advance(steps: int) -> None:
        mine.done += steps

    SCREEN.begin(mine)
    try:
        yield advance
    finally:
        SCREEN.end(mine)


def each(what: str, items: Sequence[T]) -> Iterator[T]:
    """Yields the items; shows how many are done, as `work` does."""
    with work(what, len(items)) as advance:
        for item in items:
            yield item
            advance(1)


def duration(seconds: float) -> str:
    """Returns a time as text.

    >>> duration(3.21), duration(75), duration(7384)
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
    """Shows every compilation from now on, if there is a compilation cache."""
    here = threading.local()

    def on_event(event: str, **_: Any) -> None:
        if event == _BEGUN:
            SCREEN.end(getattr(here, "work", Work("")))  # one that failed
            name = re.sub(r"^jit\(_*|\)$", "", getattr(here, "name", "a program"))
            here.work = Work(f"compiling {name.replace('_', ' ')}")
            SCREEN.begin(here.work)

    def on_duration(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        if event == _LOWERED:
            here.name = str(about.get("fun_name", "a program"))
        elif event == _COMPILED:
            SCREEN.end(getattr(here, "work", Work("")))

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)


class LogHandler(logging.StreamHandler):
    """Writes the log to what stderr is at that time: time, level from warning on, text."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{when} {level}{super().format(record)}"


class StepLines:
    """Shows the steps of a run as their numbers come: on a terminal in a bar, else as lines."""

    def __init__(self, first_step: int, total_steps: int):
        self._total = total_steps
        self._terminal = SCREEN.is_terminal()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_SPEED_STEPS)
        self._bar = Work("", total_steps, "waits for its first step", max(0, first_step - 1))
        SCREEN.begin(self._bar)

    def show(self, step: int, data: Mapping[str, float]) -> None:
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
        sources: dict[str, list[str]] = collections.defaultdict(list)
        for name, value in _results(data).items():
            source, _, kind = name.rpartition("/")
            sources[source].append(f"{kind} {value:.4g}")
        if sources:
            found = "; ".join(f"{source} {', '.join(parts)}" for source, parts in sources.items())
            print(f"step {step}/{self._total}  evaluation: {found}", flush=True)

    def close(self) -> None:
        """Takes the bar away; the line of the last step stays."""
        SCREEN.end(self._bar)
        if self._terminal and self._bar.done:
            print(self._bar.note, flush=True)


def step_line(data: Mapping[str, float]) -> str:
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


def _results(data: Mapping[str, float | None]) -> dict[str, float]:
    """Returns what an evaluation found, by name; NaN is null in the file."""
    found = {k.partition("/")[2]: v for k, v in data.items() if k.startswith(_EVALUATION)}
    return {name: float("nan" if value is None else value) for name, value in found.items()}


def closing(
    workdir: pathlib.Path, seconds: float, files: Sequence[tuple[str, pathlib.Path]]
) -> None:
    """Prints the result of a run: first and last evaluation, seconds of this start, its files."""
    path = workdir / "metrics.jsonl"
    of_steps = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        # Of lines that are no records the writer warned.
        with contextlib.suppress(
            ValueError, TypeError, LookupError, AttributeError, RecursionError
        ):
            record = json.loads(line.decode())
            of_steps.append((record["step"], _results(record["data"])))
    evaluations = [(step, results) for step, results in of_steps if results]
    first_and_last = evaluations[:1] + evaluations[1:][-1:]
    table = rich_table.Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", overflow="fold")
    for step, _ in first_and_last:
        table.add_column(f"step {step}", justify="right", overflow="fold")
    for name in evaluations[-1][1] if evaluations else ():
        values = (results.get(name, float("nan")) for _, results in first_and_last)
        table.add_row(name, *(f"{value:.4g}" for value in values))
    width = None if SCREEN.is_terminal() else _WIDTH
    console = rich_console.Console(highlight=False, width=width, soft_wrap=True)
    console.print(f"done in {duration(seconds)}")
    if evaluations:
        console.print(table)
    for what, path in files:
        console.print(f"{what:<12}{path}", markup=False)
