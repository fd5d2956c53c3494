"""Copies of a run's state in the memory of its hosts, from which a crashed run goes on.

Each process writes its shards into a folder in memory (tmpfs), which outlives the process, and
sends them to a partner on another host, which outlives the host. A start takes the newest step
whose shards all exist somewhere. The folder is removed when the run ends, saved.
"""

import collections
import hashlib
import itertools
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
from absl import logging
from jax._src import distributed  # no public name has the coordinator's address

from jaxrl_llm.checkpoint import peer_files
from jaxrl_llm.checkpoint.shard_file import Index, Regions, ShardFile, write
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.sharding import multihost
from jaxrl_llm.storage import files

Json = dict[str, Any]

FOLDER_VARIABLE = "JAXRL_LLM_MEMORY_FOLDER"  # for hosts without /dev/shm
_ID_FILE = "memory_id"  # in the run's folder: a copy belongs to this run, not to one before it
_KEPT = 2  # newest steps of each process: another process may not have completed the newest


class MemoryCopies:
    """The copies of one run. All processes make the same calls, in the same order."""

    def __init__(self, workdir: pathlib.Path):
        """Makes the folder, and a server for the other processes if there are any.

        Raises ConfigError if the folder cannot be made.
        """
        self._folder = _make_folder(_run_id(workdir))
        for rest in self._folder.glob("*.tmp"):
            rest.unlink(missing_ok=True)
        self._process, self._count = jax.process_index(), jax.process_count()
        self._server: peer_files.PeerServer | None = None
        self._addresses = [""]
        self._secret = ""
        self._partner = self._process
        if self._count > 1:
            self._meet()
        self._thread = futures.ThreadPoolExecutor(1, "memory copies")
        self._in_flight: futures.Future[None] | None = None
        self._holders: dict[str, list[int]] = {}  # of the files of the step to restore

    def _meet(self) -> None:
        self._secret = multihost.broadcast_from_host0(secrets.token_hex(16))
        host = peer_files.own_address(str(distributed.global_state.coordinator_address))
        self._server = peer_files.PeerServer(self._folder, host, self._secret)
        # Processes of one host share its memory: what is in one's folder is in that of the others.
        folder = self._folder.stat()
        place = f"{_boot_id()}:{folder.st_dev}:{folder.st_ino}"
        table = multihost.allgather([self._server.address, place])
        self._addresses, places = map(list, zip(*table, strict=True))
        # Neighbouring processes are in one slice, so the partner is as far away as possible.
        distances = sorted(range(1, self._count), key=lambda d: -min(d, self._count - d))
        partners = [(self._process + distance) % self._count for distance in distances]
        elsewhere = [p for p in partners if places[p] != place]
        self._partner = elsewhere[0] if elsewhere else self._process
        if not elsewhere and multihost.is_first():
            logging.warning(
                "checkpoint.memory_every: all processes are on one host; its loss is a loss of the"
                " copies in its memory, and the run then goes on from its last checkpoint"
            )

    def save(self, step: int, leaves: Mapping[str, jax.Array], meta: Json) -> None:
        """Copies a step; returns when the arrays may be donated. A failure is logged.

        The checksum and the partner's copy follow in the background.
        """
        self.wait()
        path = self._folder / f"{step}.{self._process}-{self._count}"
        try:
            complete = write(path, leaves, {"meta": meta})
        except OSError as error:
            logging.warning("%s: no copy in memory of step %d (%s)", self._folder, step, error)
            return

        def finish() -> None:
            complete()
            if self._partner != self._process:
                peer_files.send(path, self._addresses[self._partner], self._secret)
            self._trim()

        self._in_flight = self._thread.submit(finish)

    def wait(self) -> None:
        """Waits for the copy in flight."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        try:
            in_flight.result()
        except OSError as error:
            logging.warning(
                "process %d has no copy of this host's state (%s)", self._partner, error
            )
            self._trim()

    def _trim(self) -> None:
        """Removes all but the newest steps of each process whose files are here."""
        by_owner = collections.defaultdict(list)
        for name in self._names():
            by_owner[name.partition(".")[2]].append(name)
        for names in by_owner.values():
            self._delete(sorted(names, key=_step_of)[:-_KEPT])

    def _names(self) -> list[str]:
        """The complete files in this process's folder: STEP.PROCESS-PROCESSES."""
        return [p.name for p in self._folder.iterdir() if peer_files.NAME.fullmatch(p.name)]

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)

    def newest(self, after: int) -> int:
        """The newest step above `after` of which every shard is intact on some host, else 0."""
        present = set(self._names())
        complete = _complete_steps(multihost.allgather(sorted(present)))
        for (step, _), names in sorted(complete.items(), reverse=True):
            if step <= after:
                break
            intact = [name for name in sorted(names & present) if self._is_intact(name)]
            everyone = multihost.allgather(intact)
            self._holders = {
                name: [p for p, held in enumerate(everyone) if name in held] for name in names
            }
            if all(self._holders.values()):
                return step
        self._holders = {}
        return 0

    def _is_intact(self, name: str) -> bool:
        try:
            if ShardFile(self._folder / name).is_intact:
                return True
            reason = "its checksum differs"
        except (OSError, ValueError) as error:
            reason = str(error)
        logging.warning("%s/%s: damaged, %s", self._folder, name, reason)
        return False

    def open(self) -> "OpenCopy":
        """The copy of the step that `newest` found; files of this process's own host come first."""
        return OpenCopy(map(self._open_file, sorted(self._holders, key=self._distance)))

    def _distance(self, name: str) -> tuple[bool, bool, str]:
        """Sorts files: this process's own first, then those in this folder."""
        own = f".{self._process}-" in name
        return not own, self._process not in self._holders[name], name

    def _open_file(self, name: str) -> ShardFile:
        """A file, here or copied from the first host that answers."""
        holders = self._holders[name]
        if self._process in holders:
            return ShardFile(self._folder / name)
        path, errors = self._folder / f"{name}.fetched.tmp", []
        for process in holders:
            try:
                peer_files.fetch(name, self._addresses[process], self._secret, path)
                file = ShardFile(path)
                path.unlink()  # its bytes stay while the file is mapped
                return file
            except (OSError, ValueError) as error:
                errors.append(f"process {process}: {error}")
        raise OSError(f"{name} cannot be read from any host: {'; '.join(errors)}")

    def forget_after(self, step: int) -> None:
        """Removes copies of later steps, which this start takes again."""
        self._delete(name for name in self._names() if _step_of(name) > step)

    def remove(self) -> None:
        """Removes this run's copies from the hosts, once no process writes one."""
        self.wait()
        multihost.allgather("written")
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        if self._server is not None:
            self._server.close()


