"""Layers of other kinds in decoding: windows, chunks, latents, sinks, experts."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import LIMIT, ONE, assert_same, engine_of, read_by, request
from kinds_of_layers import NETWORKS

from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import decode_attention, kv_cache, prefill
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import SamplingParams

SLOW = pytest.mark.slow


@functools.cache
def made(name):
    network = Network(NETWORKS[name])
    weights = tiny.params(network)
    return network, weights, tiny.rollout_params(weights, ONE, network)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("windows and experts", "latents") else [SLOW])
        for name in NETWORKS
    ],
)
def test_log_probs_are_those_of_a_whole_pass(name):
    network, weights, rollout = made(name)
    random = np.random.default_rng(0)
    requests = [
        request(random, length, [SamplingParams(30)] * count, seed)
        for seed, (length, count) in enumerate([(5, 2), (30, 1), (17, 2)])
    ]
    found = engine_of(num_slots=4, network=network).generate(rollout, requests)
    rows = np.zeros((5, LIMIT), np.int32)
    samples = [(r.tokens, c) for r, some in zip(requests, found, strict=True) for c in some]
    for row, (prompt, c) in zip(rows, samples, strict=True):
        row[: len(prompt) + len(c.tokens)] = [*prompt, *c.tokens]
    wanted = tiny.teacher_forced(rows, jnp.ones(5), network, weights)
    for row, (prompt, c) in zip(wanted, samples, strict=True):
        assert len(c.tokens) == 30
        np.testing.assert_allclose(c.log_probs, row[len(prompt) :][:30], atol=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["loop", "tpu", "gpu"])
@pytest.mark.parametrize("name", [name for name in NETWORKS if not NETWORKS[name].indexer])
def test_layers_of_all_kinds_read_pages_where_they_lie(name, reader, monkeypatch):
    network, _, rollout = made(name)
    random = np.random.default_rng(0)
    requests = [
        request(random, length, [SamplingParams(25)] * count, seed)
        for seed, (length, count) in enumerate([(5, 2), (30, 1), (17, 2)])
    ]
    wanted = engine_of(num_slots=4, network=network).generate(rollout, requests)
    read_by(reader, monkeypatch)
    engine = Engine(network, ONE, num_slots=4, max_tokens=LIMIT, chunk_steps=5)
    assert_same(engine.generate(rollout, requests), wanted)


@pytest.mark.parametrize("name", NETWORKS)
def test_pieces_of_a_prompt_are_the_prompt(name):
    network, _, rollout = made(name)
    tokens = np.random.default_rng(1).integers(4, 96, (2, 32)).astype(np.int32)
    places = np.broadcast_to(np.arange(32, dtype=np.int32), (2, 32))
    prompts = prefill.Prompts(
        *(jnp.asarray(a) for a in (tokens, places, np.ones_like(tokens))),
        jnp.array([0, 32]),
        jnp.array([32, 32]),
        np.full((2, 32, network.num_routes), -1, np.int16),
    )
    read = jax.jit(functools.partial(prefill.prefill, network), static_argnames="piece_tokens")
    whole, pieces = read(rollout, prompts), read(rollout, prompts, piece_tokens=8)
    for ours, theirs in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_an_indexer_selects_keys_of_sequences_that_lie_side_by_side(monkeypatch):
    """Whatever reads the pages of other networks."""
    device = jax.devices()[0]
    monkeypatch.setattr(decode_attention.importlib.util, "find_spec", lambda name: None)
    for name, reader in {"indexed latents": "gather", "latents": "loop"}.items():
        gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", id=device.id)
        assert decode_attention.cache_reader_for(Network(NETWORKS[name]), gpu) == reader


def test_latents_are_all_that_is_kept():
    network, _, _ = made("latents")
    assert network.shape.kv_cache_sizes == (1, 20, 0)
    held = kv_cache.empty_cache(network.shape, 3, LIMIT, "float32")
    assert held.values == () and [k.shape for k in held.keys] == [(3, 1, 20, LIMIT)] * 2
    assert kv_cache.cache_bytes(network, ONE, 3 * LIMIT, 3) == sum(k.nbytes for k in held.keys)
