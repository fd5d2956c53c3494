"""Predicted times by hand: a device whose rates are powers of ten, and a network of 32 dims."""

import dataclasses

import numpy as np
import pytest
import tiny

from jaxrl_llm.config import AlgorithmConfig, MeshConfig, ModelConfig, RLConfig, RolloutConfig
from jaxrl_llm.models import flops
from jaxrl_llm.models.architecture import Experts, LayerType
from jaxrl_llm.planning import step_time
from jaxrl_llm.planning.accelerators import GIB, Device
from jaxrl_llm.planning.run_setting import LayerParams, RunSetting, ScoringModel
from jaxrl_llm.sharding.mesh import AXES

DEVICE = Device("x1", 16 * GIB, 1e14, 1e12, 1e11, domain=8, network_bandwidth=1e10)
BF16, FLOAT32 = (ModelConfig(compute_dtype=dtype) for dtype in ("bfloat16", "float32"))
CONFIG = RLConfig(
    model=BF16,
    algorithm=AlgorithmConfig(samples_per_prompt=4),
    rollout=RolloutConfig(num_slots=16, max_response_tokens=32),
)


def setting(config=CONFIG, shape=tiny.SHAPE, scorers=(), **sizes):
    return RunSetting(config, shape, scorers, {**dict.fromkeys(AXES, 1), **sizes})


def seconds(setting, work=0.0, memory=0.0, links=None, **settings):
    return step_time._cost(setting, DEVICE, work, work, memory, links or {}, **settings).seconds


def test_repetitions_multiply_everything_but_the_devices():
    cost = step_time.PhaseCost(1.0, 2.0, 3.0, 4.0, 5.0, 8)
    assert cost.scaled_by(3) == step_time.PhaseCost(3.0, 6.0, 9.0, 12.0, 15.0, 8)


def test_the_slowest_resource_decides():
    reached = step_time.EFFICIENCY
    arithmetic = 2e14 / (1e14 * reached["flops"])
    memory = 2e12 / (1e12 * reached["memory"])
    links = 4e11 / (1e11 * reached["links"])
    of = setting()
    assert seconds(of, 2e14) == pytest.approx(arithmetic)
    assert seconds(of, memory=2e12) == pytest.approx(memory)
    assert seconds(of, links={8: 4e11}) == pytest.approx(links)
    assert arithmetic > memory and links > arithmetic
    assert seconds(of, 2e14, 2e12) == pytest.approx(arithmetic)
    assert seconds(of, 2e14, 2e12, {8: 4e11}) == pytest.approx(links)


def test_groups_beyond_the_domain_use_the_network():
    within, beyond = (seconds(setting(), links={group: 1e9}) for group in (8, 9))
    assert beyond == pytest.approx(10 * within)
    # Both kinds of links one after the other.
    assert seconds(setting(), links={8: 1e9, 9: 1e9}) == pytest.approx(within + beyond)


def test_float32_products_take_four_times_as_long():
    wide = setting(dataclasses.replace(CONFIG, model=FLOAT32))
    assert seconds(wide, 1e14) == pytest.approx(4 * seconds(setting(), 1e14))
    assert seconds(wide, memory=1e12) == pytest.approx(seconds(setting(), memory=1e12))


def test_bubbles_stretch_a_phase():
    assert seconds(setting(), 1e14, busy_share=0.8) == pytest.approx(seconds(setting(), 1e14) / 0.8)


def test_no_time_is_predicted_for_an_unknown_device():
    unknown = dataclasses.replace(DEVICE, flops=0.0)
    cost = step_time._cost(setting(), unknown, 1e14, 1e14, 1e12, {8: 1e9})
    assert cost.seconds == 0.0 and cost.flops == 1e14 and cost.link_bytes == 1e9


def test_scoring_is_one_forward_pass_and_training_three():
    of = setting()
    costs = step_time.phase_costs(of, DEVICE)
    width = CONFIG.max_sequence_tokens
    forward = flops.forward(tiny.SHAPE, np.full(CONFIG.sequences_per_step, width))
    assert costs["score"].useful_flops == pytest.approx(forward)
    assert costs["train"].useful_flops == pytest.approx(3 * forward * CONFIG.trainer.epochs)
    assert costs["score"].flops == pytest.approx(forward)  # nothing is computed again


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"tensor": 2, "data": 4}, {"stage": 2, "fsdp": 4}])
def test_the_mesh_divides_the_work(sizes):
    whole, cut = (step_time.phase_costs(of, DEVICE) for of in (setting(), setting(**sizes)))
    for name in ("score", "train", "prefill"):
        assert cut[name].num_devices == 8
        assert 8 * cut[name].useful_flops == pytest.approx(whole[name].useful_flops), name


def test_one_device_sends_nothing():
    for name, cost in step_time.phase_costs(setting(), DEVICE).items():
        assert cost.link_bytes == 0.0, name


def test_phases_are_those_that_the_algorithm_needs():
    always = {"prefill", "decode", "score", "train", "reshard"}
    plain = dataclasses.replace(CONFIG, algorithm=AlgorithmConfig(kl_in="none"))
    assert step_time.phase_costs(setting(plain), DEVICE).keys() == always
    critic = AlgorithmConfig(advantage="gae", kl_in="reward", kl_coef=0.1)
    critic_phases = step_time.phase_costs(
        setting(dataclasses.replace(CONFIG, algorithm=critic)), DEVICE
    )
    assert critic_phases.keys() == always | {"score_reference", "score_critic", "train_critic"}
    assert critic_phases["score_reference"] == critic_phases["score"]
    # A scalar head has one column instead of a vocabulary.
    assert critic_phases["score_critic"].flops < critic_phases["score"].flops


