"""A lease has one holder, who keeps it while he renews it and loses it when he dies."""

import json
import pathlib
import subprocess
import sys
import threading
import time
from concurrent import futures

import pytest
from bucket_servers import BUCKET, client_environment, running_server
from etils import epath

from jaxrl_llm.storage import files, lease
from jaxrl_llm.storage.files import StorageError
from jaxrl_llm.storage.lease import Lease, OccupiedError, Versioned

FOLDER = epath.Path("s3://runs/team/a")
TTL_S = 0.5


class MemoryObject:
    """A conditional object in memory; `faults` are raised by the next requests, after execution."""

    def __init__(self):
        self.content, self.number = b"", 0
        self.faults: list[Exception] = []
        self.is_down = False
        self._lock = threading.Lock()

    def read(self) -> Versioned:
        self._fail()
        return Versioned(self.content, str(self.number or ""))

    def replace(self, content: bytes, generation: str) -> str:
        with self._lock:
            if self.is_down:
                raise OSError("503")
            if generation != str(self.number or ""):
                return ""
            self.content, self.number = content, self.number + 1
            self._fail()
            return str(self.number)

    def _fail(self) -> None:
        if self.is_down:
            raise OSError("503")
        if self.faults:
            raise self.faults.pop()


@pytest.fixture
def stored() -> MemoryObject:
    return MemoryObject()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(files, "_FIRST_PAUSE_S", 0.0)


def make_lease(stored, renew_s: float = 0.05) -> Lease:
    return Lease(FOLDER, stored, renew_s=renew_s, ttl_s=TTL_S)


def record_of_another_host(**changes) -> bytes:
    record = {
        "token": "other",
        "number": 7,
        "host": "tpu-vm-3",
        "process": 4711,
        "machine": "another",
        "time": "2026-01-02 03:04:05 UTC",
        "released": False,
    }
    return json.dumps(record | changes).encode()


def test_a_second_writer_is_refused_with_holder_and_time(stored):
    first = make_lease(stored)
    first.acquire()
    with pytest.raises(OccupiedError) as raised:
        make_lease(stored).acquire()
    message = str(raised.value)
    record = lease.parse_record(stored.content)
    assert message.startswith(f"s3://runs/team/a: process {record['process']} on {record['host']}")
    assert "at work at 20" in message and "UTC" in message and "--workdir" in message
    first.check()
    first.release()
    begin = time.monotonic()
    second = make_lease(stored)
    second.acquire()
    assert time.monotonic() - begin < TTL_S  # a released lease is free at once
    second.release()


def test_the_lease_of_a_dead_host_is_taken_over(stored):
    stored.replace(record_of_another_host(), "")
    begin = time.monotonic()
    heir = make_lease(stored)
    heir.acquire()
    assert time.monotonic() - begin >= TTL_S
    heir.check()
    heir.release()


def test_a_killed_process_of_this_machine_is_not_waited_for(stored):
    stored.replace(record_of_another_host(machine=lease._machine(), process=2**22 + 1), "")
    begin = time.monotonic()
    heir = make_lease(stored)
    heir.acquire()
    assert time.monotonic() - begin < TTL_S / 2
    heir.release()


def test_a_lease_is_taken_over_within_a_minute():
    assert lease.TTL_S + lease._POLL_S + lease.RENEW_S < 60
    assert lease.TTL_S > 4 * lease.RENEW_S  # a few renewals may fail


def test_one_of_several_takes_over(stored):
    stored.replace(record_of_another_host(), "")
    leases = [make_lease(stored) for _ in range(8)]

    def acquire(one: Lease) -> bool:
        try:
            one.acquire()
        except OccupiedError:
            return False
        return True

    with futures.ThreadPoolExecutor(8) as pool:
        won = list(pool.map(acquire, leases))
    assert won.count(True) == 1
    for one, has_won in zip(leases, won, strict=True):
        if has_won:
            one.release()


def test_a_holder_learns_that_another_has_taken_over(stored):
    holder = make_lease(stored)
    holder.acquire()
    while True:  # a renewal may come in between
        if stored.replace(record_of_another_host(), str(stored.number)):
            break
    for _ in range(200):
        if holder._is_lost:
            break
        time.sleep(0.01)
    with pytest.raises(OccupiedError, match=r"process 4711 on tpu-vm-3 .* has taken over this run"):
        holder.check()
    content = stored.content
    holder.release()
    assert stored.content == content  # what is not ours is left alone


def test_a_renewal_whose_reply_was_lost_counts(stored):
    holder = make_lease(stored, renew_s=100.0)
    stored.faults = [ConnectionError("reply lost")]  # of the first creation, which was executed
    stored.read = lambda: Versioned(stored.content, str(stored.number or ""))
    holder.acquire()
    stored.faults = [ConnectionError("reply lost")]
    holder._renew()
    holder.check()
    assert not holder._is_lost
    holder.release()


def test_an_outage_that_nobody_used_is_survived(stored):
    holder = make_lease(stored)
    holder.acquire()
    stored.is_down = True
    time.sleep(1.5 * TTL_S)
    with pytest.raises(StorageError, match="could not be renewed"):
        holder.check()
    stored.is_down = False
    holder.check()
    holder.release()


@pytest.mark.parametrize("content", [b"", b"{half", b"[1]"])
def test_what_is_no_record_is_replaced(stored, content):
    if content:
        stored.replace(content, "")
    holder = make_lease(stored)
    holder.acquire()
    holder.release()


def conditional_replacements(path: pathlib.Path) -> None:
    stored = lease.conditional_object(path)
    assert stored.read() == Versioned(b"", "")
    first = stored.replace(b"1", "")
    assert first and not stored.replace(b"x", "")
    assert stored.read() == Versioned(b"1", first)
    second = stored.replace(b"2", first)
    assert second and second != first and not stored.replace(b"x", first)
    assert stored.read() == Versioned(b"2", second)


def test_objects_of_s3_are_replaced_conditionally(s3_folder):
    conditional_replacements(s3_folder / "lease")


def test_whether_a_lease_in_s3_is_held(s3_folder):
    assert not lease.is_held(s3_folder)
    with lease.held_lease(s3_folder) as held:
        held.check()
        assert lease.is_held(s3_folder)
    assert not lease.is_held(s3_folder)


@pytest.mark.slow
def test_objects_of_gcs_are_replaced_conditionally(monkeypatch):
    """The emulator leaves conditions out; `bucket_servers` adds them."""
    pytest.importorskip("gcp_storage_emulator")
    with running_server("gs") as endpoint:
        for name, value in client_environment("gs", endpoint).items():
            monkeypatch.setenv(name, value)
        conditional_replacements(files.run_path(f"gs://{BUCKET}/a/lease"))


HOLDER = """
import sys, time
from jaxrl_llm.storage import files, lease
lease._machine = lambda: "another machine"
with lease.held_lease(files.run_path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.multihost
def test_the_lease_of_a_killed_process_elsewhere_is_taken_over_within_a_minute(s3_folder):
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, "-c", HOLDER, str(s3_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(OccupiedError, match=f"process {process.pid} on "):
            Lease(s3_folder).acquire()
        process.kill()
    begin = time.monotonic()
    with lease.held_lease(s3_folder) as held:
        assert time.monotonic() - begin < 60.0
        held.check()
