"""A step comes back bit for bit, on any mesh; a save that fails harms nothing before it."""

import dataclasses
import hashlib
import json
import logging
import math
import pathlib
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl_llm.checkpoint import seal
from jaxrl_llm.checkpoint.saver import CheckpointError, Saver, load_tree, save_tree
from jaxrl_llm.checkpoint.seal import SEAL_FILE
from jaxrl_llm.config import CheckpointConfig

ROOT = pathlib.Path(__file__).parents[2]
EXTRA = {"data": {"position": 12, "order": [3, 1, 2]}, "kl_coef": 0.1, "empty": {}}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    params: Any
    optimizer: Any
    multiplier: Any
    none: Any = ()


def sharded(shape: tuple[int, ...], axes: tuple[str, ...], spec: tuple[Any, ...]) -> NamedSharding:
    return NamedSharding(jax.make_mesh(shape, axes), PartitionSpec(*spec))


def random_state(seed: int, sharding: Any) -> State:
    """Arrays of all bit patterns that matter: negative zero, NaN and denormal numbers too."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(16, 24)).astype(np.float32)
    weights[0, :4] = [-0.0, np.nan, np.inf, 1e-42]
    params = {
        "layers": {"w": jax.device_put(weights, sharding)},
        "scale": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
    }
    return State(
        params=params,
        optimizer=optax.adamw(1e-3).init(params),
        multiplier=jnp.float32(rng.normal()),
    )


def abstract(state: Any, sharding_of: Any = lambda leaf: leaf.sharding) -> Any:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding_of(a)), state
    )


def assert_same_bits(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


FSDP = ((8,), ("fsdp",), ("fsdp",))


def test_round_trip_is_bitwise(tmp_path):
    state = random_state(0, sharded(*FSDP))
    saver = Saver(tmp_path, CheckpointConfig())
    assert saver.latest_step() == 0
    saver.save(3, state, EXTRA)
    saver.wait()
    assert saver.latest_step() == 3
    restored, extra, step = Saver(tmp_path, CheckpointConfig()).restore(abstract(state))
    assert_same_bits(restored, state)
    assert (extra, step) == (EXTRA, 3)
    assert restored.params["layers"]["w"].sharding == state.params["layers"]["w"].sharding


@pytest.mark.parametrize(
    "sharding",
    [
        lambda: sharded((2, 2), ("fsdp", "tensor"), ("fsdp", "tensor")),
        lambda: sharded((2, 2), ("fsdp", "tensor"), (None, ("tensor", "fsdp"))),
        lambda: SingleDeviceSharding(jax.devices()[5]),
    ],
    ids=["2x2", "2x2_transposed", "single"],
)
def test_restores_on_another_mesh(tmp_path, sharding):
    state = random_state(1, sharded(*FSDP))
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(1, state, {})
    target = sharding()
    replicated = NamedSharding(target.mesh, PartitionSpec()) if hasattr(target, "mesh") else target
    layout = abstract(state, lambda leaf: target if leaf.ndim == 2 else replicated)
    restored, _, _ = saver.restore(layout)
    assert_same_bits(restored, state)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(layout), strict=True):
        assert got.sharding == want.sharding


def test_state_may_be_donated_and_deleted_when_save_returns(tmp_path):
    """Large enough that the file is still being written while the memory is used again."""
    sharding = sharded(*FSDP)
    state = {
        str(i): jax.device_put(np.full((8, 1 << 18), i, np.float32), sharding) for i in range(8)
    }
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda a: a * 0 - 1, tree), donate_argnums=0)
    layout = abstract(state)
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(1, state, {})
    after = jax.block_until_ready(overwrite(state))
    for leaf in jax.tree.leaves((state, after)):
        # A CPU array that the writer still reads is copied by the donation and not given up.
        if not leaf.is_deleted():
            leaf.delete()
    reused = [jax.device_put(np.full((8, 1 << 18), -7, np.float32), sharding) for _ in range(16)]
    jax.block_until_ready(reused)
    restored, _, _ = saver.restore(layout)
    for name, leaf in restored.items():
        assert (np.asarray(leaf) == int(name)).all()


def test_a_saved_state_is_updated_in_its_own_memory(tmp_path):
    """A save must not cost a copy of the state: released arrays are donated as ever."""
    update = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)
    state = update({"a": jnp.zeros((64, 64)), "b": jnp.zeros((2048,))})
    saver = Saver(tmp_path, CheckpointConfig())
    for step in (1, 2):
        places = jax.tree.map(lambda a: a.unsafe_buffer_pointer(), state)
        saver.save(step, state, {})
        saver.wait_before_donation()
        state = update(state)
        assert jax.tree.map(lambda a: a.unsafe_buffer_pointer(), state) == places
    saver.close()


def test_arrays_are_not_compressed(tmp_path):
    """Compressing them would take twice their memory while a step is learned."""
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(1, {"zeros": jnp.zeros((1024, 256))}, {})
    saver.close()
    assert sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()) > 1024 * 256 * 4


def test_keeps_by_count_and_is_due_on_multiples_and_at_the_end(tmp_path):
    saver = Saver(tmp_path, CheckpointConfig(every=2, keep=2))
    state = {"w": jnp.arange(4.0)}
    last = 5
    for step in range(1, last + 1):
        if saver.should_save(step, last):
            saver.save(step, {"w": state["w"] + step}, {"step": step})
    saver.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]
    assert not Saver(tmp_path / "b", CheckpointConfig(every=0)).should_save(4, 5)
    assert Saver(tmp_path / "b", CheckpointConfig(every=0)).should_save(5, 5)


@pytest.mark.parametrize("mode, best", [("max", 2), ("min", 5)])
def test_keeps_the_best_beside_the_newest(tmp_path, mode, best):
    config = CheckpointConfig(every=3, keep=1, best_metric="score", best_mode=mode)
    scores = {1: 0.5, 2: 0.9, 3: math.nan, 5: 0.1, 7: 0.5, 8: 0.2}
    saver = Saver(tmp_path, config)
    saved = []
    for step in range(1, 10):
        if step == 4:  # killed and started again
            saver.close()
            saver = Saver(tmp_path, config)
            assert saver.restore(abstract({"w": jnp.zeros(4)}))[2] == 3
        if saver.should_save(step, 9, {"score": scores[step]} if step in scores else {}):
            saver.save(step, {"w": jnp.full(4, float(step))}, {})
            saved.append(step)
    saver.close()
    assert saved == [1, 2, 3, 6, 9] if mode == "max" else [1, 3, 5, 6, 9]
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(best), "9"]
    reader = Saver(tmp_path, config, read_only=True)
    assert reader.best_step() == best
    state, _, step = reader.restore(abstract({"w": jnp.zeros(4)}), step=best)
    assert step == best and (np.asarray(state["w"]) == best).all()


def test_a_reader_changes_nothing(tmp_path):
    """The run may be saving: what looks half-written is not the reader's to remove."""
    state = {"w": jnp.arange(8.0)}
    saver = Saver(tmp_path, CheckpointConfig())
    for step in (1, 2):
        saver.save(step, state, {})
    saver.close()
    flip(largest_file(tmp_path / "2"))
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    reader = Saver(tmp_path, CheckpointConfig(), read_only=True)
    assert reader.restore(abstract(state))[2] == 1
    reader.close()
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "3.orbax-checkpoint-tmp"}


