"""Multi-host runs: joining and leaving, exchanging values, divergence checks, and heartbeats.

Prompts, tokens or weights that differ between processes raise no error by themselves; so digests
are compared, and the first difference stops the run. If a process dies, the others hang in a
collective; so each writes a heartbeat every few seconds, and if one is missing, or a process
reports why it stopped, the others end with a message.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax._src import distributed  # no public name has the client; orbax does the same
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxrl_llm.errors import EXIT_FAILED, EXIT_USER_ERROR, UserError
from jaxrl_llm.sharding import kv_store_broadcast
from jaxrl_llm.sharding.cluster_detection import ALL_DEVICES, ClusterError, ProcessStart

Json = Any  # a JSON value: numbers, strings, booleans, None, lists, dicts with string keys

START = "start"  # the check before the first step
HEARTBEAT_S = 3.0  # between two heartbeats
HEARTBEAT_TIMEOUT_S = 30.0  # without a heartbeat: the process, its host or the network is dead
_UNEQUAL = "unequal copies "
_FOLDER = "jaxrl_llm/alive/"  # key prefix in the coordination service
_FINISHED = "left"
_STOPPED = "stopped: "  # by a fault of the user
_FAILED = "failed: "
_SMALLEST_SHARE = (
    4096  # bytes; messages are padded to powers of two, as every size compiles a program
)

_watchdog: "HeartbeatThread | None" = None


def is_first() -> bool:
    """Whether this is process 0, which writes logs, checkpoints and files for all."""
    return jax.process_index() == 0


def join(start: ProcessStart) -> None:
    """Connects this process to the others; call before the first use of a device.

    Raises ClusterError if they do not meet.
    """
    global _watchdog
    if start.num_processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    this_process = f"process {start.process_id} of {start.num_processes}"
    logging.info("%s (%s), met at %s", this_process, start.method, start.coordinator)
    try:
        jax.distributed.initialize(
            start.coordinator,
            start.num_processes,
            start.process_id,
            local_device_ids=None if start.local_device == ALL_DEVICES else [start.local_device],
            cluster_detection_method="deactivate",
            initialization_timeout=300,
        )
    except RuntimeError as error:
        failure = ClusterError(
            f"--start={start.method}: {this_process} did not meet the others"
            f" at {start.coordinator} ({error});"
            " are all of them started, and is that port of process 0's host free and reachable?"
        )
        failure.exit_code = EXIT_FAILED  # the others may still be ending after a failure
        raise failure from error
    client = distributed.global_state.client
    _watchdog = HeartbeatThread(client, start.process_id, start.num_processes, _end_now)
    _watchdog.start()


def leave() -> None:
    """Leaves the run after a successful end; waits for all processes."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.leave()
        _watchdog = None
        jax.distributed.shutdown()


def abandon(reason: str, exit_code: int = EXIT_FAILED) -> None:
    """Ends this process and, with its reason, the others; returns if there are no others.

    All end with `exit_code`, EXIT_FAILED or EXIT_USER_ERROR.
    """
    if _watchdog is not None:
        _watchdog.stop_all(reason, exit_code)
        _end_now("", exit_code)


def wait_for_heartbeats() -> None:
    """Waits until all others have proved alive; if one is not, the watch ends this process."""
    if _watchdog is not None:
        _watchdog.wait_for_heartbeats()


def allgather(value: Json) -> list[Any]:
    """Gathers the values of all processes, after a JSON round trip: tuples become lists.

    All processes must call it, in the same order.
    """
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    if jax.process_count() == 1:
        return [json.loads(data.tobytes())]
    if jax.default_backend() == "cpu":
        # CPU collectives are matched by their devices alone: this one could be matched with that of
        # a program that is still running. So it goes through the coordination service.
        messages = (
            kv_store_broadcast.broadcast(p, data.tobytes) for p in range(jax.process_count())
        )
        return [json.loads(message) for message in messages]
    sizes = multihost_utils.process_allgather(np.array(data.size, np.int32))
    padded_size = max(_SMALLEST_SHARE, 1 << (int(sizes.max()) - 1).bit_length())
    padded = np.zeros(padded_size, np.uint8)
    padded[: data.size] = data
    everyone = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(everyone, sizes, strict=True)]


