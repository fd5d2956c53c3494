"""One writer for a run in a bucket: a lease, the object `lease`, which a dead host loses.

The holder replaces the object every few seconds, on the condition that nobody else has. A process
that finds a lease watches it: if it changes, its holder lives, and the process is refused; if it
stays the same for `TTL_S`, the process takes it over by the same conditional replacement, which
only one of several can win. No clocks of two machines are compared.
"""

import contextlib
import importlib
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from absl import logging

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import files

LEASE_FILE = "lease"
RENEW_S = 8.0
TTL_S = 40.0  # without renewal the holder counts as dead
_POLL_S = 2.0
_ABSENT = ""  # generation of an object that does not exist


class OccupiedError(UserError, RuntimeError):
    """Another process is writing into the folder; the message says which."""


class Versioned(NamedTuple):
    """The content of an object and its generation, by which it can be replaced."""

    content: bytes
    generation: str


class ConditionalObject(Protocol):
    """An object that is replaced only if it is still the one that was read."""

    def read(self) -> Versioned:
        """Content and generation; empty ones if it does not exist."""
        ...

    def replace(self, content: bytes, generation: str) -> str:
        """Replaces the object of a generation ("": none); the new one, "" if it had changed."""
        ...


class _S3Object:
    """By If-None-Match and If-Match on the object's ETag."""

    def __init__(self, path: pathlib.Path):
        self._path = os.fspath(path)
        self._fs = files.file_system(path)
        self._bucket, _, self._key = self._path.partition("://")[2].partition("/")

    def read(self) -> Versioned:
        while True:
            try:
                before = self._fs.info(self._path)["ETag"]
                content = self._fs.cat_file(self._path)
                if self._fs.info(self._path)["ETag"] == before:
                    return Versioned(content, before)
            except FileNotFoundError:
                return Versioned(b"", _ABSENT)

    def replace(self, content: bytes, generation: str) -> str:
        condition = {"IfMatch": generation} if generation else {"IfNoneMatch": "*"}
        try:
            reply = self._fs.call_s3(
                "put_object", Bucket=self._bucket, Key=self._key, Body=content, **condition
            )
        except (OSError, ValueError) as error:
            cause: Any = error.__cause__ or error
            code = getattr(cause, "response", {}).get("Error", {}).get("Code", "")
            if code in ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412"):
                return _ABSENT
            raise
        return str(reply["ETag"])


class _GcsObject:
    """By `ifGenerationMatch`; 0 stands for an object that does not exist."""

    def __init__(self, path: pathlib.Path):
        storage = importlib.import_module("google.cloud.storage")
        bucket, _, key = os.fspath(path).partition("://")[2].partition("/")
        # Objects are not addressed by project; without one the client refuses to be made.
        client = storage.Client(project=os.environ.get("GOOGLE_CLOUD_PROJECT", "none"))
        self._blob = client.bucket(bucket).blob(key)

    def read(self) -> Versioned:
        from google.cloud.exceptions import NotFound

        while True:
            try:
                self._blob.reload()
                generation = self._blob.generation
                content = self._blob.download_as_bytes(if_generation_match=generation)
                return Versioned(content, str(generation))
            except NotFound:
                if not self._blob.exists():
                    return Versioned(b"", _ABSENT)

    def replace(self, content: bytes, generation: str) -> str:
        from google.cloud.exceptions import PreconditionFailed

        try:
            self._blob.upload_from_string(content, if_generation_match=int(generation or 0))
        except PreconditionFailed:
            return _ABSENT
        return str(self._blob.generation)


def conditional_object(path: pathlib.Path) -> ConditionalObject:
    """The object at an address, for conditional replacement."""
    return _S3Object(path) if os.fspath(path).startswith("s3://") else _GcsObject(path)


