"""Pipeline stages in plans: what they save, what they cost, and what is refused."""

import dataclasses

import jax
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import compiled_memory, memory, memory_plan, pool_placement, step_time
from jaxrl_llm.planning.accelerators import DEVICES, topology_devices
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import RunSetting
from jaxrl_llm.sharding.mesh import AXES

VALUES = {
    "algorithm": {"recipe": "grpo", "samples_per_prompt": 8, "kl_in": "none"},
    "model": {"compute_dtype": "bfloat16", "remat": "full"},
    "data": {"max_prompt_tokens": 1024},
    "rollout": {"max_response_tokens": 1024, "num_slots": 256},
    "trainer": {
        "prompts_per_step": 128,
        "minibatch_size": 512,
        "max_tokens_per_microbatch": 4096,
        "shared_prompts": "off",
    },
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
}
LARGE = SHAPES["Llama-3.1-70B"]


def setting(shape=LARGE, rounds=1, **sizes) -> RunSetting:
    values = {**VALUES, "mesh": {"stage_rounds": rounds}}
    return RunSetting(from_config_dict(values), shape, (), {**dict.fromkeys(AXES, 1), **sizes})


def test_a_stage_holds_its_own_layers():
    staged, flat = setting(stage=2, fsdp=8), setting(fsdp=16)
    # Split over 2 x 8 = 16 ways; norms, of which each device holds all, over 2 alone.
    assert staged.local_params("lm").total() == pytest.approx(
        flat.local_params("lm").total(), rel=1e-3
    )
    assert staged.local_params("lm").total() < flat.local_params("lm").total()
    # Sampling computes all layers on every device, training those of the stage.
    assert staged.computed_params(sampling=True) == flat.computed_params(sampling=True)
    assert (
        0.5 < staged.computed_params().rest / flat.computed_params().rest < 0.52
    )  # the ends are on both


@pytest.mark.parametrize("rounds", [1, 4])
def test_the_bubble_makes_a_pass_longer(rounds):
    device = DEVICES["v5p"]
    flat, staged = setting(fsdp=64), setting(rounds=rounds, stage=4, fsdp=16)
    count = staged.rows(512).num_microbatches
    busy = rounds * count / (rounds * count + 3)
    costs = [step_time.phase_costs(each, device)["train"] for each in (flat, staged)]
    assert costs[0].flops == costs[1].flops
    arithmetic = costs[0].flops / (device.flops * step_time.EFFICIENCY["flops"])
    assert costs[1].seconds == pytest.approx(arithmetic / busy)


def test_stages_pay_between_slices():
    """Of two slices: weights gathered over both cross the thin link, hidden states hardly do."""
    device, count = topology_devices("2*v5p:4x4x4")
    assert (device.domain, count) == (64, 128)
    costs = {
        name: step_time.phase_costs(each, device)["train"].seconds
        for name, each in (
            ("fsdp", setting(fsdp=32, tensor=4)),
            ("stage", setting(stage=2, fsdp=16, tensor=4)),
        )
    }
    assert costs["stage"] < 0.5 * costs["fsdp"]


def test_the_search_chooses_stages_for_slices_that_cannot_hold_the_model():
    def best(topology: str) -> dict[str, int]:
        (pool,) = pool_placement.rank_placements(setting(), *topology_devices(topology))[0].pools
        return {axis: n for axis, n in pool.setting.mesh.items() if n > 1 and axis != "tensor"}

    assert best("4*v5p:2x2x2") == {"stage": 4, "fsdp": 2}
    # Each slice can hold all weights: only gradients cross, and no stage waits.
    assert best("2*v5p:2x4x4") == {"data": 2, "fsdp": 4}
    assert best("v5p:4x4x4") == {"fsdp": 8}


def test_settings_without_pipeline_support_are_refused():
    def make(shape=LARGE, **changes):
        values = {**VALUES, **changes}
        return memory_plan.make_plan(from_config_dict(values), shape, (), DEVICES["v5p"], 64)

    with pytest.raises(ConfigError, match=r"the model has 80 layers; use mesh\.stage_rounds=20"):
        make(mesh={"stage": 4, "stage_rounds": 21})
    few = {**VALUES["trainer"], "prompts_per_step": 8, "minibatch_size": 32}
    with pytest.raises(ConfigError, match=r"minibatch_size=32 makes 2 .* use mesh\.stage=2"):
        make(mesh={"stage": 4, "fsdp": 8, "data": 2}, trainer=few)
    with pytest.raises(
        ConfigError, match=r"mesh\.stage: 2, but a trained vision encoder is not split"
    ):
        make(mesh={"stage": 2}, trainer={**VALUES["trainer"], "tower_learning_rate": 1e-3})
    with pytest.raises(ConfigError, match="the critic has 1 stages, the policy's has 2"):
        pools = {"a": {"devices": 32, "stage": 2}, "b": {"devices": 32, "stage": 1}}
        roles = dict.fromkeys(("policy", "rollout", "reference"), "a")
        placed = {
            "choice": "by_hand",
            "pools": pools,
            "roles": {**roles, "critic": "b", "reward": "b"},
        }
        make(algorithm={"recipe": "ppo", "samples_per_prompt": 8}, placement=placed)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_within_a_tenth_of_the_compiler(rounds):
    shape = dataclasses.replace(SHAPES["Qwen2.5-0.5B"], num_layers=4)
    trainer = {"prompts_per_step": 8, "minibatch_size": 32, "max_tokens_per_microbatch": 512}
    values = {
        **VALUES,
        "data": {"max_prompt_tokens": 128},
        "rollout": {"max_response_tokens": 128, "num_slots": 16},
        "trainer": {**trainer, "shared_prompts": "off"},
        "mesh": {"stage": 2, "fsdp": 2, "tensor": 2, "stage_rounds": rounds},
        "model": {"remat": "full"},
    }
    config = from_config_dict(values)
    sizes = {**dict.fromkeys(AXES, 1), "stage": 2, "fsdp": 2, "tensor": 2}
    models = compiled_memory.abstract_models(config, shape, jax.devices())
    report = compiled_memory.compiled_memory(
        compiled_memory.program_lowerings(config, models)["train"]
    )
    planned = memory.program_parts(RunSetting(config, shape, (), sizes, "cpu"))["train"].total
    assert planned == pytest.approx(report.total_bytes, rel=0.1)