def largest_file(step: pathlib.Path) -> pathlib.Path:
    files = (path for path in step.rglob("*") if path.is_file() and path.name != SEAL_FILE)
    return max(files, key=lambda path: path.stat().st_size)


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, named",
    [
        (lambda step: cut(largest_file(step)), "differs from its checksum"),
        (lambda step: flip(largest_file(step)), "differs from its checksum"),
        (lambda step: flip(step / "meta" / "metadata"), "meta/metadata differs"),
        (lambda step: largest_file(step).unlink(), "cannot be read"),
        (lambda step: cut(step / SEAL_FILE), "sha256.json is not JSON"),
        (lambda step: (step / SEAL_FILE).unlink(), "sha256.json is missing"),
    ],
    ids=["cut", "bit", "json_bit", "removed", "seal", "unsealed"],
)
def test_a_damaged_newest_step_falls_back_to_the_one_before(tmp_path, caplog, damage, named):
    states = {step: random_state(step, sharded(*FSDP)) for step in (1, 2)}
    saver = Saver(tmp_path, CheckpointConfig())
    for step, state in states.items():
        saver.save(step, state, {"step": step})
    saver.close()
    damage(tmp_path / "2")

    saver = Saver(tmp_path, CheckpointConfig())
    with caplog.at_level(logging.WARNING):
        restored, extra, step = saver.restore(abstract(states[1]))
    assert (extra, step) == ({"step": 1}, 1)
    assert_same_bits(restored, states[1])
    assert named in caplog.text and str(tmp_path / "2") in caplog.text
    # The run goes on and writes the step again.
    saver.save(2, states[2], {"step": 2})
    saver.wait()
    assert_same_bits(saver.restore(abstract(states[2]))[0], states[2])


