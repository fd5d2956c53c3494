"""Experts: what a router chooses, what its experts return, the same on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import attention, lora, mixed_precision, nnx_bridge
from jaxrl_llm.models.architecture import Architecture, Experts, LatentAttentionSizes, LayerType
from jaxrl_llm.models.moe import expert_mlp, router
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding import mesh as mesh_lib

EXPERTS = Experts(num=8, per_token=2, size=12, shared_size=16)
KINDS = (
    LayerType(),
    *(LayerType(window=7, rope="local", experts=True), LayerType(experts=True)) * 2,
)
SHAPE = dataclasses.replace(tiny.SHAPE, num_layers=5, layers=KINDS, experts=EXPERTS)
NETWORK = Network(SHAPE)
FEW = dataclasses.replace(SHAPE, num_layers=1, layers=KINDS[1:2])
LATENT = dataclasses.replace(
    tiny.SHAPE,
    qkv_bias=False,
    num_kv_heads=4,
    head_size=12,
    latent=LatentAttentionSizes(kv_rank=16, plain_size=8, value_size=6, q_rank=20),
    rope_interleaved=True,
)


def rows(count=8, length=24):
    """Returns packed rows: tokens, positions, segment ids; the last tokens are padding."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, SHAPE.vocab_size, (count, length)).astype(np.int32)
    cuts = random.integers(4, length - 4, (count, 1))
    places = np.arange(length)
    segments = np.where(places >= cuts, 2, 1) * (places < length - 3)
    positions = np.where(places >= cuts, places - cuts, places)
    return tokens, positions.astype(np.int32), segments.astype(np.int32)


def reference(x, weights, network=NETWORK):
    """Returns what a layer of experts does to [n, D], expert by expert, by definition."""
    of = network.shape.experts
    logits = x @ np.asarray(weights["router"]["kernel"], np.float64)
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    out = np.zeros_like(x)
    for row, (values, p) in enumerate(zip(x, scores, strict=True)):
        chosen = np.argsort(-p)[: of.per_token]
        for e in chosen:
            gate, up, down = (np.asarray(weights[n]["kernel"][e]) for n in ("gate", "up", "down"))
            a = values @ gate
            out[row] += p[e] / p[chosen].sum() * ((a / (1 + np.exp(-a)) * (values @ up)) @ down)
    gate, up, down = (np.asarray(weights["shared"][n]["kernel"]) for n in ("gate", "up", "down"))
    a = x @ gate
    return out + (a / (1 + np.exp(-a)) * (x @ up)) @ down


def test_a_layer_is_what_its_experts_return():
    params = jax.tree.map(np.asarray, tiny.params(NETWORK))
    weights = jax.tree.map(lambda a: a[0], params["layers"]["1"]["mlp"])
    x = np.random.default_rng(1).standard_normal((2, 5, SHAPE.hidden_size)).astype(np.float32)

    def run(x):
        layer = jax.tree.map(lambda a: a[0], params["layers"]["1"])
        block = nnx_bridge.merge_module(NETWORK, "block", layer, KINDS[1])
        there = jnp.ones(x.shape[:2], bool)
        return block.mlp(x, router.RouterInputs(there, sequences=there[..., None]))

    found, routed = jax.jit(run)(x)
    wanted = reference(x.reshape(10, -1).astype(np.float64), weights)
    np.testing.assert_allclose(found.reshape(10, -1), wanted, atol=2e-5)
    assert routed.load.sum() == 20 and routed.num_replayed == routed.num_agreeing == 0
    logits = x.reshape(10, -1).astype(np.float64) @ weights["router"]["kernel"]
    squares = np.log(np.exp(logits).sum(-1)) ** 2
    np.testing.assert_allclose(routed.z_loss, squares.sum(), rtol=1e-5)
    shares = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).mean(0)
    balance = (np.asarray(routed.load) / 20 * shares).sum() * 8
    np.testing.assert_allclose(routed.balance_loss, balance, rtol=1e-5)


