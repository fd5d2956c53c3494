"""Progress of a run, reported to the process that supervises it, if any.

The file that `JAXRL_LLM_PROGRESS` names holds the number of completed steps. It is written again
whenever a part of a step is done, so its time shows that the run is not stuck.
"""

import os
import pathlib

VARIABLE = "JAXRL_LLM_PROGRESS"


def report(step: int) -> None:
    """Reports that this process lives and has completed `step` steps."""
    if path := os.environ.get(VARIABLE):
        report_file = pathlib.Path(f"{path}.tmp")
        report_file.write_text(f"{step}\n")
        report_file.replace(path)  # a process that is killed here leaves its last report


def read(path: pathlib.Path) -> tuple[int, float]:
    """(completed steps, time of the report) of a process; (0, 0.0) before its first report."""
    try:
        return int(path.read_text()), path.stat().st_mtime
    except FileNotFoundError:
        return 0, 0.0
