"""The worker's side of the protocol: serves one run at a time with a `SamplingBackend`.

Every message gets one reply. In between the backend decodes: only while a `step` waits for its
reply, or, if the run asked for it (`continuous`), whenever requests are unfinished.
"""

import mmap
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.rollout.vllm_engine import wire
from jaxrl_llm.rollout.vllm_engine.wire import WorkerError

Message = dict[str, Any]


class SampledTokens(NamedTuple):
    """Tokens that one decode step added to a sample."""

    sample: int  # its number in the run
    tokens: Sequence[int]
    log_probs: Sequence[float]
    top_log_probs: Sequence[Sequence[tuple[int, float]]]  # empty if not requested
    finish_reason: str  # "": it goes on; "stop", "length"


class SamplingBackend(Protocol):
    """The engine inside the worker: vLLM, or a stand-in of the tests."""

    def describe(self) -> Message:
        """Facts for the log of the run; `version` and `device` at least."""
        ...

    def add(self, sample: int, settings: Message, version: int, /) -> None:
        """Queues a sample; `version` is that of the weights, which keys its cached prefix."""
        ...

    def abort(self, samples: Sequence[int], /) -> None:
        """Ends samples; unknown ones are ignored."""
        ...

    def has_unfinished(self) -> bool: ...

    def step(self) -> list[SampledTokens]:
        """Decodes one step."""
        ...

    def update_weights(self) -> None:
        """Loads all weights from the shared memory, where the start message says."""
        ...

    def compare_weights(self) -> Message:
        """Compares the weights in use with that memory: `num_compared`, `differing`, `skipped`."""
        ...

    def sleep(self) -> None:
        """Frees the memory of weights and KV cache, as the start message says."""
        ...

    def wake_up(self) -> None: ...


class WorkerLoop:
    """Serves the requests of one connection."""

    def __init__(self, connection: Connection, make_backend: Callable[[Message], SamplingBackend]):
        self._connection, self._make_backend = connection, make_backend
        self._backend: SamplingBackend | None = None
        self._memory: memoryview = memoryview(b"")  # for weights that come over the connection
        self._version = -1  # of the weights; -1: none yet
        self._continuous = self._asleep = False
        # Tokens since the last reply, by sample.
        self._progress: dict[int, list[Any]] = {}
        self._steps = self._slot_steps = 0
        self._decode_s = 0.0
        self._failure = ""  # of a step that nobody waited for; reported with the next reply
        self._handlers: Mapping[str, Callable[[Message], Message]] = {
            "start": self._start,
            "step": self._step,
            "abort": self._abort,
            "update_weights": self._update_weights,
            "compare_weights": self._compare_weights,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }

    def serve(self) -> None:
        """Serves until the run closes the connection."""
        while True:
            self._decode_until_asked()
            try:
                message = wire.receive(self._connection)
                reply = {"error": self._failure} if self._failure else self._answer(message)
                wire.send(self._connection, reply)
            except (EOFError, OSError):
                return

    def _decode_until_asked(self) -> None:
        while not self._failure and self._decodes_on and not self._connection.poll(0):
            try:
                self._decode()
            except Exception as error:  # whatever the backend raises
                self._failure = _report(error)

    def _answer(self, message: Message) -> Message:
        try:
            return self._handlers[message["do"]](message)
        except WorkerError as error:
            return {"error": str(error)}
        except Exception as error:  # whatever the backend raises, for the user to read
            return {"error": _report(error)}

    @property
    def _started_backend(self) -> SamplingBackend:
        if self._backend is None:
            raise WorkerError("the first message must be 'start'")
        return self._backend

    @property
    def _decodes_on(self) -> bool:
        """Whether it decodes without being asked."""
        if not self._continuous or self._asleep or self._version < 0 or self._backend is None:
            return False
        return self._backend.has_unfinished()

    def _start(self, message: Message) -> Message:
        if message["protocol"] != wire.PROTOCOL:
            raise WorkerError(
                f"this worker speaks protocol {wire.PROTOCOL}, the run {message['protocol']}; use"
                " the same release of jaxrl_llm on both sides"
            )
        start = time.monotonic()
        size = message["num_bytes"]
        if not message["memory"]:  # weights come over the connection
            self._file_descriptor = os.memfd_create("jaxrl_llm_weights")
            os.ftruncate(self._file_descriptor, size)
            self._memory = memoryview(mmap.mmap(self._file_descriptor, size))
            message["memory"] = f"/proc/{os.getpid()}/fd/{self._file_descriptor}"
        self._backend = self._make_backend(message)
        self._continuous = message["continuous"]
        return {**self._backend.describe(), "seconds": time.monotonic() - start}

    def _step(self, message: Message) -> Message:
        backend = self._started_backend
        if self._version < 0:
            raise WorkerError("no weights yet")
        if message["abort"]:
            backend.abort(message["abort"])
            for sample in message["abort"]:
                self._progress.pop(sample, None)
        for sample, settings in message["submit"]:
            backend.add(sample, settings, self._version)
        num_steps = self._steps + message["num_steps"]
        if self._continuous:
            # What has come since the last reply is enough.
            num_steps = self._steps + (not self._progress)
        while self._steps < num_steps and backend.has_unfinished():
            self._decode()
        return self._flushed_progress()

    def _abort(self, message: Message) -> Message:
        """Aborts samples; the reply has their last tokens."""
        self._started_backend.abort(message["samples"])
        return self._flushed_progress()

    def _update_weights(self, message: Message) -> Message:
        backend, start = self._started_backend, time.monotonic()
        if message["streamed"]:
            position = 0
            while position < len(self._memory):
                chunk = self._connection.recv_bytes(wire.CHUNK_BYTES)
                self._memory[position : position + len(chunk)] = chunk
                position += len(chunk)
        backend.update_weights()
        self._version = message["version"]
        return {"seconds": time.monotonic() - start}

    def _compare_weights(self, message: Message) -> Message:
        del message
        return self._started_backend.compare_weights()

    def _sleep(self, message: Message) -> Message:
        del message
        if not self._asleep:
            self._started_backend.sleep()
        self._asleep = True
        return {}

    def _wake_up(self, message: Message) -> Message:
        del message
        if self._asleep:
            self._started_backend.wake_up()
        self._asleep = False
        return {}

    def _decode(self) -> None:
        """Decodes one step and keeps its tokens for the next reply."""
        start = time.monotonic()
        for sampled in self._started_backend.step():
            entry = self._progress.setdefault(sampled.sample, [[], [], [], [], ""])
            entry[0] += sampled.tokens
            entry[1] += sampled.log_probs
            entry[2] += [self._version] * len(sampled.tokens)
            entry[3] += sampled.top_log_probs
            entry[4] = sampled.finish_reason
            self._slot_steps += 1
        self._steps += 1
        self._decode_s += time.monotonic() - start

    def _flushed_progress(self) -> Message:
        progress, self._progress = self._progress, {}
        counts = {
            "decode_steps": self._steps,
            "slot_steps": self._slot_steps,
            "decode_s": self._decode_s,
        }
        self._steps, self._slot_steps, self._decode_s = 0, 0, 0.0
        return {"progress": [[sample, *entry] for sample, entry in progress.items()], **counts}


def _report(error: Exception) -> str:
    """Prints the trace of an error; returns its text."""
    traceback.print_exc()
    return f"{type(error).__name__}: {error}"
