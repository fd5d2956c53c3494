"""Copies in memory: newer than the checkpoints after a crash, of this run only, gone at its end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.checkpoint import memory_copies
from jaxrl_llm.checkpoint.memory_copies import MemoryCopies
from jaxrl_llm.checkpoint.saver import CheckpointError, Saver
from jaxrl_llm.config import CheckpointConfig, ConfigError


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    monkeypatch.setenv(memory_copies.FOLDER_VARIABLE, str(folder))
    return folder


@pytest.fixture
def saver(tmp_path):
    """Starts the run again: a process that crashed closed nothing."""
    savers = []

    def start(name="run"):
        workdir = tmp_path / name
        workdir.mkdir(exist_ok=True)
        config = CheckpointConfig(every=2, memory_every=1)
        savers.append(Saver(workdir / "checkpoints", config, memory=MemoryCopies(workdir)))
        return savers[-1]

    yield start
    for each in savers:
        each.close()


def state(value, *spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return {
        "w": jax.device_put(jnp.full((8, 8), value) + jnp.arange(8.0), sharding),
        "n": jax.device_put(jnp.array(value, jnp.int32), NamedSharding(mesh, PartitionSpec())),
    }


def abstract(like):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)


def restored(saver, *spec):
    result, extra, step = saver.restore(abstract(state(0, *spec)))
    expected = state(step, *spec)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert result["w"].sharding == expected["w"].sharding
    assert extra == {"position": step}
    return step


def copies(memory):
    return sorted(path.name for path in memory.glob("*/*-*"))


def test_a_crashed_run_goes_on_from_the_newest_copy(saver, memory):
    run = saver()
    assert not run.has_steps
    run.save(2, state(2, "a"), {"position": 2})
    for step in (3, 4, 5):
        run.copy_to_memory(step, state(step, "a", "b"), {"position": step})
    run.wait()
    run._memory.wait()
    assert copies(memory) == ["4.0-1", "5.0-1"]  # the newest two
    again = saver()
    assert again.has_steps and restored(again, "b", "a") == 5
    # The copy of step 5 is damaged: the one before it. A newer checkpoint wins over both.
    (path,) = memory.glob("*/5.0-1")
    path.write_bytes(path.read_bytes()[:-1])
    again = saver()
    assert restored(again) == 4
    assert copies(memory) == ["4.0-1"]  # this start takes step 5 again
    again.save(6, state(6), {"position": 6})
    again.wait()
    assert restored(saver()) == 6
    saver().close()
    assert copies(memory) == []  # a run that ends leaves nothing in memory


def test_a_copy_alone_is_enough(saver):
    run = saver()
    run.copy_to_memory(1, state(1, "a"), {"position": 1})
    run._memory.wait()
    again = saver()
    assert again.latest_step() == 0
    assert again.has_steps and restored(again) == 1


def test_another_run_in_the_same_folder_finds_nothing(saver, tmp_path):
    run = saver()
    run.copy_to_memory(1, state(1), {"position": 1})
    run._memory.wait()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert not saver("run").has_steps
    assert restored(saver("moved")) == 1  # the copies are of the run, wherever its folder is


def test_a_stop_leaves_only_checkpoints(saver, memory):
    run = saver()
    run.copy_to_memory(1, state(1), {"position": 1})
    run.ensure_saved(1, state(1), {"position": 1})
    assert copies(memory) == [] and restored(saver()) == 1


def test_other_arrays_are_refused(saver):
    run = saver()
    run.copy_to_memory(1, state(1), {"position": 1})
    run._memory.wait()
    with pytest.raises(CheckpointError, match="copy of step 1: holds other arrays"):
        saver().restore(abstract({"w": state(0)["w"]}))


def test_a_full_memory_is_a_warning(saver, memory, monkeypatch, caplog):
    run = saver()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    run.copy_to_memory(1, state(1), {"position": 1})
    assert "no copy in memory of step 1" in caplog.text
    assert copies(memory) == [] and not list(memory.glob("*/*.tmp"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(memory_copies.FOLDER_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"memory_every: .* cannot be made .*set JAXRL_LLM_MEM"):
        MemoryCopies(tmp_path)


def test_complete_steps_have_a_file_of_each_process():
    hosts = [["7.0-2", "8.0-2", "8.1-2"], ["7.0-2", "9.0-2", "9.1-4"], []]
    assert memory_copies._complete_steps(hosts) == {(8, 2): {"8.0-2", "8.1-2"}}
