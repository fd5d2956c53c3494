"""The processes of a run: they join, share and compare values, watch each other, and leave.

Other prompts, tokens or weights on one process raise no error by themselves; so digests are
compared, and the first difference stops the run. If a process dies, the others wait in a collective
that never ends; so each writes a sign of life every few seconds, and if one is silent, or says why
it stopped, the others end with a message.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
import threading
import time
import traceback
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

from jaxrl_llm.errors import EXIT_MENDABLE, UserError
from jaxrl_llm.sharding import telling
from jaxrl_llm.sharding.cluster import ALL_DEVICES, ClusterError, Start

Json = Any  # numbers, texts, booleans, None; lists of them, dicts of them by text

PERIOD_S = 3.0  # between two signs of life
SILENCE_S = 30.0  # without one: the process is dead, or its host, or the network
_UNEQUAL = "unequal copies "
_FOLDER = "jaxrl_llm/alive/"  # keys of the coordination service
_LEFT = "left"
_STOPPED = "stopped: "
_SMALLEST_SHARE = 4096  # bytes; shares are padded to powers of two: every size is compiled

_watch: "Watch | None" = None


def is_first() -> bool:
    """Returns whether this is process 0, the one that writes what is written once."""
    return jax.process_index() == 0


def join(start: Start) -> None:
    """Connects this process to the others, before the first use of a device, or raises."""
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
            initialization_timeout=300,
        )
    except RuntimeError as error:
        raise ClusterError(
            f"--start={start.how}: {who} did not meet the others at {start.coordinator} ({error});"
            " are all of them started, and is that port of process 0's host free and reachable?"
        ) from error
    client = distributed.global_state.client
    _watch = Watch(client, start.process_id, start.num_processes, _end_now)
    _watch.start()


def leave() -> None:
    """Leaves the run after a good end; waits for all processes."""
    global _watch
    if _watch is not None:
        _watch.leave()
        _watch = None
        jax.distributed.shutdown()


def abandon(reason: str, with_trace: bool = False) -> None:
    """Ends this process and, with its reason, the others; returns if there are no others."""
    if _watch is not None:
        if with_trace:  # of the current exception
            traceback.print_exc()
        _watch.stop_all(reason)
        _end_now("")


def wait_for_verdict() -> None:
    """Returns if no other process broke a collective; if one did, the watch ends this process."""
    if _watch is not None:
        _watch.wait_for_signs()


def share(value: Json) -> list[Any]:
    """Returns every process's value, as JSON gives it back: a tuple as a list.

    All processes must call it, in the same order.
    """
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    if jax.process_count() == 1:
        return [json.loads(mine.tobytes())]
    if jax.default_backend() == "cpu":
        # Collectives of CPUs are told apart by their devices alone: one of these bytes could meet
        # one of a program that is still at work.
        texts = (telling.told(p, mine.tobytes) for p in range(jax.process_count()))
        return [json.loads(each) for each in texts]
    sizes = multihost_utils.process_allgather(np.array(mine.size, np.int32))
    room = max(_SMALLEST_SHARE, 1 << (int(sizes.max()) - 1).bit_length())
    padded = np.zeros(room, np.uint8)
    padded[: mine.size] = mine
    everyone = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(everyone, sizes, strict=True)]


def told_by_first(value: Json) -> Json:
    """Returns process 0's value, without devices: these may be at work for long.

    All processes must call it, in the same order.
    """
    if jax.process_count() == 1:
        return value
    return json.loads(telling.told(0, lambda: json.dumps(value).encode()))


def whole(array: Array) -> np.ndarray:
    """Returns an array of any processes, [M, ...], on the host of each, one entry at a time.

    All processes must call it, in the same order.
    """
    if jax.process_count() == 1:
        return np.asarray(array)
    if len(telling.holders(array.sharding)) < jax.process_count():
        return _told_in_parts(array)
    parts = [multihost_utils.process_allgather(array[i], tiled=True) for i in range(len(array))]
    return np.stack(parts)


def _told_in_parts(array: Array) -> np.ndarray:
    """Returns an array of which some processes have nothing: each part is told by one who has."""
    found = np.empty(array.shape, array.dtype)
    held = {shard.device: shard.data for shard in array.addressable_shards}
    indices: dict[Any, Any] = dict(array.sharding.devices_indices_map(array.shape))
    parts = {str(index): (device, index) for device, index in indices.items()}
    for device, index in parts.values():
        content = lambda: np.asarray(held[device]).tobytes()  # noqa: B023, E731
        data = telling.told(device.process_index, content)
        found[index] = np.frombuffer(data, found.dtype).reshape(found[index].shape)
    return found


def together(action: Callable[[], Json]) -> list[Any]:
    """Returns what `action` returned on each process, as `share`; a UserError of one is all's."""
    try:
        value = action()
    except UserError as error:
        share([None, str(error)])
        raise
    values, texts = zip(*share([value, ""]), strict=True)
    for process, text in enumerate(texts):
        if text:
            raise UserError(f"process {process}: {text}")
    return list(values)


