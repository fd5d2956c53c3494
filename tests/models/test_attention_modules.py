"""Rotary embeddings by hand, and the two attention modules against plain attention."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import kinds_of_layers
import numpy as np
import pytest
import tiny

from jaxrl_llm.models.architecture import UNIFORM_LAYER, LayerType, RopeScaling
from jaxrl_llm.models.attention_modules import (
    apply_rotary,
    rotary_frequencies,
    rotary_table,
    rotary_tables,
)
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine.engine import Engine

PLAIN = RopeScaling()
POSITIONS = jnp.array([[0, 1, 5]])


def test_frequencies_by_hand():
    np.testing.assert_allclose(rotary_frequencies(4, 100.0, PLAIN), [1.0, 0.1], rtol=1e-6)
    linear = RopeScaling(factor=4.0, kind="linear")
    np.testing.assert_allclose(rotary_frequencies(4, 100.0, linear), [0.25, 0.025], rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_long_wavelengths_are_stretched_and_short_ones_kept(kind):
    scaling = RopeScaling(factor=8.0, original_max_positions=1024, kind=kind)
    plain = rotary_frequencies(64, 1e6, PLAIN)
    ratio = np.asarray(rotary_frequencies(64, 1e6, scaling) / plain)
    turns = 1024 * np.asarray(plain) / (2 * np.pi)
    # Below one turn of the original context all, above 4 (llama3) or 32 (yarn) none is divided;
    # the bounds of yarn's ramp are rounded to whole pairs.
    assert ratio[turns < 0.5] == pytest.approx(1 / 8)
    assert ratio[turns > 64] == pytest.approx(1.0)
    assert (np.diff(ratio) <= 1e-7).all() and len(np.unique(ratio.round(5))) > 2


def test_longrope_has_the_factors_of_the_longest_sequence():
    scaling = RopeScaling(
        4.0,
        original_max_positions=16,
        kind="longrope",
        short_factors=(1.0, 2.0),
        long_factors=(5.0, 10.0),
    )
    shape = dataclasses.replace(tiny.SHAPE, head_size=4, rope_scaling=scaling)
    for max_tokens, wanted in {16: [1.0, 0.05], 17: [0.2, 0.01]}.items():
        long_enough = shape.for_length(max_tokens)
        assert long_enough.as_published == shape
        found = rotary_frequencies(4, 100.0, long_enough.rope_scaling)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert long_enough.for_length(8) == long_enough  # an engine for shorter ones changes nothing
    engines = [
        Engine(Network(shape), tiny.make_mesh(), num_slots=1, max_tokens=n) for n in (16, 17)
    ]
    assert [e.network.shape.rope_scaling.is_long for e in engines] == [False, True]


def test_rotation_by_hand():
    """A pair (1, 0) at position p becomes (cos p, sin p); dims beyond the table stay."""
    x = jnp.broadcast_to(jnp.array([1.0, 0.0, 7.0]), (1, 3, 1, 3))
    rotated = apply_rotary(x, rotary_table(POSITIONS, 2, 10.0, PLAIN))
    angles = np.array([0.0, 1.0, 5.0])
    want = np.stack([np.cos(angles), np.sin(angles), np.full(3, 7.0)], -1)
    np.testing.assert_allclose(rotated[0, :, 0], want, rtol=1e-6, atol=1e-7)
    magnified = rotary_table(POSITIONS, 2, 10.0, RopeScaling(magnitude=2.0))
    np.testing.assert_allclose(apply_rotary(x, magnified)[0, :, 0, :2], 2 * want[:, :2], rtol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_of_positions_only(interleaved):
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 3, 2, 8))
    rotate = functools.partial(apply_rotary, interleaved=interleaved)

    def products(shift):
        table = rotary_table(POSITIONS + shift, 8, 100.0, PLAIN)
        return jnp.einsum("btnh,bsnh->bnts", rotate(q, table), rotate(k, table))

    # Angles up to 55 in float32: their sines are exact to 4e-6.
    np.testing.assert_allclose(products(50), products(0), atol=5e-5)
    assert np.abs(products(0) - jnp.einsum("btnh,bsnh->bnts", q, k)).max() > 0.1


def test_interleaved_pairs_are_the_halves_of_permuted_dims():
    x = jax.random.normal(jax.random.key(1), (1, 3, 2, 8))
    table = rotary_table(POSITIONS, 8, 100.0, PLAIN)
    halves = jnp.concatenate([x[..., ::2], x[..., 1::2]], -1)
    np.testing.assert_array_equal(apply_rotary(x, table, True), apply_rotary(halves, table))


def test_sections_of_pairs_rotate_by_their_part_of_the_position():
    parts = jnp.stack([POSITIONS, 2 * POSITIONS, 3 * POSITIONS], -1)
    cos, _ = rotary_table(parts, 8, 100.0, PLAIN, sections=(2, 1, 1))
    plain = [rotary_table(n * POSITIONS, 8, 100.0, PLAIN)[0] for n in (1, 2, 3)]
    want = jnp.concatenate([plain[0][..., :2], plain[1][..., 2:3], plain[2][..., 3:]], -1)
    np.testing.assert_allclose(cos, want, rtol=1e-6)


def test_tables_are_made_for_the_kinds_of_layers_that_a_model_has():
    local = dataclasses.replace(
        tiny.SHAPE, layers=(LayerType(rope="local"), LayerType()), local_rope_theta=100.0
    )
    tables = rotary_tables(local, POSITIONS)
    assert set(tables) == {"main", "local"}
    assert np.abs(tables["main"][0] - tables["local"][0]).max() > 0.1
    # 1 + 0.5 log(1 + floor((t + 1) / 2)) at t = 0, 1, 5.
    scaled = dataclasses.replace(
        tiny.SHAPE, layers=(LayerType(rope="none"),) * 2, long_query_scale=0.5, long_query_from=2
    )
    (scales,) = rotary_tables(scaled, POSITIONS)["none"]
    want = 1 + 0.5 * np.log1p([0, 1, 3])
    np.testing.assert_allclose(scales[0, :, 0, 0], want, rtol=1e-6)


def plain_attend(inputs):
    """Causal attention with all scores there; the inputs are its other result."""
    k, v = inputs.k, inputs.v
    if v is None:
        v = k[..., : inputs.value_size]
    groups = inputs.q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, groups, axis=2) for a in (k, v))
    scale = inputs.scoring.scale or inputs.q.shape[-1] ** -0.5
    scores = jnp.einsum("btnh,bsnh->bnts", inputs.q, k) * scale
    scores = jnp.where(jnp.tri(scores.shape[-1], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnv->btnv", jax.nn.softmax(scores), v), inputs


def module_of(shape, kind=UNIFORM_LAYER):
    """The attention of a layer with random weights, and hidden states for it."""
    network = Network(shape, param_dtype="float32", compute_dtype="float32")
    module = network.module("block", kind).attention
    return module, 8.0 * jax.random.normal(jax.random.key(2), (1, 3, shape.hidden_size))


def test_grouped_queries_share_keys_and_values():
    """From the module's projections: query heads 0 and 1 read key head 0, 2 and 3 key head 1."""
    module, x = module_of(tiny.SHAPE)
    rotary = rotary_tables(tiny.SHAPE, POSITIONS)
    out, seen = module(x, rotary, plain_attend)
    q, k, v = (f(x).reshape(1, 3, -1, 8) for f in (module.q, module.k, module.v))
    q, k = (apply_rotary(a, rotary["main"]) for a in (q, k))
    heads = []
    for head in range(4):
        scores = q[0, :, head] @ k[0, :, head // 2].T / np.sqrt(8)
        scores = jnp.where(np.tri(3, dtype=bool), scores, -jnp.inf)
        heads.append(jax.nn.softmax(scores) @ v[0, :, head // 2])
    np.testing.assert_allclose(out[0], module.o(jnp.concatenate(heads, -1)), rtol=1e-4, atol=1e-6)
    # What the KV cache stores are the keys and values as they are attended to.
    np.testing.assert_array_equal(seen.cache_entries[0], seen.k)
    np.testing.assert_array_equal(seen.cache_entries[1], seen.v)
    assert seen.k.shape == (1, 3, 2, 8)


def test_an_attend_function_gets_the_layers_window_chunk_and_scoring():
    shape = kinds_of_layers.NETWORKS["sinks"]
    module, x = module_of(shape, LayerType(window=9, chunk=11))
    _, seen = module(x, rotary_tables(shape, POSITIONS), plain_attend)
    assert (seen.window, seen.chunk) == (9, 11)
    assert (seen.scoring.scale, seen.scoring.cap) == (0.3, 5.0)
    assert seen.scoring.sinks.shape == (4,)


def test_unit_keys_have_length_one_and_unrotated_queries_a_temperature():
    shape = kinds_of_layers.NETWORKS["chunks"]
    tables = rotary_tables(shape, POSITIONS)
    module, x = module_of(shape, LayerType(chunk=11))
    _, seen = module(x, tables, plain_attend)
    # RMS one is norm sqrt(8); the norm's epsilon is 1e-6 of it.
    for heads in (seen.q, seen.k):
        assert np.linalg.norm(heads, axis=-1) == pytest.approx(np.sqrt(8), rel=1e-3)
    module, x = module_of(shape, LayerType(rope="none"))
    _, seen = module(x, tables, plain_attend)
    want = module.q(x).reshape(1, 3, 4, 8) * tables["none"][0]
    np.testing.assert_allclose(seen.q, want, rtol=1e-6)


@pytest.mark.parametrize("q_rank", [0, 20])
def test_latent_attention_is_the_same_function_compressed(q_rank):
    """Heads attend to the latents directly; the cache holds one head of 16 + 4 dims a token."""
    shape = kinds_of_layers.NETWORKS["latents"]
    shape = dataclasses.replace(shape, latent=dataclasses.replace(shape.latent, q_rank=q_rank))
    module, x = module_of(shape)
    rotary = rotary_tables(shape, POSITIONS)
    whole, seen = module(x, rotary, plain_attend)
    compressed, from_latents = module(x, rotary, plain_attend, compressed=True)
    assert np.abs(whole).max() > 1e-3
    # Two orders of summation over 16 latent dims in float32.
    np.testing.assert_allclose(compressed, whole, rtol=1e-4, atol=1e-5 * np.abs(whole).max())
    np.testing.assert_array_equal(seen.cache_entries[0], from_latents.cache_entries[0])
    assert seen.cache_entries[0].shape == (1, 3, 1, 20)
    assert seen.k.shape == (1, 3, 4, 12) and seen.v.shape == (1, 3, 4, 6)
    assert from_latents.k.shape == (1, 3, 1, 20) and from_latents.v is None
    assert seen.scoring.scale == from_latents.scoring.scale == 12**-0.5
