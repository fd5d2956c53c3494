"""Checkpoints in a bucket: complete with their seal, damage found, all or nothing."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.checkpoint import bucket_arrays, seal
from jaxrl_llm.checkpoint.saver import CheckpointError, Saver, load_tree, save_tree, tree_exists
from jaxrl_llm.checkpoint.seal import SEAL_FILE
from jaxrl_llm.config import CheckpointConfig
from jaxrl_llm.config.workdir import newest_step
from jaxrl_llm.storage import files

EXTRA = {"data": {"position": 12}}


def state(step: int) -> dict[str, jax.Array]:
    return {
        "w": jnp.arange(600.0).reshape(20, 30) * step,
        "b": jnp.full((3,), step, "bfloat16"),
    }


def abstract():
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state(1)
    )


def open_saver(folder, **settings) -> Saver:
    return Saver(folder / "checkpoints", CheckpointConfig(keep=2, **settings))


def check_equal(found, step: int) -> None:
    for name, array in state(step).items():
        assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes()


@pytest.fixture
def saved(s3_folder):
    """A folder with the steps 2 and 3."""
    writing = open_saver(s3_folder)
    for step in (2, 3):
        writing.save(step, state(step), EXTRA)
    writing.close()
    return s3_folder


@pytest.mark.slow
def test_the_newest_steps_are_kept(saved):
    writing = open_saver(saved)
    writing.save(4, state(4), EXTRA)
    writing.close()
    assert files.names(saved / "checkpoints") == ["3", "4"]


def test_a_step_is_read_back(saved):
    assert files.names(saved / "checkpoints") == ["2", "3"] and newest_step(saved) == 3
    assert [seal.damage(saved / "checkpoints" / step) for step in ("2", "3")] == ["", ""]
    reading = Saver(saved / "checkpoints", CheckpointConfig(), read_only=True)
    found, extra, step = reading.restore(abstract())
    assert (extra, step) == (EXTRA, 3)
    check_equal(found, 3)


@pytest.mark.slow
def test_a_step_without_its_seal_is_incomplete_and_written_again(saved):
    files.remove(saved / "checkpoints" / "3" / SEAL_FILE)  # Orbax's own mark of success stays
    assert newest_step(saved) == 2
    writing = open_saver(saved)
    assert writing.latest_step() == 2
    found, _, step = writing.restore(abstract())
    assert step == 2
    writing.save(3, state(7), EXTRA)
    writing.wait()
    found, _, step = writing.restore(abstract())
    assert step == 3
    check_equal(found, 7)
    writing.close()
    assert seal.damage(saved / "checkpoints" / "3") == ""  # nothing of the first attempt is left


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["changed", "missing", "half a seal"])
def test_a_damaged_step_is_reported_and_the_one_before_is_read(saved, damage, caplog):
    folder = saved / "checkpoints" / "3"
    name = max(files.files_below(folder / "arrays"))
    if damage == "changed":
        content = bytearray(files.read_bytes(folder / "arrays" / name))
        content[-1] ^= 1
        files.replace_bytes(folder / "arrays" / name, bytes(content))
    elif damage == "missing":
        files.remove(folder / "arrays" / name)
    else:
        files.replace_text(folder / SEAL_FILE, '{"meta/')
    writing = open_saver(saved)
    with caplog.at_level(logging.WARNING):
        found, _, step = writing.restore(abstract())
    assert step == 2
    check_equal(found, 2)
    assert "3: damaged, " in caplog.text
    assert files.names(saved / "checkpoints") == ["2"]
    writing.close()


@pytest.mark.slow
def test_a_folder_that_was_copied_from_a_bucket_can_be_checked(saved, tmp_path):
    local = tmp_path / "checkpoints" / "3"
    for name in files.files_below(saved / "checkpoints" / "3"):
        files.replace_bytes(local / name, files.read_bytes(saved / "checkpoints" / "3" / name))
    assert seal.damage(local) == ""
    reading = Saver(tmp_path / "checkpoints", CheckpointConfig(), read_only=True)
    check_equal(reading.restore(abstract())[0], 3)
    (local / "meta" / "metadata").write_text("{}")
    assert seal.damage(local).startswith("meta/metadata differs from its checksum")


@pytest.mark.slow
def test_a_folder_that_was_copied_to_a_bucket_can_be_checked(s3_folder, tmp_path):
    writing = open_saver(tmp_path)
    writing.save(1, state(1), EXTRA)
    writing.close()
    local, remote = tmp_path / "checkpoints" / "1", s3_folder / "checkpoints" / "1"
    for name in files.files_below(local):
        files.replace_bytes(remote / name, files.read_bytes(local / name))
    assert seal.damage(remote) == ""
    files.replace_text(remote / "meta" / "metadata", "{}")
    assert seal.damage(remote).startswith("meta/metadata differs from its checksum")


@pytest.mark.slow
def test_the_result_of_a_stage_is_complete_or_absent(s3_folder, monkeypatch):
    product = s3_folder / "warm_start" / "product"

    def fail(*_):
        raise OSError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(seal, "write_seal", fail)
        with pytest.raises(CheckpointError, match="killed here"):
            save_tree(product, state(1), EXTRA)
    assert files.exists(product) and not tree_exists(product)
    save_tree(product, state(2), EXTRA)
    found, extra = load_tree(product, abstract())
    check_equal(found, 2)
    assert extra == EXTRA and tree_exists(product)
    with pytest.raises(CheckpointError, match="exists"):
        save_tree(product, state(2), EXTRA)


@pytest.mark.slow
def test_nothing_is_saved_by_a_process_that_lost_the_run(s3_folder):
    taken = []

    def check_owner() -> None:
        if taken:
            raise RuntimeError("taken over")

    writing = Saver(s3_folder / "checkpoints", CheckpointConfig(), check_owner=check_owner)
    writing.save(1, state(1), EXTRA)
    writing.wait()
    taken.append(True)
    with pytest.raises(RuntimeError, match="taken over"):
        writing.save(2, state(2), EXTRA)
    assert newest_step(s3_folder) == 1


def test_a_store_that_cannot_be_written_is_reported(s3_folder, monkeypatch):
    writing = open_saver(s3_folder)
    monkeypatch.setattr(files, "_FIRST_PAUSE_S", 0.0)

    def fail(*_args, **_kwargs):
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(files.file_system(s3_folder), "pipe_file", fail)
    with pytest.raises(CheckpointError, match=r"checkpoints/1: could not be saved .*403 Forbidden"):
        writing.save(1, state(1), EXTRA)
    assert newest_step(s3_folder) == 0


def test_arrays_are_opened_by_the_driver_of_their_bucket(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    bucket_arrays.support_s3()
    build = bucket_arrays.tensorstore_utils.build_kvstore_tspec
    base = build("s3://bucket/a/b", use_ocdbt=True)["base"]
    assert (base["driver"], base["bucket"], base["path"]) == ("s3", "bucket", "a/b/")
    assert base["endpoint"] == "http://127.0.0.1:9" and base["s3_request_retries"]
    base = build("gs://bucket/a/b", use_ocdbt=True)["base"]
    assert (base["driver"], base["bucket"]) == ("gcs", "bucket") and base["gcs_request_retries"]
    assert build("/s3/a", use_ocdbt=True)["base"]["driver"] == "file"
