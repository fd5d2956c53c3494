"""Plans of networks with experts, latent attention and windows."""

import dataclasses
import pathlib
import runpy

import jax
import pytest

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.models.architecture import Architecture, Experts, LatentAttentionSizes, LayerType
from jaxrl_llm.models.moe import expert_mlp
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.planning import compiled_memory, memory, memory_plan, pool_placement, step_time
from jaxrl_llm.planning.accelerators import DEVICES
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import (
    RunSetting,
    expert_axis_sizes,
    num_layer_params,
    num_params,
)
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sharding.mesh import AXES, mesh_sizes

VALUES = {
    "algorithm": {"recipe": "grpo", "samples_per_prompt": 8, "kl_in": "loss"},
    "model": {"compute_dtype": "bfloat16", "remat": "full"},
    "data": {"max_prompt_tokens": 512},
    "rollout": {"max_response_tokens": 512, "num_slots": 64},
    "trainer": {"prompts_per_step": 16, "minibatch_size": 64, "max_tokens_per_microbatch": 2048},
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
}
MIXTURE = Experts(num=16, per_token=4, size=512, shared_size=512)
LATENT = Architecture(
    family="deepseek_v3",
    vocab_size=32_768,
    hidden_size=1024,
    num_layers=5,
    num_heads=8,
    num_kv_heads=8,
    head_size=192,
    mlp_size=2048,
    tie_embeddings=False,
    layers=(LayerType(), *[LayerType(experts=True)] * 4),
    latent=LatentAttentionSizes(kv_rank=256, plain_size=128, value_size=128, q_rank=384),
    experts=MIXTURE,
    rope_interleaved=True,
)
WINDOWS = Architecture(
    family="gpt_oss",
    vocab_size=32_768,
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    head_size=128,
    mlp_size=1024,
    tie_embeddings=False,
    layers=(LayerType(window=128, experts=True), LayerType(experts=True)) * 2,
    experts=dataclasses.replace(MIXTURE, bias=True, act="clamped", shared_size=0),
    sinks=True,
)


def setting(shape: Architecture, backend="tpu", values=VALUES, **mesh: int) -> RunSetting:
    sizes = dict.fromkeys(AXES, 1) | mesh
    config = from_config_dict({**values, "mesh": mesh})
    return RunSetting(config, shape, (), sizes, backend)


def bytes_of(tree) -> int:
    """Returns the bytes on a device of arrays that are not there."""
    return sum(a.dtype.itemsize * _here(a) for a in jax.tree.leaves(tree))


def _here(a) -> int:
    size = 1
    for side in a.sharding.shard_shape(a.shape):
        size *= side
    return size


@pytest.mark.parametrize("shape", [LATENT, WINDOWS], ids=["latent", "windows"])
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "expert": 4}, {"expert": 4, "tensor": 2}], ids=str)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_arguments_are_exact(shape, mesh, quantization):
    """Weights and moments, the rollout copy, and a layer of it as it is resharded."""
    low = {"quantization": quantization, "cache_dtype": "rollout"}
    if quantization != "none":
        low["cache_dtype"] = "fp8"
    values = {**VALUES, "rollout": VALUES["rollout"] | low}
    ours = setting(shape, values=values, **mesh)
    models = compiled_memory.abstract_models(ours.config, shape, jax.devices())
    state = compiled_memory.abstract_state(ours.config, models)
    programs = memory.program_parts(ours)
    held = bytes_of([a for a in jax.tree.leaves(state.policy) if a.ndim])
    assert programs["train"].weights + programs["train"].optimizer == held
    engine = policy_sampler.make_sampler(ours.config, models, {})
    copied = engine.resharder.abstract()
    assert ours.rollout_bytes == bytes_of(copied)
    assert ours.resharded_bytes["reshard_layer"] == bytes_of(copied["layers"][-1])
    cache = engine.engine.programs.abstract_state.cache
    # Its pages have the size of the devices here.
    here = setting(shape, "cpu", values=values, **mesh)
    assert here.cache_bytes(64, here.cache_tokens / 64) == bytes_of(cache)
    assert any(here.rings) == (shape is WINDOWS)


def test_params_of_a_moe_layer_by_hand():
    """Experts are split by their axis and by tensor, all else by tensor alone."""
    whole = setting(LATENT).gathered_layer_params()
    parts = setting(LATENT, fsdp=2, expert=4, tensor=2).gathered_layer_params()
    assert whole["0"].experts == parts["0"].experts == 0
    assert whole["1"].experts == 16 * 3 * 1024 * 512 == 8 * parts["1"].experts
    assert whole["1"].rest / 2 < parts["1"].rest < whole["1"].rest  # some matrices stay whole
    counted = setting(LATENT).count_params(Network(LATENT))
    assert sum(setting(LATENT).computed_params()) == counted.total() == num_params(LATENT)
    assert num_layer_params(counted) == whole["0"].rest + 4 * sum(whole["1"])