def test_only_damaged_steps_is_an_error_not_a_fresh_start(tmp_path):
    state = {"w": jnp.arange(8.0)}
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(1, state, {})
    saver.wait()
    flip(largest_file(tmp_path / "1"))
    with pytest.raises(CheckpointError, match=r"all steps are damaged \(1\)"):
        saver.restore(abstract(state))


def test_a_step_that_is_damaged_twice_is_stepped_over_twice(tmp_path):
    state = {"w": jnp.arange(8.0)}
    for _ in range(2):
        saver = Saver(tmp_path, CheckpointConfig())
        for step in range(saver.latest_step() + 1, 3):
            saver.save(step, state, {})
        saver.wait()
        flip(largest_file(tmp_path / "2"))
        assert saver.restore(abstract(state))[2] == 1
        saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "damaged.2"]


@pytest.mark.parametrize("sealed", [False, True])
def test_checkpoint_killed_before_its_rename_does_not_exist(tmp_path, monkeypatch, sealed):
    folder, state, write = tmp_path / "run", {"w": jnp.arange(8.0)}, seal.write_seal
    killed: list[pathlib.Path] = []

    def write_and_copy(*arguments):
        if sealed:
            write(*arguments)
        killed.append(tmp_path / f"killed_{len(killed)}")
        shutil.copytree(folder, killed[-1])
        if not sealed:
            write(*arguments)

    saver = Saver(folder / "steps", CheckpointConfig())
    saver.save(1, state, {})
    saver.wait()
    monkeypatch.setattr(seal, "write_seal", write_and_copy)
    saver.save(2, state, {})
    saver.close()
    save_tree(folder / "tree", state, {})
    monkeypatch.undo()

    in_step, in_tree = killed
    assert (in_step / "steps" / "2.orbax-checkpoint-tmp.sealed" / SEAL_FILE).exists() == sealed
    saver = Saver(in_step / "steps", CheckpointConfig())
    assert saver.restore(abstract(state))[2] == 1
    saver.save(2, state, {})
    saver.close()
    assert sorted(path.name for path in (in_step / "steps").iterdir()) == ["1", "2"]
    assert not (in_tree / "tree").exists()
    save_tree(in_tree / "tree", state, {})
    assert_same_bits(load_tree(in_tree / "tree", abstract(state))[0], state)
    assert sorted(path.name for path in in_tree.iterdir()) == ["steps", "tree"]


def test_several_files_are_hashed_at_once(tmp_path, monkeypatch):
    for i in range(4):
        (tmp_path / str(i)).write_bytes(bytes([i]) * 1000)
    plain, together = seal._digest, threading.Barrier(2)
    monkeypatch.setattr(seal, "_POOL", futures.ThreadPoolExecutor(2))

    def with_another(path):
        together.wait(30)
        return plain(path)

    monkeypatch.setattr(seal, "_digest", with_another)
    found = seal.FolderDigests(epath.Path(tmp_path)).digests(epath.Path(tmp_path))
    wanted = {str(i): hashlib.sha256(bytes([i]) * 1000).hexdigest() for i in range(4)}
    assert found == wanted
    (tmp_path / SEAL_FILE).write_text('{"0')  # of a process that was killed
    seal.write_seal(epath.Path(tmp_path), seal.FolderDigests(epath.Path(tmp_path)))
    assert json.loads((tmp_path / SEAL_FILE).read_text()) == wanted
    assert seal.damage(epath.Path(tmp_path)) == ""