class OpenCopy:
    """The copy of one step. Files are opened as they are needed: another host's is copied whole.

    Raises OSError if a host stopped answering.
    """

    def __init__(self, shard_files: Iterator[ShardFile]):
        self._first, self._others = next(shard_files), shard_files
        self.meta: Json = self._first.header["meta"]

    def read(self, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The arrays in the shardings of `expected`; only files with shards for this process."""
        regions = Regions()
        for name, spec in expected.items():
            for index in spec.sharding.addressable_devices_indices_map(spec.shape).values():
                regions.want(name, index, spec.shape, spec.dtype)
        for file in itertools.chain([self._first], self._others):
            file.fill(regions)
            if regions.is_complete:
                break
        else:
            raise OSError("the copies of this step lack shards")

        def assembled(name: str, spec: jax.ShapeDtypeStruct) -> jax.Array:
            def part(index: Index | None) -> np.ndarray:
                assert index is not None
                return regions.get(name, index, spec.shape)

            return jax.make_array_from_callback(spec.shape, spec.sharding, part)

        return {name: assembled(name, spec) for name, spec in expected.items()}


def _complete_steps(everyone: list[list[str]]) -> dict[tuple[int, int], set[str]]:
    """(step, number of processes) -> files, of steps that have one of every process."""
    steps: dict[tuple[int, int], set[str]] = {}
    for name in itertools.chain(*everyone):
        steps.setdefault((_step_of(name), int(name.rpartition("-")[2])), set()).add(name)
    return {key: names for key, names in steps.items() if len(names) == key[1]}


def _step_of(name: str) -> int:
    return int(name.partition(".")[0])


def _run_id(workdir: pathlib.Path) -> str:
    """Names this run, not its address: another run may have been there before."""
    path = workdir / _ID_FILE
    if multihost.is_first() and not files.is_file(path):
        files.replace_text(path, secrets.token_hex(8))
    return str(multihost.broadcast_from_host0(multihost.is_first() and files.read_text(path)))


def _make_folder(run_id: str) -> pathlib.Path:
    base = os.environ.get(FOLDER_VARIABLE, "") or f"/dev/shm/jaxrl_llm-{os.getuid()}"
    folder = pathlib.Path(base) / hashlib.sha256(run_id.encode()).hexdigest()[:16]
    setting = "config.checkpoint.memory_every"
    if not hasattr(os, "posix_fallocate"):
        raise ConfigError(f"{setting}: this system cannot reserve memory for files; use 0")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        remedy = f"set {FOLDER_VARIABLE} to a folder in memory (tmpfs) on each host"
        raise ConfigError(f"{setting}: {folder} cannot be made ({error}); {remedy}") from error
    return folder


def _boot_id() -> str:
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