def test_groups_and_bias_choose_and_do_not_weigh():
    of = Experts(num=8, per_token=2, size=4, scores="sigmoid", groups=4, top_groups=2)
    scores = jnp.array([[[0.9, 0.0, 0.5, 0.5, 0.8, 0.8, 0.1, 0.1]]])
    # The sums of two are 0.9, 1.0, 1.6 and 0.2: the experts of the second and third group.
    assert set(np.asarray(router.top_k_experts(scores, of))[0, 0].tolist()) == {4, 5}
    assert {0, 4} <= set(
        np.asarray(router.top_k_experts(scores, dataclasses.replace(of, groups=1, per_token=3)))[
            0, 0
        ].tolist()
    )


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(network, params, *given, routes=None):
    def loss(params):
        routing = None if routes is None else router.RouterInputs(given[2] != 0, routes)
        hidden, routed = network.forward(params, *given, routing=routing)
        real = (given[2] != 0)[..., None]
        return jnp.sum(jnp.sin(hidden) * real), routed and routed._replace(chosen=None)

    return jax.value_and_grad(loss, has_aux=True)(params)


def on_mesh(network, params, mesh, *given):
    rules = mesh_lib.shardings(
        network.abstract_params(),
        network.logical_axes(),
        mesh,
        mesh_lib.TRAIN,
        network.sharding_units,
    )
    with jax.set_mesh(mesh):
        return loss_and_gradients(network, jax.device_put(params, rules), *given)


def close(found, wanted, tolerance=1e-5):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = max(1e-3, float(np.abs(theirs).max()))
        np.testing.assert_allclose(ours, theirs, atol=tolerance * scale, rtol=0)


MESHES = [
    {"expert": 2, "fsdp": 2, "tensor": 2},
    {"expert": 4, "sequence": 2},
    {"expert": 8},
    {"fsdp": 4, "data": 2},
]


@pytest.fixture(scope="module")
def even():
    params = tiny.params(NETWORK)
    given = rows()
    return params, given, loss_and_gradients(NETWORK, params, *given)


@pytest.fixture(scope="module")
def overloaded():
    """Every token goes to the first two experts; six have nothing to do."""
    params = jax.tree.map(jnp.asarray, tiny.params(NETWORK))
    for stack in params["layers"].values():
        if "router" in stack["mlp"]:
            kernel = stack["mlp"]["router"]["kernel"]
            only = jnp.zeros_like(kernel).at[..., 0].set(3.0).at[..., 1].set(2.0)
            scale = stack["mlp_norm"]["scale"]
            stack["mlp"]["router"]["kernel"] = only * jnp.ones_like(scale)[..., None]
    given = rows()
    return params, given, loss_and_gradients(NETWORK, params, *given)


@pytest.mark.parametrize(
    "load, sizes",
    [
        pytest.param(
            load, sizes, id=f"{load}-{sizes}", marks=pytest.mark.slow if i or first else ()
        )
        for first, load in enumerate(("even", "overloaded"))
        for i, sizes in enumerate(MESHES)
    ],
)
def test_any_mesh_is_one_device(load, sizes, request):
    params, given, wanted = request.getfixturevalue(load)
    found = on_mesh(NETWORK, params, tiny.make_mesh(**sizes), *given)
    close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2, "data": 2}, {"fsdp": 4}], ids=str)