def broadcast_from_host0(value: Json) -> Json:
    """Broadcasts process 0's value through the coordination service, without waiting for devices.

    All processes must call it, in the same order.
    """
    if jax.process_count() == 1:
        return value
    return json.loads(kv_store_broadcast.broadcast(0, lambda: json.dumps(value).encode()))


def allgather_array(array: Array) -> np.ndarray:
    """Gathers an array [M, ...] that any processes hold to the host of each, entry by entry.

    All processes must call it, in the same order.
    """
    if jax.process_count() == 1:
        return np.asarray(array)
    if len(kv_store_broadcast.hosts_of(array.sharding)) < jax.process_count():
        return _allgather_parts(array)
    parts = [multihost_utils.process_allgather(array[i], tiled=True) for i in range(len(array))]
    return np.stack(parts)


def _allgather_parts(array: Array) -> np.ndarray:
    """Gathers an array that some processes have no part of: an owner broadcasts each part."""
    result = np.empty(array.shape, array.dtype)
    local_shards = {shard.device: shard.data for shard in array.addressable_shards}
    indices: dict[Any, Any] = dict(array.sharding.devices_indices_map(array.shape))
    part_owners = {str(index): (device, index) for device, index in indices.items()}
    for device, index in part_owners.values():
        part_bytes = lambda: np.asarray(local_shards[device]).tobytes()  # noqa: B023, E731
        data = kv_store_broadcast.broadcast(device.process_index, part_bytes)
        result[index] = np.frombuffer(data, result.dtype).reshape(result[index].shape)
    return result


def run_on_all_hosts(action: Callable[[], Json]) -> list[Any]:
    """Runs `action` on all processes, shares the results; a UserError of one is raised by all."""
    try:
        value = action()
    except UserError as error:
        allgather([None, str(error)])
        raise
    values, texts = zip(*allgather([value, ""]), strict=True)
    for process, text in enumerate(texts):
        if text:
            raise UserError(f"process {process}: {text}")
    return list(values)