def test_scorers_run_one_after_the_other():
    one = setting(scorers=(ScoringModel(tiny.SHAPE, "scalar"),))
    two = setting(scorers=(ScoringModel(tiny.SHAPE, "scalar"),) * 2)
    single, double = (step_time.phase_costs(of, DEVICE)["score_reward"] for of in (one, two))
    assert double.seconds == pytest.approx(2 * single.seconds)
    assert double.flops == pytest.approx(2 * single.flops)
    assert double.num_devices == single.num_devices
    assert "score_teacher" not in step_time.phase_costs(two, DEVICE)


POLICIES = ["none", "dots", "projections", "attention", "full"]


def test_remat_policies_recompute_more_and_more():
    shares = [step_time._recompute_share(policy, tiny.SHAPE) for policy in POLICIES]
    assert shares[0] == shares[1] == 0.0 and shares[-1] == 1.0
    assert shares == sorted(shares) and len(set(shares)) == 4
    # A saved activation is not recomputed, wherever it is saved.
    offloaded = [
        step_time._recompute_share(f"offload_{policy}", tiny.SHAPE) for policy in POLICIES[1:]
    ]
    assert offloaded == shares[1:]


def test_recomputed_projections_by_hand():
    # Of each layer: q 32 x 32, k and v 32 x 16 each, output 32 x 32, mlp 3 x 32 x 48.
    total = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    assert step_time._recompute_share("projections", tiny.SHAPE) == pytest.approx(32 * 32 / total)
    assert step_time._recompute_share("attention", tiny.SHAPE) == pytest.approx(
        (32 * 32 + 2 * 32 * 48) / total
    )


def test_an_all_gather_receives_the_missing_shards():
    used = LayerParams(experts=0, rest=1000)
    assert step_time._all_gather_bytes(setting(fsdp=4), used) == 750 * 2
    assert step_time._all_gather_bytes(setting(fsdp=4, expert=2), used) == 875 * 2
    assert step_time._all_gather_bytes(setting(tensor=4), used) == 0
    # Weights of experts lie with their experts; only the fsdp axis splits them.
    experts = LayerParams(experts=1000, rest=0)
    assert step_time._all_gather_bytes(setting(fsdp=4, expert=2), experts) == 750 * 2
    assert step_time._all_gather_bytes(setting(fsdp=2), used, stages=4) == 875 * 2


def test_tokens_visit_experts_of_other_devices():
    moe = dataclasses.replace(
        tiny.SHAPE, layers=(LayerType(), LayerType(experts=True)), experts=Experts(4, 2, 16)
    )
    # One layer, there and back, 2 experts each, half of them elsewhere, 32 dims of 2 bytes.
    sent = step_time._all_to_all_bytes(setting(shape=moe, expert=2), 10.0)
    assert sent == 1 * 2 * (10 * 2 * 0.5) * 32 * 2
    assert step_time._all_to_all_bytes(setting(expert=2), 10.0) == 0.0


def test_decoding_reads_all_weights_and_the_cache_once_a_token():
    of = setting()
    empty, full = (step_time.decode_step(of, DEVICE, 16, tokens) for tokens in (0, 1000))
    assert empty.memory_bytes == sum(of.computed_params(sampling=True)) * 2
    # Keys and values of two layers, two kv heads of 8 dims, 2 bytes each.
    assert full.memory_bytes - empty.memory_bytes == 1000 * 2 * 2 * (8 + 8) * 2
    # Scores and values of two layers and four heads.
    assert full.flops - empty.flops == 2 * 2 * 4 * (8 + 8) * 1000


def test_decoding_takes_a_step_for_every_token_of_every_round_of_slots():
    of = setting()
    cost = step_time.phase_costs(of, DEVICE)["decode"]
    rounds = -(-CONFIG.sequences_per_step // 16)
    mean = CONFIG.data.max_prompt_tokens + 32 / 2
    step = step_time.decode_step(of, DEVICE, 16, 16 * mean)
    assert cost == step.scaled_by(rounds * 32)


def test_resharding_sends_nothing_if_the_engine_reads_the_training_layout():
    kept = dataclasses.replace(CONFIG, mesh=MeshConfig(rollout="train"))
    moved, unmoved = (
        step_time.phase_costs(setting(c, fsdp=4), DEVICE)["reshard"] for c in (CONFIG, kept)
    )
    assert unmoved.link_bytes == 0.0
    # A device has a quarter of the weights, and receives the rest.
    assert moved.link_bytes == pytest.approx(
        0.75 * sum(setting(fsdp=4).computed_params(sampling=True)) * 2
    )
    # Then it gathers them in each step of decoding.
    decode, gathered = (
        step_time.phase_costs(setting(c, fsdp=4), DEVICE)["decode"].link_bytes
        for c in (CONFIG, kept)
    )
    assert decode == 0.0 < gathered


@pytest.mark.parametrize("dtype, item", [("bfloat16", 2), ("float32", 4)])
def test_a_prefill_reduces_activations_over_the_tensor_axis(dtype, item):
    """Two layers with two all-reduces each; one sends (2 - 1) / 2 of the activations twice."""
    data = dataclasses.replace(CONFIG.data, max_prompt_tokens=10)
    trainer = dataclasses.replace(CONFIG.trainer, prompts_per_step=6)
    model = ModelConfig(compute_dtype=dtype)
    config = dataclasses.replace(CONFIG, data=data, trainer=trainer, model=model)
    cost = step_time.phase_costs(setting(config, tensor=2), DEVICE)["prefill"]
    activations = 6 * 10 * 32 * item  # tokens of 32 dims
    assert cost.link_bytes == 2 * 2 * 2 * activations / 2