def test_weights_gathered_in_pieces_are_the_whole(sizes, monkeypatch):
    """With biases and adapters, of which some have no inner dim."""
    monkeypatch.setattr(expert_mlp, "_GATHERED_BYTES", 1)
    shape = dataclasses.replace(FEW, experts=dataclasses.replace(EXPERTS, bias=True, act="clamped"))
    network = dataclasses.replace(Network(shape), lora=LoraConfig(rank=3, alpha=6.0))
    params = tiny.params(network)
    adapters = jax.tree.map(lambda a: a + 0.01, jax.jit(network.init_adapters)(jax.random.key(1)))
    both, given = lora.combine_params(params, adapters), rows()
    wanted = loss_and_gradients(network, both, *given)
    mesh = tiny.make_mesh(**sizes)
    with jax.set_mesh(mesh):
        rules = mesh_lib.shardings(
            network.abstract_params(),
            network.logical_axes(),
            mesh,
            mesh_lib.TRAIN,
            network.sharding_units,
        )
        both = lora.combine_params(jax.device_put(params, rules), adapters)
        close(loss_and_gradients(network, both, *given), wanted)


@pytest.mark.slow
def test_few_rows_are_read_by_all_devices_of_the_expert_axis(even):
    params, (tokens, positions, segments), _ = even
    few = tokens[:2], positions[:2], segments[:2]
    wanted = jax.jit(tiny.hidden_states(NETWORK))(params, *few)
    for sizes in ({"expert": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}):
        with jax.set_mesh(tiny.make_mesh(**sizes)):
            np.testing.assert_allclose(
                jax.jit(tiny.hidden_states(NETWORK))(params, *few), wanted, atol=2e-5
            )


def test_pieces_divide_the_inner_dim():
    assert expert_mlp.num_weight_chunks(2**30, 96) == 1
    assert expert_mlp.num_weight_chunks(4.5 * 2**30, 96) == 6
    assert expert_mlp.num_weight_chunks(4.5 * 2**30, 7) == 7


def test_remat_and_the_narrow_dtype_keep_routers_wide(even):
    params, given, wanted = even
    full = dataclasses.replace(NETWORK, remat="full")
    close(loss_and_gradients(full, params, *given), wanted)
    narrow = mixed_precision.cast(params, jnp.bfloat16)
    kinds = {path[-2].key: a.dtype for path, a in jax.tree.leaves_with_path(narrow["layers"])}
    assert kinds["router"] == jnp.float32 and kinds["gate"] == jnp.bfloat16


def test_given_routes_are_taken_and_the_rest_is_chosen(even):
    params, given, wanted = even
    (_, _), _ = wanted
    _, routed = jax.jit(NETWORK.forward)(params, *given)
    assert routed.chosen.shape == (4, 8, 24, 2) and NETWORK.num_routes == 8
    routes = jnp.moveaxis(routed.chosen, 0, 2).reshape(8, 24, -1)
    real = float((given[2] != 0).sum())

    def same(found, count):
        (value, routed), gradients = found
        assert (np.asarray(routed.num_replayed) == count).all() and (
            routed.num_agreeing == routed.num_replayed
        ).all()
        routed = routed._replace(
            num_replayed=wanted[0][1].num_replayed, num_agreeing=wanted[0][1].num_agreeing
        )
        close(((value, routed), gradients), wanted)

    same(loss_and_gradients(NETWORK, params, *given, routes=routes), real)
    own = jnp.full_like(routes, -1)
    same(loss_and_gradients(NETWORK, params, *given, routes=own), 0.0)
    other = (routes + 1) % 8
    (_, moved), gradients = loss_and_gradients(NETWORK, params, *given, routes=other)
    assert (np.asarray(moved.num_agreeing) < real).all()
    router = gradients["layers"]["1"]["mlp"]["router"]["kernel"]
    assert np.abs(router).max() > 0


def test_adapters_of_experts_are_the_merged_weights():
    plain = Network(FEW)
    network = dataclasses.replace(plain, lora=LoraConfig(rank=3, alpha=6.0))
    params = tiny.params(plain)
    adapters = jax.tree.map(lambda a: a + 0.1, jax.jit(network.init_adapters)(jax.random.key(1)))
    both = lora.combine_params(params, adapters)
    found = jax.jit(tiny.hidden_states(network))(both, *rows())
    merged = jax.jit(functools.partial(lora.merge_adapters, scale=network.lora.scale))(both)
    np.testing.assert_allclose(
        found, jax.jit(tiny.hidden_states(plain))(merged, *rows()), atol=2e-4
    )
    mesh = tiny.make_mesh(expert=4, tensor=2)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(
            jax.jit(tiny.hidden_states(network))(both, *rows()), found, atol=2e-4
        )