def test_files_are_hashed_while_others_are_written(tmp_path, monkeypatch):
    """Once each, but for one that changed meanwhile, and under the names they have at the end."""
    folder = tmp_path / f"1{seal._TMP_SUFFIX}"
    part = folder / f"arrays{seal._TMP_SUFFIX}"
    part.mkdir(parents=True)
    plain, hashed = seal._digest, []
    monkeypatch.setattr(seal, "_EARLY_BYTES", 100)
    monkeypatch.setattr(seal, "_POLL_S", 0.01)
    monkeypatch.setattr(seal, "_digest", lambda path: hashed.append(path.name) or plain(path))
    (part / "large").write_bytes(bytes(200))
    (part / "changed").write_bytes(bytes(200))
    (part / "small").write_bytes(b"a")
    digests = seal.FolderDigests(epath.Path(folder))
    digests.watch()
    while len(hashed) < 2:  # nothing is complete yet
        time.sleep(0.01)
    (part / "changed").write_bytes(bytes(300))
    part.rename(folder / "arrays")
    digests.hash_large_files()
    folder.rename(tmp_path / "1")
    found = digests.digests(epath.Path(tmp_path / "1"))
    assert {name: hashed.count(name) for name in ("large", "small")} == {"large": 1, "small": 1}
    contents = {"large": bytes(200), "changed": bytes(300), "small": b"a"}
    assert found == {
        f"arrays/{name}": hashlib.sha256(data).hexdigest() for name, data in contents.items()
    }


def test_another_state_is_named_array_by_array(tmp_path):
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(1, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4), "c": jnp.zeros(1)}, {})
    sharding = SingleDeviceSharding(jax.devices()[0])
    other = {
        "a": jax.ShapeDtypeStruct((2, 4), jnp.float32, sharding=sharding),
        "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=sharding),
        "d": jax.ShapeDtypeStruct((1,), jnp.float32, sharding=sharding),
    }
    with pytest.raises(CheckpointError) as error:
        saver.restore(other)
    for part in (
        "a is float32[2,3], expected float32[2,4]",
        "b is float32[4], expected bfloat16[4]",
        "c is float32[1], expected absent",
        "d is absent, expected float32[1]",
        "resume with the config that wrote it",
    ):
        assert part in str(error.value)
    # A wrong config is no damage: nothing is moved aside.
    assert (tmp_path / "1").exists()


