"""A run in a bucket ends up as one on disk: killed at any point, and by a store that fails.

The servers are moto's (S3) and gcp-storage-emulator's (GCS), each in a process of its own.
"""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import time

import fsspec
import processes
import pytest
import runs
import starter
from bucket_servers import BUCKET, FaultyProxy, client_environment, running_server
from test_kill_points import SETTINGS, Starter, check_same, end_at

from jaxrl_llm.checkpoint import seal

KILL_POINTS = tuple(name for name in starter.OF_BUCKETS if name != "save_begun")
FEW = ("object_half", "item_complete", "seal_half")
LEARNED = "critic/score/mean"


@pytest.fixture
def endpoint(kind):
    pytest.importorskip({"s3": "moto", "gs": "gcp_storage_emulator"}[kind])
    with running_server(kind) as address:
        yield address


@pytest.fixture
def download(kind, endpoint):
    """A function that copies a folder of the bucket to a local one."""
    options = {"s3": {"endpoint_url": endpoint, "key": "test", "secret": "test"}}
    options["gs"] = {"endpoint_url": endpoint, "token": "anon"}

    def copy(address: str, folder: pathlib.Path) -> None:
        files = fsspec.filesystem(kind, **options[kind], use_listings_cache=False)
        prefix = address.partition("://")[2] + "/"
        for name in files.find(prefix):
            target = folder / name.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files.cat_file(name))

    return copy


def reference(tmp_path, cache, settings) -> pathlib.Path:
    """A run on disk that nothing disturbs."""
    folder = tmp_path / "reference"
    with Starter("grpo_tiny", folder, cache, **settings) as start:
        assert start.run() == 0, start.log.read_text()[-3000:]
    return folder


@contextlib.contextmanager
def started_in_bucket(kind, endpoint, tmp_path, cache, settings, monkeypatch):
    for name, value in client_environment(kind, endpoint).items():
        monkeypatch.setenv(name, value)
    address = f"{kind}://{BUCKET}/team/run"
    with Starter("grpo_tiny", tmp_path / "run", cache, address, **settings) as start:
        yield start, address


def test_every_point_names_a_function():
    for point, (owner, name, when, at) in starter.OF_BUCKETS.items():
        assert callable(getattr(owner, name, None)), point
        assert when in ("before", "after", "half") and at >= 1, point
    assert len(KILL_POINTS) >= 10


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        pytest.param("s3", FEW, marks=pytest.mark.slow),
        pytest.param("gs", FEW, marks=pytest.mark.nightly),
        pytest.param("s3", KILL_POINTS, marks=pytest.mark.nightly),
        pytest.param("gs", KILL_POINTS, marks=pytest.mark.nightly),
    ],
    ids=["few-s3", "few-gs", "all-s3", "all-gs"],
)
def test_killed_at_points(kind, points, endpoint, download, tmp_path, cache, monkeypatch):
    signals = itertools.cycle(("SIGKILL", "SIGKILL", "SIGTERM"))
    moments = [("save_begun", "SIGTERM"), *zip(points, signals, strict=False)]
    last = len(moments) // 2 * 2 + 4
    settings = {**SETTINGS, "trainer.num_steps": last, "metrics.tensorboard": True}
    expected = reference(tmp_path, cache, settings)
    with started_in_bucket(kind, endpoint, tmp_path, cache, settings, monkeypatch) as (
        start,
        address,
    ):
        for point, number in moments:
            end_at(start, point, number)
        assert start.run() == 0, start.log.read_text()[-3000:]
    download(address, tmp_path / "run")
    check_same(tmp_path / "run", expected, last, LEARNED)
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


