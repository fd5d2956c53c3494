"""How rows are packed and a mesh is cut does not matter to a job: same numbers, same weights."""

import functools
import itertools
import json
import random

import jax
import numpy as np
import pytest
import runs

import jaxrl_llm
from jaxrl_llm.packing import packed_batch
from jaxrl_llm.sharding import mesh as mesh_lib

STEPS = 3
JOBS = ("sft", "dpo", "reward_model")
MESHES = {
    "fsdp 8": {"fsdp": 8},
    "data 2 x fsdp 2 x tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence 2 x fsdp 4": {"sequence": 2, "fsdp": 4},
    "sequence 2 x fsdp 4, ring": {"sequence": 2, "fsdp": 4, "sequence_attention": "ring"},
    "tensor 8": {"tensor": 8},
}
# Every axis; the others are asked nightly.
OFTEN = "data 2 x fsdp 2 x tensor 2"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows of lengths that are far from each other, for every job."""
    folder, draw = tmp_path_factory.mktemp("rows"), random.Random(0)

    def answer():
        return "".join(draw.choices("0123456789", k=draw.choice((1, 2, 3, 24))))

    names = "completion", "chosen", "rejected"
    for split, count in (("train", 40), ("eval", 12)):
        rows = [{"prompt": "1+2=", **{name: answer() for name in names}} for _ in range(count)]
        (folder / split).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def config(files, job, rank=0, mesh=None, tokens=4096):
    """Returns three steps whose evaluations are the loss alone; query heads divide by 8."""
    found = jaxrl_llm.default_config(job)
    found.model.hidden_size, found.model.num_layers, found.model.head_size = 64, 2, 8
    found.model.num_heads, found.model.num_kv_heads, found.model.mlp_size = 8, 2, 96
    found.lora.rank = rank
    found.data.task = "files"
    found.data.train_files = (str(files / "train.jsonl"),)
    found.data.eval_files = (str(files / "eval.jsonl"),)
    found.data.chat_template = False
    found.mesh.update(mesh or {})
    found.trainer.num_steps, found.trainer.batch_size = STEPS, 12
    found.trainer.max_sequence_tokens = 64
    found.trainer.max_tokens_per_microbatch = tokens
    # Adam's usual eps would move a weight whose gradient is rounding alone as far as any other.
    found.trainer.optimizer.learning_rate, found.trainer.optimizer.eps = 3e-3, 1e-3
    found.metrics.tensorboard = found.metrics.console = False
    return found


def run(files, workdir, devices, *settings, **more):
    with mesh_lib.use_devices(devices):
        state = jaxrl_llm.train(config(files, *settings, **more), workdir)
    return jax.device_get(state), runs.metrics(workdir)


@pytest.fixture(scope="module")
def on_one_device(files, tmp_path_factory):
    """Returns `made(job, rank)`: a run on one device with all rows in one microbatch."""

    @functools.cache
    def made(job, rank=0):
        workdir = tmp_path_factory.mktemp(job) / "run"
        return run(files, workdir, jax.devices()[:1], job, rank)

    return made


def assert_same(found, wanted):
    (state, numbers), (expected, others) = found, wanted
    assert list(numbers) == list(others) == list(range(STEPS + 1))
    compared = [name for name in others[STEPS] if not name.startswith((*runs.MEASURED, "global"))]
    assert any(name.startswith("val/") for name in compared) and len(compared) > 6
    for step in range(1, STEPS + 1):
        mine = {name: numbers[step][name] for name in compared if name in others[step]}
        other = {name: others[step][name] for name in mine}
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-5), step
        assert max(value for name, value in other.items() if name.endswith("grad_norm")) > 1e-3
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job, rank",
    [
        pytest.param(*each, marks=pytest.mark.nightly if each[1] else ())
        for each in itertools.product(JOBS, (0, 4))
    ],
)
def test_packing_does_not_matter(job, rank, files, on_one_device, tmp_path, monkeypatch):
    """Each sequence, or pair, alone in a row and a microbatch; and all packed into one."""
    pack, saved = packed_batch.pack, []

    def alone(lengths, *limits):
        saved.append(len(lengths) - len(pack(lengths, *limits)))
        return [[i] for i in range(len(lengths))]

    monkeypatch.setattr(packed_batch, "pack", alone)
    found = run(files, tmp_path / "run", jax.devices()[:1], job, rank, tokens=64)
    assert_same(found, on_one_device(job, rank))
    assert saved and min(saved) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "job, rank, mesh",
    [
        pytest.param(*each, marks=[] if each[1:] == (0, OFTEN) else pytest.mark.nightly)
        for each in itertools.product(JOBS, (0, 4), MESHES)
    ],
)
def test_any_mesh_takes_the_steps_of_one_device(job, rank, mesh, files, on_one_device, tmp_path):
    found = run(files, tmp_path / "run", jax.devices(), job, rank, MESHES[mesh], tokens=256)
    assert_same(found, on_one_device(job, rank))
