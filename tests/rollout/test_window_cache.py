"""Layers that keep no more than their windows: the same samples from less memory."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import ONE, assert_same, read_by, request
from kinds_of_layers import NETWORKS

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.kv_cache_sizing import ring_pages
from jaxrl_llm.models.architecture import LayerType
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import kv_cache
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

LIMIT, PAGE = 96, 8
RING = 3  # pages of the windows of 9 and chunks of 11 below
KINDS = ("windows and experts", "chunks", "all windows")
SHAPES = {
    **NETWORKS,
    "all windows": dataclasses.replace(
        tiny.SHAPE, num_layers=2, layers=(LayerType(window=9), LayerType(window=17))
    ),
}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.config.kv_cache_sizing._PAGE_TOKENS", {"cpu": PAGE})


@functools.cache
def network_of(name):
    return Network(SHAPES[name])


@functools.cache
def weights(name, mesh=ONE):
    network = network_of(name)
    return tiny.rollout_params(tiny.params(network), mesh, network)


def engine_with(name, num_slots=4, mesh=ONE, **settings):
    settings = {"max_tokens": LIMIT, "chunk_steps": 5, "window_cache": True, **settings}
    return Engine(network_of(name), mesh, num_slots=num_slots, **settings)


def workload():
    """Prompts shorter and longer than a ring, groups, more samples than slots."""
    random = np.random.default_rng(0)
    sizes = [(5, (60, 31)), (30, (50,)), (61, (30, 3, 30)), (8, (1, 70)), (25, (40,))]
    return [
        request(random, length, [SamplingParams(n) for n in tokens], seed)
        for seed, (length, tokens) in enumerate(sizes)
    ]


@functools.cache
def expected(name):
    return engine_with(name, window_cache=False).generate(weights(name), workload())


@pytest.mark.parametrize("name", KINDS)
def test_samples_are_those_of_whole_sequences_in_pages(name):
    engine = engine_with(name)
    assert any(engine.programs.rings)
    found = engine.generate(weights(name), workload())
    assert_same(found, expected(name))
    samples = [(r.tokens, c) for r, some in zip(workload(), found, strict=True) for c in some]
    rows = np.zeros((len(samples), LIMIT), np.int32)
    for row, (prompt, c) in zip(rows, samples, strict=True):
        row[: len(prompt) + len(c.tokens)] = [*prompt, *c.tokens]
    network = network_of(name)
    wanted = tiny.teacher_forced(rows, jnp.ones(len(rows)), network, tiny.params(network))
    for row, (prompt, c) in zip(wanted, samples, strict=True):
        forced = row[len(prompt) :][: len(c.tokens)]
        np.testing.assert_allclose(c.log_probs, forced, atol=5e-5)