def test_published_sizes():
    billions = {"Mixtral-8x7B": 46.703, "Mixtral-8x22B": 140.630, "Qwen3-30B-A3B": 30.532}
    billions |= {"Qwen3-235B-A22B": 235.094, "gemma-3-27b": 27.009, "DeepSeek-V3": 671.026}
    billions |= {"gpt-oss-20b": 20.915, "gpt-oss-120b": 116.829}
    billions |= {"SmolLM3-3B": 3.075, "Olmo-3-7B": 7.298, "Olmo-3-32B": 32.234, "phi-4": 14.660}
    billions |= {"OLMo-2-0325-32B": 32.234, "MiniMax-M2": 228.690, "Kimi-K2": 1026.408}
    billions |= {"GLM-4.5-Air": 106.852, "GLM-5": 743.911, "DeepSeek-V3.2": 671.878}
    for name, size in billions.items():
        assert num_params(SHAPES[name]) / 1e9 == pytest.approx(size, abs=1e-3)


def test_more_devices_on_the_expert_axis_hold_and_gather_less():
    shape = SHAPES["Mixtral-8x7B"]
    plans = {ways: setting(shape, fsdp=64 // ways, expert=ways) for ways in (1, 2, 8)}
    trained = {ways: memory.program_parts(plan)["train"] for ways, plan in plans.items()}
    assert trained[2].weights == trained[8].weights == trained[1].weights
    assert plans[8].rollout_bytes < plans[2].rollout_bytes < plans[1].rollout_bytes
    assert plans[8].computed_params().experts * 4 == plans[2].computed_params().experts * 1
    assert trained[8].temporary < trained[2].temporary
    # Without the axis a layer's experts are gathered in pieces of at most 1 GiB.
    of = memory._MLP.from_layer(plans[1], shape.layer_types[0], 4096)
    assert of.experts == 8 * 3 * 4096 * 14_336 * 2 / expert_mlp.num_weight_chunks(
        of.experts * 4, 224
    )
    assert of.experts <= 2**30
    # The inner vector of an expert does not divide by so many devices: it is whole on each.
    many = setting(SHAPES["Qwen3-30B-A3B"], fsdp=2048)
    assert memory.program_parts(many)["train"].temporary > 0


def test_roofline_of_the_exchange():
    shape, device = SHAPES["Qwen3-30B-A3B"], DEVICES["v5p"]
    values = {**VALUES, "rollout": {"max_response_tokens": 512, "num_slots": 256}}
    apart, alone = (
        setting(shape, values=values, **mesh) for mesh in ({"fsdp": 4, "expert": 4}, {"fsdp": 16})
    )
    tokens = 1000
    # Three quarters of eight visits of each token, there and back, in 48 layers.
    sent = 48 * 2 * tokens * 8 * 3 / 4 * 2048 * 2
    assert step_time._all_to_all_bytes(apart, tokens) == pytest.approx(sent)
    assert step_time._all_to_all_bytes(alone, tokens) == 0
    assert step_time._all_gather_bytes(
        apart, apart.computed_params()
    ) < step_time._all_gather_bytes(alone, alone.computed_params())
    decode = step_time.phase_costs(apart, device)["decode"]
    whole = step_time.phase_costs(alone, device)["decode"]
    assert decode.memory_bytes < whole.memory_bytes  # each device reads its own experts
    assert decode.link_bytes > whole.link_bytes


def test_the_search_finds_an_expert_axis():
    """Four v5p hold the weights, but not a copy for sampling that only `tensor` splits."""
    shape = SHAPES["Qwen3-30B-A3B"]
    assert expert_axis_sizes(shape) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert expert_axis_sizes(SHAPES["Llama-3.1-8B"]) == [1]
    values = {**VALUES, "model": {**VALUES["model"], "param_dtype": "bfloat16"}}
    ours = setting(shape, values=values, fsdp=8)
    ranking = pool_placement.rank_placements(ours, DEVICES["v5e"], 64)
    best = ranking[0]
    assert best.fits and best.pools[0].setting.mesh["expert"] > 1
    short = memory_plan.make_plan(ours.config, shape, (), DEVICES["v5e"], 8)
    assert not short.fits
    nearest = memory_plan.nearest_fit(short)
    assert nearest.plan.fits and nearest.plan.setting.mesh["expert"] > 1


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [LATENT, WINDOWS], ids=["latent", "windows"])
def test_training_is_within_a_tenth_of_the_tpu_compiler(shape, tpu_devices):
    ours = setting(shape, fsdp=2, expert=4)
    models = compiled_memory.abstract_models(ours.config, shape, tpu_devices("v5e:2x4"))
    report = compiled_memory.compiled_memory(
        compiled_memory.program_lowerings(ours.config, models)["train"]
    )
    assert memory.program_parts(ours)["train"].total == pytest.approx(report.total_bytes, rel=0.1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["train", "score", "prefill", "decode", "reshard", "reshard_layer"]
)
def test_every_program_of_deepseek_v3(name, tpu_devices):
    """GRPO of all 671B parameters on 512 chips, each program within a tenth of its plan."""
    path = pathlib.Path(__file__).parents[2] / "configs" / "grpo_deepseek_v3.py"
    config = from_config_dict(runpy.run_path(str(path))["get_config"]())
    shape, devices = SHAPES["DeepSeek-V3"], tpu_devices("v5p:8x8x8")
    ours = RunSetting(config, shape, (), mesh_sizes(config.mesh, len(devices)))
    models = compiled_memory.abstract_models(config, shape, devices)
    report = compiled_memory.compiled_memory(
        compiled_memory.program_lowerings(config, models)[name]
    )
    assert memory.program_parts(ours)[name].total == pytest.approx(report.total_bytes, rel=0.1)
