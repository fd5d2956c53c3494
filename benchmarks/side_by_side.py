"""Runs several programs on the same workload, in turns, and compares their reports.

Each program is a separate process that prints one JSON object per line. The last line is its
report. Programs alternate (A B C, A B C, ...), so that changes in the speed of the machine affect
all of them. Peers are scripts in the folder `--peers`. The Python interpreters of virtual
environments under `PEER_HOME` run them.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

Command = Sequence[str | os.PathLike[str]]
Report = Mapping[str, object]

HOME = pathlib.Path(os.environ.get("PEER_HOME", pathlib.Path.home() / ".cache" / "jaxrl_llm_peers"))
PYTHONS = {"torch": HOME / "venv-torch" / "bin" / "python"}
PYTHONS["tunix"] = HOME / "venv-tunix" / "bin" / "python"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every comparison."""
    parser.add_argument("--models", nargs="+", default=["M1", "M2"], help="names, or folders")
    parser.add_argument("--systems", nargs="+", help="programs to run; default: all")
    parser.add_argument("--peers", default="", help="folder of the peers' scripts")
    parser.add_argument(
        "--microbatch-tokens",
        type=int,
        default=1024,
        help="ours: maximum tokens of a microbatch; the gradient is the same",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of every program")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: every program on one core, timed by its CPU seconds; for busy machines",
    )


def model_folder(name: str) -> pathlib.Path:
    """Returns the folder of a model: itself, or one that the peers' `make_models.py` wrote."""
    folder = pathlib.Path(name)
    return folder if folder.is_dir() else HOME / "models" / name


@contextlib.contextmanager
def own_tokenizer(model: pathlib.Path) -> Iterator[str]:
    """Yields a folder with only the tokenizer; the family of a model folder would add tokens."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (model / name).exists():
                shutil.copy(model / name, folder)
        yield folder


def clock(kind: str) -> Callable[[], float]:
    """Returns the function that measures seconds: wall clock, or CPU time of this process."""
    return time.process_time if kind == "cpu" else time.perf_counter


def since_process_start() -> float:
    """Returns seconds since the kernel started this process, including interpreter and imports."""
    start = int(pathlib.Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(pathlib.Path("/proc/uptime").read_text().split()[0])
    return uptime - start / os.sysconf("SC_CLK_TCK")


def peak_memory_mb() -> float:
    """Returns the peak resident memory of this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def emit(report: Report) -> None:
    """Prints a report as one JSON line with rounded floats."""
    rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in report.items()}
    print(json.dumps(rounded), flush=True)


def alternate(
    programs: Mapping[str, Command], rounds: int, clock: str
) -> dict[str, list[dict[str, object]]]:
    """Returns the reports of every program, one per round.

    Args:
      programs: Command line of each, by name; the first comes first in every round.
      rounds: How often each runs.
      clock: "wall", or "cpu" for one core and CPU seconds.
    """
    reports: dict[str, list[dict[str, object]]] = collections.defaultdict(list)
    for _ in range(rounds):
        for name, command in programs.items():
            reports[name].append(_run(name, command, clock))
            emit({"system": name, **reports[name][-1]})
    return reports


def _run(name: str, command: Command, clock: str) -> dict[str, object]:
    one_core = ["taskset", "-c", "0"] if clock == "cpu" else []
    done = subprocess.run(
        [*one_core, *map(str, command)],
        env=os.environ | ({"PEER_CLOCK": "cpu"} if clock == "cpu" else {}),
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(f"{name} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def medians(reports: Sequence[Report], names: Sequence[str]) -> dict[str, float]:
    """Returns the median of each number over the reports."""
    return {
        name: statistics.median(float(r[name]) for r in reports)  # type: ignore[arg-type]
        for name in names
        if all(name in report for report in reports)
    }


def print_table(
    title: str,
    reports: Mapping[str, Sequence[Report]],
    names: Sequence[str],
    compared: str,
) -> None:
    """Prints the medians of every program, and the ratio of `compared` to the first program."""
    found = {system: medians(rows, names) for system, rows in reports.items()}
    ours = next(iter(found.values()))[compared]
    print(f"\n{title}\n| system | {' | '.join(names)} | {compared}, ours / theirs |")
    print("|---" * (len(names) + 2) + "|")
    for system, numbers in found.items():
        cells = [f"{numbers[name]:.4g}" if name in numbers else "" for name in names]
        ratio = f"{ours / numbers[compared]:.2f}"
        print(f"| {system} | {' | '.join(cells)} | {ratio} |", flush=True)
