"""Runs a training job and starts it again whenever it fails."""

import sys

from jaxrl_llm.commands.options import RunOptions
from jaxrl_llm.processes.job_supervisor import JobSupervisor, Limits

_PROGRAM = "from jaxrl_llm.commands import command_line; command_line.main()"


def main(options: RunOptions) -> None:
    limits = Limits(options.failures, options.pause_s, options.hang_s)
    command = [sys.executable, "-c", _PROGRAM, *options.job]
    sys.exit(JobSupervisor(command, options.processes, limits).run())
