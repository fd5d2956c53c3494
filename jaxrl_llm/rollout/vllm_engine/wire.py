"""The messages between a run and the process that runs vLLM.

JSON frames over a socket; weights are raw bytes. Imported by both sides: standard library only.
Nothing that arrives is unpickled.
"""

import json
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

# Raised with every change of the messages, so that a worker of another release is refused.
PROTOCOL = 1
CHUNK_BYTES = 1 << 26  # of weights that are sent over a socket
MAX_MESSAGE_BYTES = 1 << 30
# The shared secret of a worker on another host, in the environment of both sides.
KEY_VARIABLE = "JAXRL_LLM_VLLM_KEY"


class WorkerError(Exception):
    """The worker could not serve a request; the message is meant for the user."""


def send(connection: Connection, message: Mapping[str, Any]) -> None:
    """Sends a message of JSON values; raises OSError if the other side is gone."""
    connection.send_bytes(json.dumps(message, separators=(",", ":")).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Receives a message.

    Raises:
      EOFError, OSError: If the other side is gone.
      ValueError: If it is not a message.
    """
    message = json.loads(connection.recv_bytes(MAX_MESSAGE_BYTES))
    if not isinstance(message, dict):
        raise ValueError(f"a message of type {type(message).__name__}; it must be an object")
    return message
