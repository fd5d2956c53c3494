"""Arithmetic counted from the shape is what the compiler counts, where it can count."""

import dataclasses

import jax
import jax.numpy as jnp
import kinds_of_layers
import numpy as np
import pytest
import tiny

from jaxrl_llm.models import flops
from jaxrl_llm.models.architecture import LayerType
from jaxrl_llm.models.transformer import Network

FAMILIES = {
    "llama": {"qkv_bias": False, "tie_embeddings": False, "num_kv_heads": 4},
    "qwen2": {},
    "qwen3": {"qkv_bias": False, "qk_norm": True, "head_size": 16},
}


def counted(function, *arguments):
    """Operations of the program as the compiler sees it; without a scan it sees all."""
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_pass_against_the_compiler(family):
    # Large enough that norms, rotations and the softmax, which are left out, weigh little.
    wide = {"hidden_size": 256, "mlp_size": 1024, "head_size": 64, "vocab_size": 2048}
    shape = dataclasses.replace(tiny.SHAPE, **{**wide, **FAMILIES[family], "num_layers": 1})
    network, rows, length = Network(dataclasses.replace(shape, family=family)), 2, 64
    ids = jnp.ones((rows, length), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(length), ids.shape)

    def forward(params, tokens):
        # One layer, as a scan of one is no loop.
        return network.logits(params, tiny.hidden_states(network)(params, tokens, positions, ids))

    found = counted(forward, network.abstract_params(), ids)
    wanted = flops.forward(shape, np.full(rows, length))
    # The kernel on CPU computes all pairs and masks half of them.
    heads = shape.num_heads * shape.head_size
    masked = 4 * heads * rows * length * (length - 1) / 2
    assert found == pytest.approx(wanted + masked, rel=0.03)


def test_flops_by_hand():
    shape = dataclasses.replace(
        tiny.SHAPE, hidden_size=4, num_heads=2, num_kv_heads=1, head_size=2, mlp_size=8
    )
    shape = dataclasses.replace(shape, num_layers=3, vocab_size=10)
    # A layer: q, o of 4 x 4, k, v of 4 x 2, three of 4 x 8: 144 weights. Head: 40.
    assert flops.layer_matmul_weights(shape) == 144
    # Lengths 1 and 3: 4 tokens, 1 + 6 pairs, 4 operations x 4 of the heads x 3 layers each.
    assert flops.forward(shape, np.array([1, 3])) == 2 * (3 * 144 + 40) * 4 + 4 * 4 * 3 * 7
    assert flops.forward(shape, np.array([1]), num_labels=1) == 2 * (432 + 4) + 48
    assert flops.training(shape, np.array([3])) == 3 * flops.forward(shape, np.array([3]))


def test_flops_of_sparse_attention_by_hand():
    shape = dataclasses.replace(
        kinds_of_layers.NETWORKS["indexed latents"],
        num_layers=1,
        layers=(LayerType(top_keys=2),),
    )
    dense = dataclasses.replace(shape, layers=(), indexer=None)
    # Queries of 20 latents to 6 heads of 10 dims; keys of 32 dims to 10, and 6 weights.
    weights = 20 * 6 * 10 + 32 * (10 + 6)
    difference = flops.layer_matmul_weights(shape) - flops.layer_matmul_weights(dense)
    assert difference == weights
    # Of 4 tokens 10 pairs are compared by the index, and 1 + 2 + 2 + 2 attended.
    lengths = np.array([4])
    pairs = 2 * 6 * 10 * 10 - 2 * 4 * (12 + 6) * (10 - 7)
    assert flops.forward(shape, lengths) - flops.forward(dense, lengths) == 2 * weights * 4 + pairs
