"""The processes of a run: they join, share values, watch each other, and leave.

If a process dies, the others wait in a collective that never ends. So each writes a sign of life
every few seconds. If one is silent, or says why it stopped, the others end with a message.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding.cluster import ALL_DEVICES, ClusterError, Start

Json = Any  # numbers, texts, booleans, None; lists of them, dicts of them by text

PERIOD_S = 3.0  # between two signs of life
SILENCE_S = 30.0  # without one: the process is dead, or its host, or the network
JOIN_TIMEOUT_S = 300
EXIT_CODE = 1
_LEFT = "left"
_STOPPED = "stopped: "
_SMALLEST_SHARE = 4096  # bytes; shares are padded to powers of two: every size is compiled

_watch: "Watch | None" = None


class HostError(UserError, RuntimeError):
    """Another process of the run cannot go on; the message comes from it."""


def is_first() -> bool:
    """Returns whether this is process 0, the one that writes what is written once."""
    return jax.process_index() == 0


def join(start: Start) -> None:
    """Connects this process to the others; to be called before the first use of a device.

    Raises:
      ClusterError: If they do not all come.
    """
    global _watch
    if start.num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    who = f"process {start.process_id} of {start.num_processes}"
    logging.info("%s (%s), met at %s", who, start.how, start.coordinator)
    try:
        jax.distributed.initialize(
            start.coordinator,
            start.num_processes,
            start.process_id,
            local_device_ids=None if start.local_device == ALL_DEVICES else [start.local_device],
            cluster_detection_method="deactivate",
            initialization_timeout=JOIN_TIMEOUT_S,
        )
    except RuntimeError as error:
        raise ClusterError(
            f"--start={start.how}: {who} did not meet the others at {start.coordinator} ({error});"
            " are all of them started, and is that port of process 0's host free and reachable?"
        ) from error
    _watch = Watch(_Board(), start.process_id, start.num_processes, _end_now)
    _watch.start()


def leave() -> None:
    """Leaves the run after a good end; waits for all processes."""
    global _watch
    if _watch is not None:
        _watch.leave()
        _watch = None
        jax.distributed.shutdown()


def abandon(reason: str, with_trace: bool = False) -> None:
    """Ends this process and, with its reason, the others; returns if there are no others.

    `with_trace` shows the current exception here first.
    """
    if _watch is not None:
        if with_trace:
            traceback.print_exc()
        _watch.stop_all(reason)
        _end_now("")


def wait_for_verdict() -> None:
    """Waits until the watch knows who broke a collective; the watch then ends this process."""
    if _watch is not None:
        time.sleep(SILENCE_S + 2 * PERIOD_S)


def share(value: Json) -> list[Any]:
    """Returns every process's value, as JSON gives it back: a tuple as a list."""
    data = json.dumps(value).encode()
    if jax.process_count() == 1:
        return [json.loads(data)]
    mine = np.frombuffer(data, np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size, np.int32))
    room = max(_SMALLEST_SHARE, 1 << (int(sizes.max()) - 1).bit_length())
    padded = np.zeros(room, np.uint8)
    padded[: mine.size] = mine
    everyone = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(everyone, sizes, strict=True)]


def together(action: Callable[[], Json]) -> list[Any]:
    """Returns what `action` returned on each process, as `share`; if one raises, all do.

    Raises:
      UserError: That of this process's action, or a `HostError` with the text of another's.
    """
    try:
        value = action()
    except UserError as error:
        share([None, str(error)])
        raise
    results = share([value, ""])
    for process, (_, text) in enumerate(results):
        if text:
            raise HostError(f"process {process}: {text}")
    return [value for value, _ in results]


def own_part(count: int) -> range:
    """Returns which of `count` rows are this process's work: contiguous, evenly divided."""
    index, number = jax.process_index(), jax.process_count()
    return range(count * index // number, count * (index + 1) // number)


class _Board:
    """A text of each process that all others can read, in jax's coordination service."""

    _FOLDER = "jaxrl_llm/alive/"

    def __init__(self):
        # jax has no public name for the client; orbax reaches it in the same way.
        from jax._src import distributed

        self._client: Any = distributed.global_state.client

    def write(self, process: int, text: str) -> None:
        self._client.key_value_set(f"{self._FOLDER}{process}", text, allow_overwrite=True)

    def read(self) -> dict[int, str]:
        entries = self._client.key_value_dir_get(self._FOLDER)
        return {int(name.rpartition("/")[2]): text for name, text in entries}


class Watch(threading.Thread):
    """Says that this process is alive, and ends it when another one is not."""

    def __init__(
        self,
        board: Any,
        process: int,
        num_processes: int,
        end: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ):
        """`board` is a `_Board`; `end` ends this process with a message; `now` is in seconds."""
        super().__init__(name="watch", daemon=True)
        self._board, self._process, self._end, self._now = board, process, end, now
        # Of each process, its last text and when that came.
        self._heard = dict.fromkeys(range(num_processes), ("", now()))
        self._count = 0
        self._done = threading.Event()
        self._writing = threading.Lock()

    def run(self) -> None:
        while not self._done.wait(PERIOD_S):
            if verdict := self.look():
                self._end(verdict)

    def look(self) -> str:
        """Gives a sign of life; returns why the run must end, "" if all are alive."""
        self._count += 1
        try:
            with self._writing:
                if not self._done.is_set():
                    self._board.write(self._process, str(self._count))
            texts = self._board.read()
        except Exception as error:
            silent = self._now() - self._heard[0][1] >= SILENCE_S
            return self._verdict(0, f"cannot be reached: {error}") if silent else ""
        for process, text in texts.items():
            if text.startswith(_STOPPED) and process != self._process:
                return self._verdict(process, text)
        for process, (last, when) in self._heard.items():
            text = texts.get(process, "")
            if text != last or text == _LEFT:
                self._heard[process] = text, self._now()
            elif self._now() - when >= SILENCE_S:
                return self._verdict(process, f"gave no sign of life for {SILENCE_S:.0f} seconds")
        return ""

    def leave(self) -> None:
        self._say(_LEFT)

    def stop_all(self, reason: str) -> None:
        """Says why this process stops, and gives the others time to hear it."""
        self._say(_STOPPED + reason)
        # Their service ends with process 0.
        time.sleep(2 * PERIOD_S if self._process == 0 else 0.0)

    def _say(self, word: str) -> None:
        with self._writing:
            self._done.set()
            try:
                self._board.write(self._process, word)
            except Exception as error:
                logging.warning("process 0 could not be told %r (%s)", word, error)

    def _verdict(self, process: int, what: str) -> str:
        return (
            f"process {process} {what}\nprocess {self._process} ends too, as no step can be"
            " finished without it; start the run again to resume from its last checkpoint"
        )


def _end_now(message: str) -> None:
    """Ends this process from any thread: a thread that waits in a collective hears nothing."""
    if message:
        logging.error("%s", message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)
