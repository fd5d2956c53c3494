"""Tiny networks whose layers are of other kinds than plain ones."""

import dataclasses
import functools

import tiny

from jaxrl_llm.models.architecture import (
    Experts,
    GatedDeltaSizes,
    KeyIndexer,
    LatentAttentionSizes,
    LayerType,
)

of = functools.partial(dataclasses.replace, tiny.SHAPE)
DELTA = LayerType(mixer="gated_delta", rope="none")
NETWORKS = {
    "windows and experts": of(
        num_layers=3,
        layers=(
            LayerType(window=9, rope="local"),
            LayerType(experts=True),
            LayerType(window=9, experts=True),
        ),
        experts=Experts(num=4, per_token=2, size=12),
        post_norms=True,
        logit_cap=20.0,
    ),
    "chunks": of(
        num_layers=2,
        layers=(LayerType(chunk=11), LayerType(rope="none")),
        long_query_scale=0.2,
        long_query_from=16,
        unit_qk=True,
    ),
    "sinks": of(sinks=True, score_cap=5.0, query_scale=0.3, rope_size=4, rope_interleaved=True),
    "latents": of(
        qkv_bias=False,
        num_kv_heads=4,
        head_size=12,
        latent=LatentAttentionSizes(kv_rank=16, plain_size=8, value_size=6, q_rank=20),
        rope_interleaved=True,
    ),
    "indexed latents": of(
        qkv_bias=False,
        num_kv_heads=4,
        head_size=12,
        latent=LatentAttentionSizes(kv_rank=16, plain_size=8, value_size=6, q_rank=20),
        num_layers=2,
        layers=(LayerType(top_keys=9), LayerType(top_keys=9, experts=True)),
        experts=Experts(num=4, per_token=2, size=12),
        indexer=KeyIndexer(num_heads=6, head_size=10),
        rope_interleaved=True,
    ),
    "norms of whole projections": of(
        wide_qk_norm=True, pre_norms=False, post_norms=True, qkv_bias=False
    ),
    "states": of(
        qkv_bias=False,
        num_layers=3,
        layers=(DELTA, LayerType(experts=True), dataclasses.replace(DELTA, experts=True)),
        output_gate=True,
        qk_norm=True,
        norm_offset=1.0,
        rope_size=4,
        gated_delta=GatedDeltaSizes(2, 4, 8, 6),
        experts=Experts(num=4, per_token=2, size=12, shared_size=8, shared_gate=True),
    ),
}