def test_wrong_calls_are_named_at_once(tmp_path):
    saver = Saver(tmp_path, CheckpointConfig())
    with pytest.raises(CheckpointError, match="no checkpoint to restore"):
        saver.restore({})
    with pytest.raises(ValueError, match="at least 1"):
        saver.save(0, {"w": jnp.zeros(1)}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.save(1, {"w": jnp.zeros(1)}, {"x": jnp.zeros(1)})
    assert saver.latest_step() == 0


FULL_DISK = """
import json, pathlib, resource, signal, sys
import jax, jax.numpy as jnp, numpy as np
from jaxrl_llm.checkpoint.saver import CheckpointError, Saver
from jaxrl_llm.config import CheckpointConfig

folder, on_failure = pathlib.Path(sys.argv[1]), sys.argv[2]
rng = np.random.default_rng(0)
state = {{"w": jnp.asarray(rng.normal(size=1 << 18), jnp.float32)}}
saver = Saver(folder, CheckpointConfig(keep=1, on_failure=on_failure))
saver.save(1, state, {{"step": 1}})
saver.wait()
# Root ignores file permissions; a limit on file size stops the writer as a full disk does.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
error = ""
try:
    saver.save(2, state, {{"step": 2}})
    {then}
except CheckpointError as caught:
    error = str(caught)
latest = saver.latest_step()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
layout = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
restored, extra, step = saver.restore(layout)
same = np.asarray(restored["w"]).tobytes() == np.asarray(state["w"]).tobytes()
saver.save(3, state, {{"step": 3}})
saver.close()
saver = Saver(folder, CheckpointConfig(keep=1))
print(json.dumps(dict(
    error=error, latest=latest, step=step, same=same, again=saver.latest_step(),
    folder=sorted(path.name for path in folder.iterdir()),
)))
"""


@pytest.mark.parametrize(
    "on_failure, then",
    [
        ("stop", "saver.wait()"),
        ("stop", "saver.save(3, state, {})"),
        ("continue", "saver.wait()"),
    ],
    ids=["wait", "next_save", "continue"],
)
def test_a_full_disk_is_reported_and_keeps_the_good_step(tmp_path, on_failure, then):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULL_DISK.format(then=then)), tmp_path, on_failure],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    said = found["error"] if on_failure == "stop" else result.stderr
    for part in (f"{tmp_path}/2: could not be saved", "File too large", "check free space"):
        assert part in said
    if on_failure == "continue":
        assert found["error"] == "" and "going on without this checkpoint" in said
    # The failed step was never a step, not even to the process that wrote it.
    assert (found["latest"], found["step"], found["same"]) == (1, 1, True)
    assert (found["again"], found["folder"]) == (3, ["3"])


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/steps: could not be saved .*write permission"):
        Saver(tmp_path / "file" / "steps", CheckpointConfig())


def test_a_half_written_step_is_no_step(tmp_path):
    saver = Saver(tmp_path, CheckpointConfig())
    saver.save(1, {"w": jnp.arange(8.0)}, {})
    saver.close()
    half = tmp_path / "2.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "arrays").mkdir()
    saver = Saver(tmp_path, CheckpointConfig())
    assert saver.latest_step() == 1
    saver.save(2, {"w": jnp.arange(8.0)}, {})
    saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_tree_round_trip_on_another_mesh(tmp_path):
    state = random_state(5, sharded(*FSDP))
    path = tmp_path / "stages" / "warm_start"
    save_tree(path, state, {"tokenizer": "characters"})
    layout = abstract(state, lambda leaf: SingleDeviceSharding(jax.devices()[3]))
    restored, extra = load_tree(path, layout)
    assert_same_bits(restored, state)
    assert extra == {"tokenizer": "characters"}
    with pytest.raises(CheckpointError, match="exists; remove it"):
        save_tree(path, state, {})
    flip(largest_file(path))
    with pytest.raises(CheckpointError, match=r"differs from its checksum .*run the stage again"):
        load_tree(path, layout)
    with pytest.raises(CheckpointError, match="no such folder"):
        load_tree(tmp_path / "other", layout)
    assert [p.name for p in path.parent.iterdir()] == ["warm_start"]


def test_a_folder_without_files_is_no_step(tmp_path, caplog):
    """As a copy leaves it that was broken off; one that lacks its seal is a damaged step."""
    state = random_state(0, sharded(*FSDP))
    config = CheckpointConfig(keep=9)
    saver = Saver(tmp_path, config)
    saver.save(5, state, EXTRA)
    saver.close()
    (tmp_path / "7" / "arrays").mkdir(parents=True)
    reader = Saver(tmp_path, config, read_only=True)
    assert reader.latest_step() == 5 and reader.restore(abstract(state))[2] == 5
    assert (tmp_path / "7").exists() and reader.best_step() == 0
    saver = Saver(tmp_path, config)
    assert not (tmp_path / "7").exists() and "7: empty, no checkpoint" in caplog.text
    assert saver.latest_step() == 5 and saver.restore(abstract(state))[2] == 5
    saver.save(7, state, EXTRA)
    saver.wait()
    assert saver.latest_step() == 7
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "part").write_text("")
    saver = Saver(tmp_path, config)
    assert saver.best_step() == 0 and saver.restore(abstract(state))[2] == 7
    assert (tmp_path / "damaged.9").exists()
