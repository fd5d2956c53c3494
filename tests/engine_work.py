"""Requests of every kind, an engine for them on a tiny network, and what it samples."""

import dataclasses
import functools

import jax
import numpy as np
import tiny

from jaxrl_llm.config.rollout_data import NO_SPECULATION
from jaxrl_llm.models.architecture import Experts, LatentAttentionSizes, LayerType
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import decode_attention, paged_attention_gpu, paged_attention_tpu
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

LIMIT = 64
ONE = tiny.make_mesh()
NETWORKS = {
    "plain": tiny.SHAPE,
    "experts and windows": dataclasses.replace(
        tiny.SHAPE,
        layers=(LayerType(window=9), LayerType(experts=True)),
        experts=Experts(num=4, per_token=2, size=12),
    ),
    "latents": dataclasses.replace(
        tiny.SHAPE,
        qkv_bias=False,
        num_kv_heads=4,
        head_size=12,
        latent=LatentAttentionSizes(kv_rank=16, plain_size=8, value_size=6, q_rank=20),
    ),
}


@functools.cache
def engine_of(
    mesh=ONE, num_slots=8, chunk_steps=16, network=tiny.NETWORK, speculation=NO_SPECULATION
):
    return Engine(
        network,
        mesh,
        num_slots=num_slots,
        max_tokens=LIMIT,
        chunk_steps=chunk_steps,
        speculation=speculation,
    )


def request(random, length, params, seed):
    keys = jax.random.key_data(jax.random.split(jax.random.key(seed), len(params)))
    return Request(tuple(random.integers(4, 96, length).tolist()), np.asarray(keys), tuple(params))


@functools.cache
def workload():
    """Prompts of 1 to 40 tokens, groups of 1 to 5, every sample with parameters of its own."""
    random = np.random.default_rng(0)
    plain = SamplingParams(20)
    groups = [
        (3, [plain] * 5),
        (40, [SamplingParams(1), SamplingParams(24, temperature=0.7)]),
        (1, [SamplingParams(40, stop_tokens=tuple(range(8))), SamplingParams(12, 0.0)]),
        (33, [SamplingParams(25, top_k=5), SamplingParams(25, top_p=0.6), plain]),
        (17, [SamplingParams(30, 1.5, 30, 0.9, 0.01, stop_tokens=(11, 12, 13))]),
        (31, [SamplingParams(2), SamplingParams(33), SamplingParams(7), SamplingParams(30)]),
        (8, [SamplingParams(1)] * 3),
    ]
    return [request(random, n, params, seed) for seed, (n, params) in enumerate(groups)]


@functools.cache
def weights():
    return tiny.params()


@functools.cache
def rollout_params(mesh=ONE):
    return tiny.rollout_params(weights(), mesh)


@functools.cache
def expected():
    return engine_of().generate(rollout_params(), workload())


def assert_same(got, want):
    for ours, theirs in zip(got, want, strict=True):
        assert [c.tokens for c in ours] == [c.tokens for c in theirs]
        assert [c.is_stopped for c in ours] == [c.is_stopped for c in theirs]
        for a, b in zip(ours, theirs, strict=True):
            # The same sums in other orders, float32.
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=2e-5)


def run_to_end(engine, params, completions):
    """Takes turns until nothing is left; adds to {(request, sample): [tokens, reason]}."""
    while engine.num_waiting or engine.num_active:
        for p in engine.step(params):
            kept = completions.setdefault((p.request, p.sample), [[], ""])
            assert not kept[1], "progress of a finished sample"
            assert len(p.tokens) == len(p.log_probs) > 0
            kept[0].extend(p.tokens)
            kept[1] = p.finish_reason
    return completions


def read_by(reader, monkeypatch):
    """Lets engines read pages in that way, kernels interpreted, whatever sizes heads have."""
    monkeypatch.setattr(decode_attention, "cache_reader_for", lambda network, device: reader)
    monkeypatch.setattr(paged_attention_gpu, "kernel_supports", lambda pools, value_size: True)
    for module, name in (
        (paged_attention_tpu, "tpu_partial_attention"),
        (paged_attention_gpu, "gpu_partial_attention"),
    ):
        interpreted = functools.partial(getattr(module, name), interpret=True)
        monkeypatch.setattr(module, name, interpreted)


@functools.cache
def made(name):
    network = Network(NETWORKS[name])
    return tiny.rollout_params(tiny.params(network), ONE, network)
