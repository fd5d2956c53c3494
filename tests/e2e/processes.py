"""Several processes of one run on this machine, which meet at a free port."""

import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import quick_compiler

ROOT = pathlib.Path(__file__).parents[2]


def start(
    command: Sequence[Any],
    count: int,
    devices: int,
    cache: Any,
    changes: Mapping[int, Sequence[str]] = {},
) -> list[subprocess.Popen]:
    """Starts `python COMMAND...` in `count` processes of `devices` fake CPU devices each.

    Args:
      command: Program and arguments.
      count: Of processes; a single one is told nothing of others.
      devices: Of each process.
      cache: Keeps compiled programs.
      changes: Arguments that only some of the processes get.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = quick_compiler.environment(devices, cache, [ROOT, ROOT / "tests"])
    if count > 1:
        environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command), *changes.get(process, ())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**environment, **({"JAX_PROCESS_ID": str(process)} if count > 1 else {})},
        )
        for process in range(count)
    ]


def finish(processes: Sequence[subprocess.Popen], timeout_s: float = 480.0) -> list[str]:
    """Returns what each process said on standard error; ends all if one is too slow."""
    try:
        return [process.communicate(timeout=timeout_s)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()


def run(command: Sequence[Any], count: int, devices: int, cache: Any) -> list[str]:
    """Runs the processes to their end, which must be a good one; returns what each said."""
    processes = start(command, count, devices, cache)
    said = finish(processes)
    codes = [process.returncode for process in processes]
    assert codes == [0] * count, f"{codes}\n" + "\n\n".join(text[-3000:] for text in said)
    return said
