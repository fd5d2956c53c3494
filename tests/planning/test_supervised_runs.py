"""Jobs on given answers: their plans against the compiler, sizes chosen, advice, refusals."""

import dataclasses
import itertools
import json

import commands
import jax
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.learner import job_models, optimizer, weights
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.objectives import SupervisedBatch
from jaxrl_llm.learner.weights import Trainable
from jaxrl_llm.planning import accelerators, compiled_memory, memory_plan, resolve_sizes
from jaxrl_llm.planning.accelerators import DEVICES
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import supervised
from jaxrl_llm.types import Example, PreferencePair

SHAPE = SHAPES["Qwen2.5-0.5B"]
WIDTH = 512


def job(kind, path="Llama-3.1-8B", **groups):
    values = {
        "job": kind,
        "model": {"path": path, "remat": "full", **groups.pop("model", {})},
        "trainer": {
            "batch_size": 32,
            "max_sequence_tokens": WIDTH,
            "max_tokens_per_microbatch": 2 * WIDTH,
            **groups.pop("trainer", {}),
        },
        **groups,
    }
    return from_config_dict(values)


def lowered(config, present):
    """Returns the update of a job, lowered, with rows that all are as long as may be."""
    meshes = job_models.shared_mesh(config, present)
    models = job_models.build_models(config, meshes, character_tokenizer(), SHAPE, (0,))
    objective = supervised._OBJECTIVES[config.job](config, models)
    mesh, replicated = objective.mesh, mesh_lib.replicated(objective.mesh)
    trained = weights.abstract_trained(objective.network, mesh)
    base = weights.abstract_params(objective.network, mesh) if config.lora.rank else {}
    base.pop("score", None)
    moments = weights.abstract_opt_state(
        optimizer.make_optimizer(config.trainer.optimizer, config.num_updates), trained, mesh
    )
    count = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    state = Trainable(trained, moments, count)
    num, answers = (WIDTH, 1) if config.job == "sft" else (WIDTH // 2, 2)
    example = Example((1,) * num, (True,) * num)
    row = [example] if answers == 1 else PreferencePair(example, example)
    packer = Packer(config.microbatch_tokens, *mesh_lib.num_row_shards(mesh))
    batch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=replicated),
        SupervisedBatch.from_rows([row] * config.trainer.batch_size, packer),
    )
    program = supervised._update_program(config, objective, state)

    def make():
        with jax.set_mesh(mesh):
            return program.lower(state, base, batch)

    return make


DEFAULT = (("sft", 0, 8), ("dpo", 16, 8), ("reward_model", 0, 1))
OFTEN = (("sft", 16, 1), ("dpo", 0, 8), ("reward_model", 16, 8))


def mark(each):
    return () if each in DEFAULT else pytest.mark.slow if each in OFTEN else pytest.mark.nightly


@pytest.mark.parametrize(
    "kind, rank, count",
    [
        pytest.param(*each, marks=mark(each))
        for each in itertools.product(("sft", "dpo", "reward_model"), (0, 16), (1, 8))
    ],
)
def test_within_a_tenth_of_the_compiler(kind, rank, count):
    mesh = {"fsdp": 4, "tensor": 2} if count == 8 else {}
    config = job(kind, lora={"rank": rank}, mesh=mesh)
    plan = memory_plan.make_plan(config, SHAPE, (), accelerators.local_device(jax.devices()), count)
    report = compiled_memory.compiled_memory(lowered(config, jax.devices()[:count]))
    train = plan.programs["train"].total
    if kind == "dpo" and not rank:  # the reference lies beside the update
        train -= plan.setting.resident_parts("reference").total
    assert train == pytest.approx(report.total_bytes, rel=0.1)


def test_resident_memory_of_each_job():
    """DPO's reference lies on the device unless adapters share it; a score needs no logits."""
    v5e = DEVICES["v5e"]

    def peak(kind, **groups):
        return memory_plan.make_plan(job(kind, **groups), SHAPE, (), v5e, 1).programs["train"]

    sft, dpo, scalar = (peak(kind) for kind in ("sft", "dpo", "reward_model"))
    assert dpo.weights == 2 * sft.weights and dpo.optimizer == sft.optimizer
    assert scalar.logits == 0 < sft.logits
    adapters = [peak(kind, lora={"rank": 8}) for kind in ("sft", "dpo", "reward_model")]
    assert adapters[0].weights == adapters[1].weights < 1.1 * sft.weights
    assert all(each.optimizer < 0.1 * sft.optimizer for each in adapters)


def test_sampled_answers_are_planned():
    functions = {"functions": {"answer": {"function": "math"}}}
    plain, asked = (
        memory_plan.make_plan(job("sft", evaluation=each), SHAPE, (), DEVICES["v5e"], 1)
        for each in ({}, functions)
    )
    assert plain.programs.keys() == {"score", "train"}
    assert asked.programs.keys() == plain.programs.keys() | {
        "prefill", "decode", "reshard", "reshard_layer",
    }  # fmt: skip
    assert asked.programs["train"] == plain.programs["train"]
    assert asked.programs["decode"].cache > 0


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward_model"])
def test_advice_names_settings_of_the_job(kind):
    target = resolve_sizes.topology_target("", "h100", 2)
    plan = resolve_sizes.make_plan(job(kind, mesh={"fsdp": 2}), target)
    assert not plan.fits
    nearest = memory_plan.nearest_fit(plan)
    assert nearest.plan.fits and isinstance(nearest.plan.job, type(plan.job))
    values = dataclasses.asdict(plan.job)
    for key in nearest.changes:
        group, _, _ = key.partition(".")
        assert group in values and key not in plan.job.unread, key


def test_sizes_are_chosen_and_a_run_that_cannot_fit_is_refused(monkeypatch, tmp_path):
    sizes = {"max_tokens_per_microbatch": 0}
    small = dataclasses.replace(DEVICES["v5e"], name="small")
    monkeypatch.setattr(accelerators, "local_device", lambda present: small)
    config = job("sft", model={"path": "", "remat": "auto"}, trainer=sizes)
    found = resolve_sizes.resolve_supervised(config, tmp_path)
    assert (found.model.remat, found.trainer.max_tokens_per_microbatch) == ("none", 16_384)
    assert resolve_sizes.check_memory(found, jax.devices()) > 0
    # A run that has begun keeps its own.
    begun = dataclasses.replace(found, model=dataclasses.replace(found.model, remat="dots"))
    monkeypatch.setattr(resolve_sizes, "load_config", lambda workdir: begun)
    (tmp_path / "config.json").touch()
    assert resolve_sizes.resolve_supervised(config, tmp_path).model.remat == "dots"
    with pytest.raises(ConfigError, match=r"needs .* GiB on each small device while 'train' runs"):
        resolve_sizes.check_memory(job("dpo", mesh={"fsdp": 8}), jax.devices())


@pytest.mark.parametrize("name", ["sft_tiny", "dpo_tiny", "reward_model_tiny"])
def test_the_command_plans_jobs(name, capsys):
    asked = [f"--config={commands.ROOT / 'configs' / name}.py", "--device=h100", "--json"]
    asked += ["--config.model.path="] * (name == "dpo_tiny")
    code, out, log = commands.call(capsys, "plan", *asked)
    assert code == 0, log
    found = json.loads(out)
    assert found["fits"] and "speed" not in found and "train" in found["programs"]
    code, _, log = commands.call(capsys, "plan", *asked, "--compile")
    assert code == 1 and "--compile: is of job='rl' alone; leave it out" in log