class Lease:
    """The lease of this process on a run's folder in a bucket."""

    def __init__(
        self,
        folder: pathlib.Path,
        stored: ConditionalObject | None = None,
        renew_s: float = RENEW_S,
        ttl_s: float = TTL_S,
    ):
        """`stored` is the object that holds it, by default `LEASE_FILE` in `folder`."""
        self._folder, self._renew_s, self._ttl_s = folder, renew_s, ttl_s
        self._path = folder / LEASE_FILE
        self._object = stored or conditional_object(self._path)
        self._token = uuid.uuid4().hex
        self._generation = _ABSENT
        self._renewed_at = 0.0  # monotonic, when the last successful renewal was sent
        self._number = 0
        self._is_lost = False
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_regularly, daemon=True)

    def acquire(self) -> None:
        """Takes the lease, if need be from a holder that has not renewed it for `ttl_s`.

        Raises OccupiedError if its holder renews it, StorageError if the bucket fails.
        """
        latest = self._read()
        record = parse_record(latest.content)
        deadline = time.monotonic() + self._ttl_s
        if not (is_free(record) or _has_died_here(record)):
            message = "%s: held by %s; taken over unless that renews it within %.0f s"
            logging.warning(message, self._path, describe(record), self._ttl_s)
        while True:
            record = parse_record(latest.content)
            is_over = is_free(record) or _has_died_here(record) or time.monotonic() >= deadline
            if is_over and self._replace(latest.generation):
                break
            time.sleep(min(_POLL_S, self._ttl_s / 10))
            now = self._read()
            newer = parse_record(now.content)
            if now.generation != latest.generation and not is_free(newer):
                raise OccupiedError(
                    f"{self._folder}: {describe(newer)} is writing into it (it renews"
                    f" {self._path}); wait until that has ended, end it, or use another --workdir"
                )
            latest = now
        self._thread.start()

    def check(self) -> None:
        """Returns if this process still holds the lease; call it before something is written.

        Raises OccupiedError if another process has taken it, StorageError if that is not known.
        """
        if not self._is_lost and time.monotonic() - self._renewed_at > self._ttl_s / 2:
            self._renew()
        if self._is_lost:
            raise OccupiedError(
                f"{self._folder}: {describe(parse_record(self._read().content))} has taken over"
                f" this run, as {self._path} was not renewed for {self._ttl_s:.0f} s; this process"
                " ends, the other one goes on"
            )

    def release(self) -> None:
        """Lets the next process take the lease at once."""
        self._released.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_POLL_S)
        if not self._is_lost:
            with contextlib.suppress(Exception):  # one try: else it is taken over later
                self._object.replace(self._record(released=True), self._generation)

    def _renew_regularly(self) -> None:
        while not self._released.wait(self._renew_s) and not self._is_lost:
            with contextlib.suppress(OSError):  # `check` reports it if it lasts
                self._renew()

    def _renew(self) -> None:
        with self._lock:
            if not self._is_lost and not self._replace(self._generation):
                self._is_lost = True
                logging.error("%s: another process has taken over this run", self._folder)

    def _read(self) -> Versioned:
        return files.request(self._path, "read", self._object.read)

    def _record(self, released: bool = False) -> bytes:
        """The next content of the lease."""
        self._number += 1
        record = {
            "token": self._token,
            "number": self._number,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "machine": _machine(),
            "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            "released": released,
        }
        return json.dumps(record).encode()

    def _replace(self, generation: str) -> bool:
        """Writes a record of this process over one of `generation`; whether it did."""
        begin, content = time.monotonic(), self._record()

        def send() -> str:
            if new_generation := self._object.replace(content, generation):
                return new_generation
            # A request whose reply was lost has been executed: then the object is ours.
            now = self._object.read()
            return now.generation if parse_record(now.content).get("token") == self._token else ""

        new_generation = files.request(self._path, "renewed", send)
        if new_generation:
            self._generation, self._renewed_at = new_generation, begin
        return bool(new_generation)


@contextlib.contextmanager
def held_lease(folder: pathlib.Path) -> Iterator[Lease]:
    """Holds the lease of a run's folder in a bucket; raises as `Lease.acquire`."""
    lease = Lease(folder)
    lease.acquire()
    try:
        yield lease
    finally:
        lease.release()


def is_held(folder: pathlib.Path) -> bool:
    """Whether a process holds the lease of a folder; waits for its renewal if need be."""
    stored = conditional_object(folder / LEASE_FILE)
    first = files.request(folder / LEASE_FILE, "read", stored.read)
    deadline = time.monotonic() + 2 * RENEW_S
    while True:
        record = parse_record(first.content)
        if is_free(record) or _has_died_here(record) or time.monotonic() >= deadline:
            return False
        if _is_alive_here(record):
            return True
        time.sleep(_POLL_S / 2)
        now = files.request(folder / LEASE_FILE, "read", stored.read)
        if now.generation != first.generation:
            return not is_free(parse_record(now.content))


def parse_record(content: bytes) -> dict[str, Any]:
    """The record of a lease; empty if there is none or it is no record."""
    try:
        record = json.loads(content)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def is_free(record: dict[str, Any]) -> bool:
    """Whether nobody holds the lease."""
    return not record or bool(record.get("released"))


def describe(record: dict[str, Any]) -> str:
    """The holder and the time of its last renewal."""
    holder = f"process {record.get('process')} on {record.get('host')}"
    return f"{holder} (at work at {record.get('time')})" if record else "another process"


def _machine() -> str:
    """Identifies a machine since its start, and on it a namespace of process numbers."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_died_here(record: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that has ended: nobody need wait then."""
    return _is_of_this_machine(record) and not _process_exists(record.get("process"))


def _is_alive_here(record: dict[str, Any]) -> bool:
    return _is_of_this_machine(record) and _process_exists(record.get("process"))


def _is_of_this_machine(record: dict[str, Any]) -> bool:
    return bool(machine := _machine()) and record.get("machine") == machine


def _process_exists(number: Any) -> bool:
    if not isinstance(number, int):
        return True
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
