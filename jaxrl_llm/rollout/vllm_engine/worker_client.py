"""The run's side of a worker that runs vLLM: start, requests, weights, end."""

import os
import pathlib
import subprocess
import weakref
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Client, Connection
from typing import Any

import jax
from absl import logging

from jaxrl_llm import console
from jaxrl_llm.config.vllm import VllmConfig
from jaxrl_llm.errors import EXIT_FAILED, ConfigError, UserError
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.processes.child import ChildProcess
from jaxrl_llm.rollout.vllm_engine import wire, worker_launcher
from jaxrl_llm.rollout.vllm_engine.exported_weights import ExportedWeights

WORKER_SCRIPT = pathlib.Path(__file__).with_name("worker.py")
_PROBE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
_PROBE_TIMEOUT_S = 60.0
_MAX_LISTED = 4
_END_TIMEOUT_S = 5.0  # for a worker to end by itself, so that its exit code can be told
# Variables of the run's own interpreter and libraries, which would mislead another one.
_PRIVATE_VARIABLES = ("PYTHON", "VIRTUAL_ENV", "JAX_", "XLA_", "LIBTPU_")


class VllmError(UserError, RuntimeError):
    """vLLM cannot sample; the message says why and how to go on."""

    exit_code = EXIT_FAILED


class WorkerClient:
    """A worker process, started with the first request, and the weights that it holds."""

    def __init__(self, config: VllmConfig, start_message: Mapping[str, Any]):
        """
        Args:
          start_message: What the worker makes its backend of, except for the weights' memory.
        """
        self._config, self._start_message = config, start_message
        self._connection: Connection | None = None
        self._child: ChildProcess | None = None
        self._weights: ExportedWeights | None = None
        self._held: tuple[int, weakref.ref[Any]] | None = None  # version, an array of the weights
        self._is_asleep = False
        self._is_unverified = config.tensor_parallel_size == 1
        self._failure = ""  # why it has ended; it is not started again
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self.version = self.device = ""

    @property
    def is_running(self) -> bool:
        return self._connection is not None

    def call(self, message: Mapping[str, Any], chunks: Iterable[memoryview] = ()) -> dict[str, Any]:
        """Sends a request, and `chunks` of bytes after it; returns the reply.

        Raises:
          VllmError: If the worker has ended, does not answer in time, or reports an error.
        """
        connection, action = self._connection, message["do"]
        assert connection is not None, "started by `hand_over`"
        try:
            wire.send(connection, message)
            for chunk in chunks:
                connection.send_bytes(chunk)
            if not connection.poll(self._config.timeout_s):
                raise self._failed(
                    f"config.rollout.vllm.timeout_s: no answer to {action!r} within"
                    f" {self._config.timeout_s:g} s; raise it, or look at the output of the"
                    f" worker for the reason; {_RESUMES}"
                )
            reply = wire.receive(connection)
        except (EOFError, OSError, ValueError) as error:
            raise self._failed(self._end_text(action, error)) from error
        if "error" in reply:
            raise self._failed(
                f"config.rollout.engine: vLLM failed in {action!r}: {reply['error']}; {_RESUMES}"
            )
        return reply

    def hand_over(self, weights: ExportedWeights, params: Params, version: int) -> None:
        """Starts and wakes the worker if needed, and gives it the weights that it lacks."""
        if self._failure:
            raise VllmError(self._failure)
        if not self.is_running:
            self._start(weights)
        if self._is_asleep:
            self.call({"do": "wake_up"})
            self._is_asleep = False
        leaf = jax.tree.leaves(params)[0]
        if self._held and self._held[0] == version and self._held[1]() is leaf:
            return
        weights.write(params)
        size = wire.CHUNK_BYTES
        chunks: list[memoryview] = []
        if self._config.address:
            memory = weights.memory
            chunks = [memory[start : start + size] for start in range(0, len(memory), size)]
        message = {"do": "update_weights", "version": version, "streamed": bool(chunks)}
        self.call(message, chunks)
        self._held = version, weakref.ref(leaf)
        if self._is_unverified:
            self._is_unverified = False
            self._verify()

    def _verify(self) -> None:
        """Compares the weights once, since vLLM may read a model otherwise than the run does."""
        result = self.compare_weights()
        if result["differing"]:
            names = ", ".join(list(result["differing"])[:_MAX_LISTED])
            count = len(result["differing"])
            raise self._failed(
                f"config.rollout.engine: vLLM {self.version} computes with other weights than it"
                f" was given ({count} tensors differ: {names}); use another release of vLLM, or"
                " rollout.engine='jaxrl_llm'"
            )
        if result["skipped"]:
            names = ", ".join(result["skipped"][:_MAX_LISTED])
            logging.warning("vLLM: %d tensors could not be read back: %s", len(names), names)

    def compare_weights(self) -> dict[str, Any]:
        """Compares, in the worker, the weights in use with those of the last hand-over."""
        return self.call({"do": "compare_weights"})

    def sleep(self) -> None:
        """Frees vLLM's memory until the next hand-over, as `rollout.vllm.sleep_level` says."""
        level = self._config.sleep_level
        if not level or not self.is_running or self._is_asleep:
            return
        self.call({"do": "sleep"})
        self._is_asleep = True
        if level > 1:
            self._held = None

    def close(self) -> None:
        """Ends the worker; the next hand-over starts another one."""
        self._connection = self._child = self._held = None
        self._is_asleep = False
        if self._finalizer is not None:
            self._finalizer()

    def _start(self, weights: ExportedWeights) -> None:
        address = self._config.address
        where = f"at {address}" if address else f"in {self._config.python}"
        with console.show_progress(f"starting vLLM {where}"):
            if address:
                self._connection = self._connected()
                self._finalizer = weakref.finalize(self, self._connection.close)
            else:
                check_interpreter(self._config.python)
                self._child = ChildProcess(worker_launcher.__name__)
                self._connection = self._child.connection
                self._finalizer = weakref.finalize(self, self._child.end, 0.0)
                command = [self._config.python, str(WORKER_SCRIPT)]
                wire.send(
                    self._connection, {"command": command, "environment": _worker_environment()}
                )
            facts = self.call(
                {
                    "do": "start",
                    "protocol": wire.PROTOCOL,
                    "memory": "" if address else weights.path,
                    "num_bytes": weights.num_bytes,
                    "tensors": weights.table(),
                    **self._start_message,
                }
            )
        self.version, self.device = facts["version"], facts["device"]
        logging.info("vLLM %s %s: %s", facts["version"], where, facts["device"])

    def _connected(self) -> Connection:
        key = os.environ.get(wire.KEY_VARIABLE, "")
        if not key:
            raise VllmError(
                f"config.rollout.vllm.address: {wire.KEY_VARIABLE} is not set in the environment;"
                " set it to the secret that the worker was started with"
            )
        try:
            return Client(self._config.host_and_port, "AF_INET", authkey=key.encode())
        except Exception as error:  # refused, unknown host, another secret
            raise VllmError(
                f"config.rollout.vllm.address: no worker answers at {self._config.address}"
                f" ({type(error).__name__}: {error}); start it there as docs/vllm.md shows"
            ) from error

    def _failed(self, message: str) -> VllmError:
        """Ends the worker for good; the error to raise."""
        self._failure = message
        self.close()
        return VllmError(message)

    def _end_text(self, action: str, error: Exception) -> str:
        """The message for a connection that broke, which says how the worker ended."""
        child = self._child
        if isinstance(error, ValueError):
            text = f"sent something else than a message ({error})"
        elif child is not None:
            text = f"ended with {child.end(_END_TIMEOUT_S)}"
        else:
            text = f"at {self._config.address} closed the connection"
        return (
            f"config.rollout.engine: the vLLM worker {text} in {action!r}; its output above may say"
            f" why (SIGKILL: often the machine's memory); {_RESUMES}"
        )


_RESUMES = "the same command resumes the run from its last checkpoint"


def check_interpreter(python: str) -> None:
    """Raises a ConfigError if an interpreter cannot import vLLM; takes a tenth of a second."""
    where = f"config.rollout.vllm.python: {python!r}"
    try:
        result = subprocess.run(
            [python, "-c", _PROBE],
            env=_worker_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{where} cannot be started ({error}); name the Python interpreter of the environment"
            " in which vLLM is installed, such as /opt/vllm/bin/python"
        ) from error
    if result.returncode:
        raise ConfigError(
            f"{where} has no package vllm; install it there (docs/vllm.md), or name the interpreter"
            " of another environment"
        )


def _worker_environment() -> dict[str, str]:
    """The environment of this process without what concerns its own interpreter."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE_VARIABLES)
    }
