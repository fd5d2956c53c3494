"""Saving to a disk that is full or read-only: said, nothing good is lost, and on as configured.

The disk is a real one, of a few megabytes in memory; mounting it needs root.
"""

import os
import pathlib
import subprocess

import jax
import numpy as np
import pytest
import runs

from jaxrl_llm.checkpoint.saver import CheckpointError, Saver
from jaxrl_llm.config import CheckpointConfig, MetricsConfig
from jaxrl_llm.metrics.writer import Writer

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def state(step: int):
    return {"w": jax.numpy.asarray(np.random.default_rng(step).normal(size=MIB // 8), np.float32)}


def layout():
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state(1)
    )


def fill(disk: pathlib.Path) -> None:
    with pytest.raises(OSError), (disk / "ballast").open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()


def remount(disk: pathlib.Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True)


@pytest.mark.parametrize("fault", ["full", "read_only"])
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_checkpoint_that_cannot_be_written(disk, fault, on_failure, caplog):
    saver = Saver(disk / "checkpoints", CheckpointConfig(on_failure=on_failure))
    saver.save(1, state(1), {"step": 1})
    saver.wait()
    if fault == "full":
        fill(disk)
    else:
        remount(disk, "ro")
    said = ""
    try:
        saver.save(2, state(2), {"step": 2})
        saver.wait()
    except CheckpointError as error:
        said = str(error)
    assert bool(said) == (on_failure == "stop")
    said = said or caplog.text
    assert f"{disk}/checkpoints/2: could not be saved" in said and "check free space" in said
    assert ("No space left" if fault == "full" else "Read-only") in said
    assert saver.latest_step() == 1
    if fault == "full":
        (disk / "ballast").unlink()
    else:
        remount(disk, "rw")
    saver.save(3, state(3), {"step": 3})
    saver.close()
    found, extra, step = Saver(disk / "checkpoints", CheckpointConfig()).restore(layout())
    assert (extra, step) == ({"step": 3}, 3)
    assert np.asarray(found["w"]).tobytes() == np.asarray(state(3)["w"]).tobytes()
    assert (
        np.asarray(
            Saver(disk / "checkpoints", CheckpointConfig()).restore(layout(), step=1)[0]["w"]
        ).tobytes()
        == np.asarray(state(1)["w"]).tobytes()
    )


def test_numbers_wait_for_the_disk(disk, caplog):
    """With `continue` a line that could not be written comes with the next one."""
    config = MetricsConfig(console=False, tensorboard=False, on_failure="continue")
    with Writer(disk, config) as writer:
        writer.write(1, {"a": 1.0})
        fill(disk)
        # What is left of the last page of the file is still free.
        for step in range(2, 200):
            writer.write(step, {"a": float(step), "b" * 100: 1.0})
        assert "could not be written" in caplog.text
        kept = (disk / "metrics.jsonl").read_bytes()
        assert kept.endswith(b"}}\n")
        (disk / "ballast").unlink()
        writer.write(200, {"a": 200.0})
    assert list(runs.metrics(disk)) == list(range(1, 201))


def test_numbers_that_cannot_be_written_end_the_run(disk):
    config = MetricsConfig(console=False, tensorboard=False)
    with Writer(disk, config) as writer:
        fill(disk)
        with pytest.raises(OSError, match=r"No space left .*metrics\.jsonl"):
            for step in range(1, 200):
                writer.write(step, {"b" * 100: 1.0})
    (disk / "ballast").unlink()
    assert (disk / "metrics.jsonl").read_bytes().endswith((b"}}\n", b""))