@pytest.mark.parametrize("kind", ["s3", pytest.param("gs", marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_a_store_that_fails_a_fifth_of_all_requests(
    endpoint, download, kind, tmp_path, cache, monkeypatch
):
    settings = {**SETTINGS, "trainer.num_steps": 6}
    expected = reference(tmp_path, cache, settings)
    proxy = FaultyProxy(endpoint, share=0.2)
    with started_in_bucket(kind, proxy.endpoint, tmp_path, cache, settings, monkeypatch) as (
        start,
        address,
    ):
        end_at(start, "save_begun", "SIGTERM")
        assert start.run() == 0, start.log.read_text()[-3000:]
    assert proxy.num_failures > 20, (proxy.num_failures, proxy.num_requests)
    download(address, tmp_path / "run")
    check_same(tmp_path / "run", expected, 6, LEARNED)


@pytest.mark.nightly  # minutes: the store's bounded retries
@pytest.mark.parametrize("kind", ["s3"])
def test_a_store_that_is_lost_ends_the_run_and_its_return_resumes_it(
    endpoint, download, kind, tmp_path, cache, monkeypatch
):
    settings = {**SETTINGS, "trainer.num_steps": 6}
    expected = reference(tmp_path, cache, settings)
    proxy = FaultyProxy(endpoint, share=0.0)
    with started_in_bucket(kind, proxy.endpoint, tmp_path, cache, settings, monkeypatch) as (
        start,
        address,
    ):
        end_at(start, "save_begun", "SIGTERM")
        send_order(start)
        steps = len(start.log.read_text().split("step "))
        wait_for(lambda: len(start.log.read_text().split("step ")) > steps)
        proxy.share = 1.0
        assert int(start._process.stdout.readline()) == 1
        said = start.log.read_text()
        assert "could not be" in said and "credentials" in said, said[-3000:]
        assert "Traceback" not in said
        proxy.share = 0.0
        assert start.run() == 0, start.log.read_text()[-3000:]
    download(address, tmp_path / "run")
    check_same(tmp_path / "run", expected, 6, LEARNED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3"])
def test_a_second_writer_is_refused(endpoint, kind, tmp_path, cache, monkeypatch):
    settings = {**SETTINGS, "trainer.num_steps": 100_000}
    with started_in_bucket(kind, endpoint, tmp_path, cache, settings, monkeypatch) as (first, _):
        send_order(first)
        wait_for(lambda: "step 1/" in first.log.read_text())
        with Starter(
            "grpo_tiny", tmp_path / "second", cache, f"{kind}://{BUCKET}/team/run", **settings
        ) as second:
            assert second.run() == 1
        said = second.log.read_text()
        assert "is writing into it" in said and "process " in said and "UTC" in said, said[-2000:]
        assert "Traceback" not in said
        os.kill(child_of(first), signal.SIGTERM)
        assert int(first._process.stdout.readline()) == 75


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.parametrize("kind", ["s3"])
def test_one_process_goes_on_from_a_checkpoint_of_two(
    endpoint, download, kind, tmp_path, cache, monkeypatch
):
    for name, value in client_environment(kind, endpoint).items():
        monkeypatch.setenv(name, value)
    settings = {**SETTINGS, "trainer.num_steps": 2}
    command = [runs.ROOT / "launch" / "train.py", *runs.flags("grpo_tiny", settings)]
    address = f"{kind}://{BUCKET}/two"
    for folder in (tmp_path / "reference", address):
        processes.run([*command, f"--workdir={folder}"], 2, 1, cache)
    settings["trainer.num_steps"] = 4
    for folder, place in ((tmp_path / "reference", ""), (tmp_path / "run", address)):
        with Starter("grpo_tiny", folder, cache, place, **settings) as start:
            assert start.run() == 0, start.log.read_text()[-3000:]
            assert "resumed after step 2" in start.log.read_text()
    download(address, tmp_path / "run")
    check_same(tmp_path / "run", tmp_path / "reference", 4, LEARNED)
    assert seal.damage(tmp_path / "run" / "checkpoints" / "2") == ""


def send_order(start: Starter) -> None:
    """Starts the run of a `Starter` without waiting for its end."""
    order = {"arguments": start._arguments, "point": "", "signal": "", "log": str(start.log)}
    start._process.stdin.write(json.dumps(order) + "\n")
    start._process.stdin.flush()


def child_of(start: Starter) -> int:
    number = start._process.pid
    children = pathlib.Path(f"/proc/{number}/task/{number}/children").read_text().split()
    return int(children[0])


def wait_for(condition) -> None:
    deadline = time.monotonic() + 240
    while True:
        with contextlib.suppress(OSError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)