def own_part(count: int) -> range:
    """Returns which of `count` rows are this process's work: contiguous, evenly divided."""
    index, number = jax.process_index(), jax.process_count()
    return range(count * index // number, count * (index + 1) // number)


class DivergenceError(UserError, RuntimeError):
    """Processes hold different values; the message names the first item and who holds what."""


def agree(where: str, items: Mapping[str, Any]) -> None:
    """Raises DivergenceError, which begins with `where`, if an item differs between processes.

    All must call this. A value is what `digest` takes, or a tree of arrays on devices.
    """
    if jax.process_count() == 1:
        return
    mine: dict[str, str] = {}
    for name, value in items.items():
        on_devices = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value))
        parts = digests_of_parts(value) if on_devices else [("", digest(value))]
        mine |= {f"{name}{part}": found for part, found in parts}
    compare(where, share(mine))


def compare(where: str, everyone: Sequence[Mapping[str, str]]) -> None:
    """Compares the digests of processes; an item is compared between those that hold it."""
    for name in dict.fromkeys(name for digests in everyone for name in digests):
        holders: dict[str, list[int]] = {}
        for process, digests in enumerate(everyone):
            if name in digests:
                holders.setdefault(digests[name], []).append(process)
        if len(holders) > 1 or any(text.startswith(_UNEQUAL) for text in holders):
            found = "; ".join(
                f"process{'es' * (len(some) > 1)} {', '.join(map(str, some))}: {text}"
                for text, some in holders.items()
            )
            raise DivergenceError(
                f"{where}: the processes disagree, first about {name} ({found}); look for a host"
                " with other files, packages or settings, or a failing device, and start the run"
                " again to resume from its last checkpoint"
            )


def digest(value: Any) -> str:
    """Returns 16 hex digits of numbers, texts, host arrays; lists, mappings, dataclasses of them.

    >>> digest({"a": [1, 2.0], "b": "x"}) == digest({"b": "x", "a": (1, 2.0)})
    True
    >>> digest(np.zeros(2, np.int32)) == digest(np.zeros(2, np.float32))
    False
    """
    found = hashlib.blake2b(digest_size=8)
    for part in _parts(value):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


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


def digests_of_parts(tree: Any) -> Iterator[tuple[str, str]]:
    """Yields (path and part, digest) of the parts that this process's devices hold of a tree."""
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
            found: dict[str, set[int]] = {}
            for shard in leaves[path].addressable_shards:
                bounds = zip(shard.index, leaves[path].shape, strict=True)
                part = ",".join("{}:{}".format(*s.indices(size)) for s, size in bounds)
                found.setdefault(part, set()).add(int(rows[shard.device][column]))
            for part, values in found.items():
                text = ", ".join(f"{value:08x}" for value in sorted(values))
                yield f"{path}[{part}]", _UNEQUAL + text if len(values) > 1 else text


@functools.lru_cache(maxsize=16)
def _local_digests(mesh: Mesh, specs: tuple[tuple[str, PartitionSpec], ...]):
    """Returns a program for each device's digests of its own parts, [devices, leaves]."""
    rows = PartitionSpec(mesh.axis_names)

    def of_device(leaves: dict[str, Array]) -> UInt32[Array, "1 leaves"]:
        return jnp.stack([_array_digest(leaves[path]) for path, _ in specs])[None]

    program = jax.shard_map(
        of_device, mesh=mesh, in_specs=(dict(specs),), out_specs=rows, check_vma=False
    )
    return jax.jit(program, out_shardings=NamedSharding(mesh, rows))


def _array_digest(array: Array) -> UInt32[Array, ""]:
    """Returns the sum of the elements' bits, each times an odd number that its position gives.

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


class Watch(threading.Thread):
    """Says that this process is alive, and ends it when another one is not."""

    def __init__(
        self,
        client: Any,  # of jax's coordination service, which holds a text of each process
        process: int,
        num_processes: int,
        end: Callable[[str], None],  # ends this process with a message
        now: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name="watch", daemon=True)
        self._client, self._process, self._end, self._now = client, process, end, now
        # Of each process, its last text and when that came.
        self._heard = dict.fromkeys(range(num_processes), ("", now()))
        self._signs = dict.fromkeys(range(num_processes), 0)  # how many each gave
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
                    self._write(str(self._count))
            entries = self._client.key_value_dir_get(_FOLDER)
        except Exception as error:
            silent = self._now() - self._heard[0][1] >= SILENCE_S
            return self._verdict(0, f"cannot be reached: {error}") if silent else ""
        texts = {int(name.rpartition("/")[2]): text for name, text in entries}
        for process, text in texts.items():
            if text.startswith(_STOPPED) and process != self._process:
                return self._verdict(process, text)
        for process, (last, when) in self._heard.items():
            text = texts.get(process, "")
            if text != last or text == _LEFT:
                self._heard[process] = text, self._now()
                self._signs[process] += 1
            elif self._now() - when >= SILENCE_S:
                return self._verdict(process, f"gave no sign of life for {SILENCE_S:.0f} seconds")
        return ""

    def wait_for_signs(self) -> None:
        """Returns when all others were alive after the call; however long a look takes.

        The first sign that comes may be older than the call, the second is not.
        """
        needed = {process: count + 2 for process, count in self._signs.items()}
        while any(self._signs[process] < count for process, count in needed.items()):
            if self._done.wait(PERIOD_S / 10):
                return

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
                self._write(word)
            except Exception as error:
                logging.warning("process 0 could not be told %r (%s)", word, error)

    def _write(self, text: str) -> None:
        self._client.key_value_set(f"{_FOLDER}{self._process}", text, allow_overwrite=True)

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
    os._exit(EXIT_MENDABLE)
