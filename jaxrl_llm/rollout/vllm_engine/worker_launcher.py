"""Becomes the worker: the step from the supervisor's fork to another interpreter.

`processes/supervisor.py` runs `main` in a fork of its own; when the worker or the run ends, the
supervisor kills all descendants, also those that vLLM starts.
"""

import os
from multiprocessing.connection import Connection

from jaxrl_llm.rollout.vllm_engine import wire


def main(connection_fd: int) -> None:
    """Replaces this process by the command of the first message; the connection stays open."""
    connection = Connection(os.dup(connection_fd))
    with connection:
        message = wire.receive(connection)
    os.set_inheritable(connection_fd, True)
    command = [*message["command"], f"--fd={connection_fd}"]
    os.execvpe(command[0], command, message["environment"])