def local_rows(count: int) -> range:
    """This process's share of `count` rows: contiguous, evenly divided."""
    index, number = jax.process_index(), jax.process_count()
    return range(count * index // number, count * (index + 1) // number)


class DivergenceError(UserError, RuntimeError):
    """Processes hold different values; the message names the first item and the digests.

    At the start by a fault of the user, later by one of a host or a device.
    """

    def __init__(self, where: str, message: str):
        super().__init__(f"{where}: {message}")
        self.exit_code = EXIT_USER_ERROR if where == START else EXIT_FAILED


def assert_equal(where: str, items: Mapping[str, Any]) -> None:
    """Raises DivergenceError, which begins with `where`, if an item differs between processes.

    All processes must call it. A value is any that `digest` accepts, or a tree of device arrays.
    """
    if jax.process_count() == 1:
        return
    digests: dict[str, str] = {}
    for name, value in items.items():
        on_devices = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
        parts = shard_digests(value) if on_devices else [("", digest(value))]
        digests |= {f"{name}{part}": part_digest for part, part_digest in parts}
    compare_digests(where, allgather(digests))


def compare_digests(where: str, everyone: Sequence[Mapping[str, str]]) -> None:
    """Compares digests per process; an item only between the processes that hold it.

    Raises DivergenceError at the first difference.
    """
    for name in dict.fromkeys(name for digests in everyone for name in digests):
        holders: dict[str, list[int]] = {}
        for process, digests in enumerate(everyone):
            if name in digests:
                holders.setdefault(digests[name], []).append(process)
        if len(holders) > 1 or any(text.startswith(_UNEQUAL) for text in holders):
            details = "; ".join(
                f"process{'es' * (len(processes) > 1)} {', '.join(map(str, processes))}: {text}"
                for text, processes in holders.items()
            )
            raise DivergenceError(
                where,
                f"the processes disagree, first about {name} ({details}); look for a host"
                " with other files, packages or settings, or a failing device, and start the run"
                " again to resume from its last checkpoint",
            )


def digest(value: Any) -> str:
    """16 hex digits for numbers, strings, host arrays, and nested lists, mappings, dataclasses.

    >>> digest({"a": [1, 2.0], "b": "x"}) == digest({"b": "x", "a": (1, 2.0)})
    True
    >>> digest(np.zeros(2, np.int32)) == digest(np.zeros(2, np.float32))
    False
    """
    hasher = hashlib.blake2b(digest_size=8)
    for part in _parts(value):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for key in sorted(value, key=str):
            yield str(key).encode(errors="surrogatepass")
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"sequence of {len(value)}".encode()
        for entry in value:
            yield from _parts(entry)
    elif dataclasses.is_dataclass(value):
        yield from _parts([getattr(value, field.name) for field in dataclasses.fields(value)])
    else:
        yield repr(value).encode(errors="surrogatepass")


def shard_digests(tree: Any) -> Iterator[tuple[str, str]]:
    """Yields (path and index range, digest) of the shards of a tree on this process's devices."""
    on_device = jax.local_devices()[0].default_memory().kind
    by_mesh: dict[Mesh, dict[str, Any]] = {}
    for keys, leaf in jax.tree.leaves_with_path(tree):
        if leaf.sharding.memory_kind in (None, on_device):
            by_mesh.setdefault(leaf.sharding.mesh, {})[jax.tree_util.keystr(keys)] = leaf
    for mesh, leaves in by_mesh.items():
        paths = sorted(leaves)
        specs = tuple((path, leaves[path].sharding.spec) for path in paths)
        with jax.set_mesh(mesh):
            table = _local_digests(mesh, specs)(leaves)
        rows = {shard.device: np.asarray(shard.data)[0] for shard in table.addressable_shards}
        for column, path in enumerate(paths):
            part_digests: dict[str, dict[int, list[int]]] = {}  # part -> digest -> devices
            for shard in leaves[path].addressable_shards:
                bounds = zip(shard.index, leaves[path].shape, strict=True)
                part = ",".join("{}:{}".format(*s.indices(size)) for s, size in bounds)
                value = int(rows[shard.device][column])
                part_digests.setdefault(part, {}).setdefault(value, []).append(shard.device.id)
            for part, values in part_digests.items():
                yield f"{path}[{part}]", _part_digest(values)


def _part_digest(devices_by_value: Mapping[int, Sequence[int]]) -> str:
    """The digest of a shard's copies; if they differ, each with its devices, the fewest last."""
    values = sorted(devices_by_value, key=lambda v: (-len(devices_by_value[v]), v))
    if len(values) == 1:
        return f"{values[0]:08x}"
    copies = [f"{v:08x} on devices {', '.join(map(str, devices_by_value[v]))}" for v in values]
    return _UNEQUAL + ", ".join(copies)


@functools.lru_cache(maxsize=16)
def _local_digests(mesh: Mesh, specs: tuple[tuple[str, PartitionSpec], ...]):
    """Program that computes each device's digests of its own shards, [devices, leaves]."""
    rows = PartitionSpec(mesh.axis_names)

    def device_digests(leaves: dict[str, Array]) -> UInt32[Array, "1 leaves"]:
        return jnp.stack([_array_digest(leaves[path]) for path, _ in specs])[None]

    program = jax.shard_map(
        device_digests, mesh=mesh, in_specs=(dict(specs),), out_specs=rows, check_vma=False
    )
    return jax.jit(program, out_shardings=NamedSharding(mesh, rows))


def _array_digest(array: Array) -> UInt32[Array, ""]:
    """Sum of the elements' bits, each times an odd number that depends on its position.

    A change of one element always changes it: odd numbers have inverses modulo 2**32.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{min(array.dtype.itemsize * 8, 32)}")
    bits = jax.lax.bitcast_convert_type(array, unsigned).reshape(-1).astype(jnp.uint32)
    odd = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435769) * 2 + 1
    return (bits * odd).sum(dtype=jnp.uint32)


class HeartbeatThread(threading.Thread):
    """Heartbeat thread: reports that this process is alive, and ends it when another is not."""

    def __init__(
        self,
        client: Any,  # of JAX's coordination service, a key-value store with one text per process
        process: int,
        num_processes: int,
        end: Callable[[str, int], Any],  # ends this process with a message and an exit code
        now: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name="watch", daemon=True)
        self._client, self._process, self._end, self._now = client, process, end, now
        # Per process: its last text and the time it arrived.
        self._last_signs = dict.fromkeys(range(num_processes), ("", now()))
        self._num_signs = dict.fromkeys(range(num_processes), 0)  # per process
        self._count = 0
        self._exit_code = EXIT_FAILED  # of this process, if another one's end is its end
        self._done = threading.Event()
        self._write_lock = threading.Lock()

    def run(self) -> None:
        while not self._done.wait(HEARTBEAT_S):
            if verdict := self.check():
                self._end(verdict, self._exit_code)

    def check(self) -> str:
        """Writes a heartbeat; returns why the run must end, or "" if all processes are alive."""
        self._count += 1
        try:
            with self._write_lock:
                if not self._done.is_set():
                    self._write(str(self._count))
            entries = self._client.key_value_dir_get(_FOLDER)
        except Exception as error:
            silent = self._now() - self._last_signs[0][1] >= HEARTBEAT_TIMEOUT_S
            return self._verdict(0, f"cannot be reached: {error}") if silent else ""
        texts = {int(name.rpartition("/")[2]): text for name, text in entries}
        for process, text in texts.items():
            if text.startswith((_STOPPED, _FAILED)) and process != self._process:
                if text.startswith(_STOPPED):
                    self._exit_code = EXIT_USER_ERROR
                return self._verdict(process, text)
        for process, (last, when) in self._last_signs.items():
            text = texts.get(process, "")
            if text != last or text == _FINISHED:
                self._last_signs[process] = text, self._now()
                self._num_signs[process] += 1
            elif self._now() - when >= HEARTBEAT_TIMEOUT_S:
                return self._verdict(
                    process, f"gave no sign of life for {HEARTBEAT_TIMEOUT_S:.0f} seconds"
                )
        return ""

    def wait_for_heartbeats(self) -> None:
        """Waits until every process has shown that it was alive after this call.

        The first heartbeat to arrive may have been written before the call, the second was not.
        """
        needed = {process: count + 2 for process, count in self._num_signs.items()}
        while any(self._num_signs[process] < count for process, count in needed.items()):
            if self._done.wait(HEARTBEAT_S / 10):
                return

    def leave(self) -> None:
        self._write_last(_FINISHED)

    def stop_all(self, reason: str, exit_code: int = EXIT_USER_ERROR) -> None:
        """Reports why this process stops, and gives the others time to read it."""
        self._write_last((_STOPPED if exit_code == EXIT_USER_ERROR else _FAILED) + reason)
        # The coordination service ends with process 0.
        time.sleep(2 * HEARTBEAT_S if self._process == 0 else 0.0)

    def _write_last(self, text: str) -> None:
        with self._write_lock:
            self._done.set()
            try:
                self._write(text)
            except Exception as error:
                logging.warning("process 0 could not be sent %r (%s)", text, error)

    def _write(self, text: str) -> None:
        self._client.key_value_set(f"{_FOLDER}{self._process}", text, allow_overwrite=True)

    def _verdict(self, process: int, reason: str) -> str:
        return (
            f"process {process} {reason}\nprocess {self._process} ends too, as no step can be"
            " finished without it; start the run again to resume from its last checkpoint"
        )


def _end_now(message: str, exit_code: int) -> None:
    """Ends this process from any thread: one that waits in a collective cannot be interrupted."""
    if message:
        logging.error("%s", message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
