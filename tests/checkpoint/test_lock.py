"""A folder has one writer at a time, and is free again when that has ended, however it ended."""

import errno
import fcntl
import logging
import os
import pathlib
import subprocess
import sys

import pytest

from jaxrl_llm.checkpoint.lock import LOCK_FILE, LockError, OccupiedError, exclusive_lock, is_held

HOLDER = """
import pathlib, sys, time
from jaxrl_llm.checkpoint.lock import exclusive_lock
with exclusive_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_one_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "a" / "run"
    with exclusive_lock(folder):
        me = f"process {os.getpid()} on "
        with pytest.raises(OccupiedError, match=rf"run: {me}.*--workdir"), exclusive_lock(folder):
            pass
        assert (folder / LOCK_FILE).read_text().startswith(me)  # the refused one left it alone
        with exclusive_lock(tmp_path / "b"):
            pass
    assert list(folder.iterdir()) == []
    with exclusive_lock(folder):
        pass


def test_a_process_that_is_killed_lets_go(tmp_path):
    command = [sys.executable, "-c", HOLDER, tmp_path]
    root = pathlib.Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(OccupiedError, match=f"process {process.pid} on "),
            exclusive_lock(tmp_path),
        ):
            pass
        process.kill()
    with exclusive_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """The holder removed the file between this one's opening and its locking."""
    flock, removed = fcntl.flock, []

    def late(file, how):
        if not removed:
            removed.append(True)
            (tmp_path / LOCK_FILE).unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with exclusive_lock(tmp_path), pytest.raises(OccupiedError), exclusive_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    def unknown(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unknown)
    with caplog.at_level(logging.WARNING), exclusive_lock(tmp_path):
        pass
    assert "no locks here" in caplog.text


def test_only_a_lock_of_another_holder_is_held(tmp_path):
    assert not is_held(tmp_path)
    (tmp_path / LOCK_FILE).touch()
    assert not is_held(tmp_path)
    with exclusive_lock(tmp_path):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


@pytest.mark.parametrize(
    "number, remedy",
    [
        (errno.ENOLCK, "use a --workdir on a file system with locks"),
        (errno.EIO, "make it readable for this user"),
    ],
)
def test_a_lock_that_cannot_be_tested_is_an_error(tmp_path, monkeypatch, number, remedy):
    def fail(file, how):
        raise OSError(number, os.strerror(number))

    (tmp_path / LOCK_FILE).touch()
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(LockError) as raised:
        is_held(tmp_path)
    for part in (str(tmp_path / LOCK_FILE), os.strerror(number), remedy):
        assert part in str(raised.value)


def test_a_folder_in_place_of_the_lock_is_an_error(tmp_path):
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(LockError, match="Is a directory; so it is unknown whether a run writes"):
        is_held(tmp_path)
