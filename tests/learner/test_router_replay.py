"""Routers in scoring and update: routes go to packed rows and back, losses do not see the split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import ConfigError, OptimizerConfig
from jaxrl_llm.config.learner import RouterConfig, RouterLossConfig
from jaxrl_llm.learner import optimizer, predict, router_replay
from jaxrl_llm.learner.batches import Packer, shared_prompts
from jaxrl_llm.models.architecture import Experts, LayerType
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.packing import token_fields
from jaxrl_llm.types import Rollouts

SHAPE = dataclasses.replace(
    tiny.SHAPE,
    num_layers=3,
    layers=(LayerType(), LayerType(experts=True), LayerType(experts=True)),
    experts=Experts(num=4, per_token=2, size=12, scores="sigmoid", selection_bias=True),
)
NETWORK = Network(SHAPE)
B, T, PROMPT = 8, 32, 9
ONE = tiny.make_mesh()


def rollouts():
    random = np.random.default_rng(0)
    lengths = random.integers(PROMPT + 1, T + 1, B).astype(np.int32)
    tokens = random.integers(1, 96, (B, T)).astype(np.int32)
    tokens[:, :PROMPT] = np.repeat(tokens[::2, :PROMPT], 2, axis=0)
    columns = np.arange(T)
    mask = (columns >= PROMPT) & (columns < lengths[:, None])
    routes = random.integers(0, 4, (B, T, NETWORK.num_routes)).astype(np.int16)
    routes[1::2, :PROMPT] = routes[::2, :PROMPT]  # one prompt, read once
    routes[columns >= lengths[:, None] - 1] = -1
    zeros = np.zeros((B, T), np.float32)
    groups = np.repeat(np.arange(B // 2), 2).astype(np.int32)
    return Rollouts(
        np.where(columns < lengths[:, None], tokens, 0),
        mask,
        zeros,
        zeros.astype(np.int32),
        lengths,
        groups,
        np.ones(B, bool),
        (),
        ("",) * B,
        routes,
    )


STEP = rollouts()


def packed_in(*, tokens, shares):
    packer = Packer(tokens, 1, attention_parity=100 if shares else 0)
    packed = packer.pack_rollouts(STEP, None, shared_prompts(STEP))
    assert (packed.microbatches.prefix_lengths > 0).any() == shares
    return packed


PACKINGS = [{"tokens": 512, "shares": False}, {"tokens": 64, "shares": False},
            {"tokens": 256, "shares": True}]  # fmt: skip


@pytest.mark.parametrize("how", PACKINGS, ids=str)
def test_routes_go_to_rows_and_back(how):
    packed = packed_in(**how)
    routed = token_fields.with_fields(packed, ONE, routes=STEP.routed_experts)
    routes = routed.microbatches.routes
    m = packed.microbatches
    inside = m.segment_ids != 0
    owners = np.abs(m.segment_ids) - 1
    np.testing.assert_array_equal(routes[inside], STEP.routed_experts[owners, m.positions][inside])
    assert (np.asarray(routes)[~inside] == -1).all()
    found = token_fields.fields_by_sequence(packed, routes, STEP.lengths, T)
    np.testing.assert_array_equal(found, STEP.routed_experts)
    assert token_fields.without_fields(routed).microbatches.routes.shape[-1] == 0


def of_update(how, router, params, transformed=jax.jit):
    """Returns the sums of a minibatch over its microbatches, as an update makes them.

    Of its loss, or of what `transformed` makes of that.
    """
    packed = token_fields.with_fields(packed_in(**how), ONE, routes=STEP.routed_experts)
    mask, tokens = jnp.asarray(STEP.response_mask), jnp.asarray(STEP.tokens)

    def loss(params, microbatch):
        told = router_replay.router_inputs(router, microbatch, mask)
        forward = predict.ForwardSpec(NETWORK, tokens, lambda microbatch: told)
        return router_replay.router_loss(router, forward.run(params, microbatch).routed, mask)

    program, count = transformed(loss), int(packed.count)
    each = [
        program(params, jax.tree.map(lambda a, i=i: jnp.asarray(a[i]), packed.microbatches))
        for i in range(count)
    ]
    return count, jax.tree.map(lambda *parts: sum(parts), *each)


def with_gradient(loss):
    return jax.jit(jax.value_and_grad(loss, has_aux=True))


LOSSES = RouterConfig(balance_coef=0.3, z_coef=0.2, replay="rollout")


@functools.cache
def in_one_microbatch():
    count, found = of_update(PACKINGS[0], LOSSES, tiny.params(NETWORK), with_gradient)
    assert count == 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", PACKINGS[1:3], ids=str)
def test_losses_and_metrics_do_not_depend_on_the_packing(how):
    count, found = of_update(how, LOSSES, tiny.params(NETWORK), with_gradient)
    assert count > 1 or how["shares"]
    for a, b in zip(*map(jax.tree.leaves, (in_one_microbatch(), found)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1e-3, float(np.abs(a).max())))


def test_losses_and_metrics_of_a_minibatch():
    (value, sums), gradients = in_one_microbatch()
    numbers = router_replay.router_metrics(LOSSES, sums["routers"])
    routed = sums["routers"][0]
    tokens = STEP.response_mask.sum()
    assert routed.load.sum(-1).tolist() == [2 * tokens] * 2
    assert routed.num_replayed.tolist() == [tokens - B] * 2  # all but the last of each sequence
    chosen = STEP.routed_experts[STEP.response_mask & (STEP.routed_experts >= 0).all(-1)]
    assert (np.asarray(routed.load[0]) >= np.bincount(chosen[:, :2].ravel(), minlength=4)).all()
    want = 0.3 * numbers["router/balance_loss"] + 0.2 * numbers["router/z_loss"]
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert 0 < numbers["router/equal_routes"] < 0.6  # random routes
    loads = [numbers[f"router/load/{e:03d}"] for e in range(4)]
    np.testing.assert_allclose(np.mean(loads), 1.0, rtol=1e-6)
    assert numbers["router/max_vio/max"] >= numbers["router/max_vio"] > 0
    assert numbers["router/idle_experts"] == 0
    kernels = [gradients["layers"][n]["mlp"]["router"]["kernel"] for n in ("1",)]
    assert all(np.abs(k).max() > 0 for k in kernels)
    biases = gradients["layers"]["1"]["mlp"]["router"]["selection_bias"]
    assert (biases == 0).all()


def test_routes_of_the_engine_are_compared_with_or_followed():
    compare = RouterConfig(replay="compare")
    _, (_, compared) = of_update(PACKINGS[0], compare, tiny.params(NETWORK))
    (_, followed), _ = in_one_microbatch()
    # The first layer with experts reads the same either way; its own choice is the same.
    assert compared["routers"][0].num_agreeing[0] == followed["routers"][0].num_agreeing[0]
    assert (compared["routers"][0].load != followed["routers"][0].load).any()


def test_balanced_sequences_have_loss_one_and_biases_follow_the_load():
    params = jax.tree.map(jnp.asarray, tiny.params(NETWORK))
    for stack in ("1",):
        router = params["layers"][stack]["mlp"]["router"]
        router["kernel"] = jnp.zeros_like(router["kernel"])
    settings = RouterConfig(balance_coef=1.0, bias_rate=0.25)
    _, (value, sums) = of_update(PACKINGS[0], settings, params)
    np.testing.assert_allclose(value, 1.0, rtol=1e-5)  # all scores are equal
    load = sums["routers"][0].load
    after = router_replay.with_balanced_biases(settings, SHAPE, params, load, jnp.array(False))
    moved = jax.tree.map(lambda a, b: np.asarray(a - b), after, params)
    bias = moved["layers"]["1"]["mlp"]["router"].pop("selection_bias")
    np.testing.assert_allclose(bias, 0.25 * np.sign(np.mean(load, -1, keepdims=True) - load))
    assert all((a == 0).all() for a in jax.tree.leaves(moved))
    kept = router_replay.with_balanced_biases(settings, SHAPE, params, load, jnp.array(True))
    jax.tree.map(np.testing.assert_array_equal, kept, params)


def test_optimizer_does_not_update_selection_biases():
    layer = jax.tree.map(jnp.asarray, tiny.params(NETWORK)["layers"]["1"]["mlp"]["router"])
    params = {"layers": {"1": {"mlp": {"router": layer}}}}
    transformation = optimizer.make_optimizer(
        OptimizerConfig(learning_rate=0.1, weight_decay=0.5), 4
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    begin = jax.jit(transformation.init)(params)
    move = jax.jit(functools.partial(optimizer.apply_if_finite, transformation))
    after, *_ = move(zeros, begin, params)
    router, before = (p["layers"]["1"]["mlp"]["router"] for p in (after, params))
    np.testing.assert_array_equal(router["selection_bias"], before["selection_bias"])
    assert (router["kernel"] != before["kernel"]).any()


def test_unusable_routes_and_settings_are_refused():
    router_replay.check_routes(RouterConfig(replay="rollout"), STEP)
    assert STEP.missing_routes == 0
    broken = STEP.routed_experts.copy()
    broken[2, 3] = -1
    less = dataclasses.replace(STEP, routed_experts=broken)
    assert less.missing_routes == 1
    with pytest.raises(router_replay.RouteError, match=r"1 of .* tokens do not say which experts"):
        router_replay.check_routes(RouterConfig(replay="rollout"), less)
    router_replay.check_routes(RouterConfig(replay="rollout", missing_routes="own"), less)
    router_replay.check_routes(RouterConfig(), dataclasses.replace(STEP, routed_experts=None))
    dense = dataclasses.replace(SHAPE, layers=(), experts=None)
    with pytest.raises(ConfigError, match=r"router\.replay: 'compare', but the model has no exp"):
        router_replay.check_router_config(RouterConfig(replay="compare"), dense)
    with pytest.raises(ConfigError, match=r"router\.balance_coef: 0\.1, but the model has no exp"):
        router_replay.check_router_config(RouterLossConfig(balance_coef=0.1), dense)
    plain = dataclasses.replace(SHAPE, experts=Experts(num=4, per_token=2, size=12))
    with pytest.raises(ConfigError, match=r"bias_rate: 0\.1, but the model has no bias that"):
        router_replay.check_router_config(RouterConfig(bias_rate=0.1), plain)
    router_replay.check_router_config(RouterConfig(bias_rate=0.1, replay="rollout"), SHAPE)