def check_layers(network):
    """The hidden states are those of one layer after another, each of its kind."""
    params, given = tiny.params(network), rows()
    tokens, positions, segments = given

    def attend(a):
        return attention.full_attention(
            a.q, a.k, a.v, segments, window=a.window, scoring=a.scoring
        ), None

    @functools.partial(jax.jit, static_argnums=2)
    def block(layer, x, kind):
        return network.block(layer, x, network.rotary(positions), attend, kind)[0]

    x = jax.jit(network.embed)(params, tokens)
    places = {
        n: (s.name, i)
        for s in network.shape.layer_stacks.values()
        for i, n in enumerate(s.layer_indices)
    }
    for number, kind in enumerate(network.shape.layer_types):
        name, index = places[number]
        layer = jax.tree.map(lambda a, index=index: a[index], params["layers"][name])
        x = block(layer, x, kind)
    found = jax.jit(tiny.hidden_states(network))(params, *given)
    real = segments != 0
    np.testing.assert_allclose(jax.jit(network.norm)(params, x)[real], found[real], atol=2e-5)


# Twice two sliding layers and a full one, then a sliding one: three stacks.
SLIDING = LayerType(window=7, experts=True)
RUNS = dataclasses.replace(
    SHAPE, num_layers=7, layers=((SLIDING, SLIDING, LayerType()) * 2 + (SLIDING,))
)


def test_runs_of_equal_layers_are_the_layers_one_after_another():
    assert [[(s.layer_indices, s.run_length) for s in group] for group in RUNS.layer_groups] == [
        [((0, 1, 3, 4), 2), ((2, 5), 1)],
        [((6,), 1)],
    ]
    check_layers(Network(RUNS))


@pytest.mark.slow
def test_routes_of_runs_are_followed_when_layers_are_read_again():
    full = Network(RUNS, remat="full")
    params, given = tiny.params(full), rows()
    _, routed = jax.jit(full.forward)(params, *given)
    routes = full.flatten_routes(routed.chosen)
    again = loss_and_gradients(full, params, *given, routes=routes)
    close(again[1], loss_and_gradients(Network(RUNS), params, *given)[1])
    assert (again[0][1].num_agreeing == again[0][1].num_replayed).all()


def test_patterns_are_the_layers_one_after_another():
    """Five layers in two groups; each layer sees the right kind."""
    assert [[s.layer_indices for s in group] for group in SHAPE.layer_groups] == [
        [(0,)],
        [(1, 3), (2, 4)],
    ]
    check_layers(NETWORK)


def test_latent_attention_is_the_same_in_its_short_space():
    network = Network(LATENT)
    params, (tokens, positions, segments) = tiny.params(network), rows(2)
    segments = np.ones_like(segments)
    positions = np.broadcast_to(np.arange(24, dtype=np.int32), (2, 24))
    wanted = jax.jit(tiny.hidden_states(network))(params, tokens, positions, segments)
    seen = jnp.broadcast_to(np.tri(24, dtype=bool), (2, 1, 24, 24))

    def attend(a):
        assert a.v is None and a.k.shape == (2, 24, 1, 20) == a.cache_entries[0].shape
        return attention.masked_attention(a.q, a.k, a.k[..., : a.value_size], seen, a.scoring), None

    x, rotary = network.embed(params, tokens), network.rotary(positions)
    for i in range(LATENT.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], params["layers"]["0"])
        x, _, _ = network.block(layer, x, rotary, attend, compressed=True)
    np.testing.assert_allclose(network.norm(params, x), wanted, atol=2e-5)
    assert isinstance(LATENT, Architecture)
