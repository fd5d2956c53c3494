"""FLOPs of a network, counted from its shape.

The compiler's cost analysis is no substitute: it counts the body of a scan over layers only once.
"""

import collections
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.models.architecture import UNIFORM_LAYER, Architecture, LayerType, VisionArchitecture

# Cost of mask, softmax and their gradient per attention score, in multiplications, on CPUs.
_SCORE_PRODUCTS = 256


def mixer_matmul_weights(shape: Architecture, kind: LayerType = UNIFORM_LAYER) -> int:
    """Matmul weights of one layer's attention, or gated delta net, that each token passes."""
    d, heads, latent = shape.hidden_size, shape.num_heads, shape.latent
    if kind.mixer == "gated_delta":
        sizes = shape.gated_delta
        assert sizes is not None
        return d * (2 * sizes.key_dims + 3 * sizes.value_dims + 2 * sizes.num_value_heads)
    if latent is None:
        gate = heads if shape.output_gate else 0
        return d * (2 * heads + gate + 2 * shape.num_kv_heads) * shape.head_size
    q_proj = (d if not latent.q_rank else latent.q_rank) * heads * shape.head_size
    down_proj = d * (latent.q_rank + latent.kv_rank + shape.head_size - latent.plain_size)
    up_proj = latent.kv_rank * heads * (latent.plain_size + latent.value_size)
    weights = q_proj + down_proj + up_proj + heads * latent.value_size * d
    if indexer := shape.indexer:
        weights += latent.q_rank * indexer.num_heads * indexer.head_size
        weights += d * (indexer.head_size + indexer.num_heads)
    return weights


def mlp_matmul_weights(shape: Architecture, kind: LayerType = UNIFORM_LAYER) -> int:
    """Matmul weights of one MLP, or of the router and a token's active experts."""
    experts = shape.experts
    if not kind.experts or experts is None:
        return 3 * shape.hidden_size * shape.mlp_size
    inner = experts.per_token * experts.size + experts.shared_size
    return shape.hidden_size * (3 * inner + experts.num + experts.shared_gate)


def layer_matmul_weights(shape: Architecture, kind: LayerType = UNIFORM_LAYER) -> int:
    """Matmul weights of one layer that each token passes through."""
    return mixer_matmul_weights(shape, kind) + mlp_matmul_weights(shape, kind)


def recurrence_products(shape: Architecture, kind: LayerType) -> int:
    """Multiplications of a token with the state of one layer: it is read twice and written once.

    The chunked form has more, which depend on the size of its chunks.
    """
    sizes = shape.gated_delta
    if kind.mixer != "gated_delta" or sizes is None:
        return 0
    return 3 * sizes.num_value_heads * sizes.key_size * sizes.value_size


def attention_crossover_keys(shape: Architecture) -> int:
    """The number of keys per query at which attention takes as long as the matmuls of a layer."""
    cost_per_key = shape.num_heads * (2 * shape.head_size + _SCORE_PRODUCTS)
    products = (
        sum(layer_matmul_weights(shape, kind) for kind in shape.layer_types) // shape.num_layers
    )
    return max(1, products // cost_per_key)


def attended_pairs(kind: LayerType, lengths: Float[np.ndarray, " B"]) -> float:
    """The number of attended query-key pairs in a layer of this kind."""
    if kind.mixer != "attention":
        return 0.0
    triangle = lambda n: n * (n + 1) / 2  # noqa: E731
    if most_keys := kind.window or kind.top_keys:
        past = np.maximum(lengths - most_keys, 0)
        return float((triangle(lengths - past) + past * most_keys).sum())
    if kind.chunk:
        num_chunks, remainder = np.divmod(lengths, kind.chunk)
        return float((num_chunks * triangle(kind.chunk) + triangle(remainder)).sum())
    return float(triangle(lengths).sum())


def forward(shape: Architecture, lengths: Int[np.ndarray, " B"], num_labels: int = 0) -> float:
    """FLOPs of one forward pass over sequences of these lengths.

    Matmuls only: `2 T` per active weight and product with a recurrent state, and in each layer
    `2 N (H + value)` per attended query-key pair, and those of an indexer per visible pair.
    `num_labels` is the width of the head; 0: the vocabulary.
    """
    lengths = np.asarray(lengths, np.float64)  # counts of a long run overflow 64-bit integers
    head = (num_labels or shape.vocab_size) * shape.hidden_size
    flops_per_pair = 2 * shape.num_heads * (shape.head_size + shape.value_size)
    weights, attention = float(head), 0.0
    for kind, count in collections.Counter(shape.layer_types).items():
        weights += count * (layer_matmul_weights(shape, kind) + recurrence_products(shape, kind))
        attention += count * flops_per_pair * attended_pairs(kind, lengths)
        if kind.top_keys and shape.indexer:
            index_flops = 2 * shape.indexer.num_heads * shape.indexer.head_size
            attention += count * index_flops * attended_pairs(UNIFORM_LAYER, lengths)
    return float(2 * weights * lengths.sum() + attention)


def vision_layer_matmul_weights(vision: VisionArchitecture) -> int:
    """Matmul weights of one vision encoder layer that each patch passes through."""
    num_mlp_kernels = 3 if vision.kind == "qwen2_5" else 2
    return 4 * vision.hidden_size**2 + num_mlp_kernels * vision.hidden_size * vision.mlp_size


def vision_forward(vision: VisionArchitecture, out_size: int, patches: Sequence[int]) -> float:
    """FLOPs of encoding images with these numbers of patches, counted as in `forward`.

    Window attention is counted as if every window were full.
    """
    num_patches, d = np.asarray(patches, np.float64), vision.hidden_size
    merged = d * vision.merge_size**2
    merger_weights = merged * (merged + out_size) * (1 + len(vision.deepstack_layers))
    weights = vision.patch_dims * d + vision.num_layers * vision_layer_matmul_weights(vision)
    weights += merger_weights // vision.merge_size**2
    num_full_layers = len(vision.full_layers)
    pairs = num_full_layers * (num_patches**2).sum()
    pairs += (vision.num_layers - num_full_layers) * vision.window_patches * num_patches.sum()
    return float(2 * weights * num_patches.sum() + 4 * d * pairs)


def training(
    shape: Architecture, lengths: Int[np.ndarray, " B"], num_labels: int = 0, frozen: bool = False
) -> float:
    """FLOPs of forward and backward pass, without rematerialization.

    Three times the forward pass; twice with a `frozen` base, adapters not counted.
    """
    return (2 if frozen else 3) * forward(shape, lengths, num_labels)
