"""Floating-point operations of a network, counted from its shape.

A compiler's cost analysis counts the body of a scan once, however many layers run through it.
"""

import collections
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.models.shape import EVERYWHERE, Layer, Shape, Vision

# Multiplications that take as long as mask, softmax and their gradient at one score, on CPUs.
_SCORE_PRODUCTS = 256


def attention_products(shape: Shape) -> int:
    """Returns the weights of one layer's attention that every token is multiplied with."""
    d, heads, latent = shape.hidden_size, shape.num_heads, shape.latent
    if latent is None:
        return d * (2 * heads + 2 * shape.num_kv_heads) * shape.head_size
    queries = (d if not latent.q_rank else latent.q_rank) * heads * shape.head_size
    short = d * (latent.q_rank + latent.kv_rank + shape.head_size - latent.plain_size)
    up = latent.kv_rank * heads * (latent.plain_size + latent.value_size)
    return queries + short + up + heads * latent.value_size * d


def mlp_products(shape: Shape, kind: Layer = EVERYWHERE) -> int:
    """Returns the weights of a layer's MLP, or of a token's experts and their router."""
    experts = shape.experts
    if not kind.experts or experts is None:
        return 3 * shape.hidden_size * shape.mlp_size
    inner = experts.per_token * experts.size + experts.shared_size
    return shape.hidden_size * (3 * inner + experts.num)


def layer_products(shape: Shape, kind: Layer = EVERYWHERE) -> int:
    """Returns the weights of one layer that every token is multiplied with."""
    return attention_products(shape) + mlp_products(shape, kind)


def attention_parity(shape: Shape) -> int:
    """Returns how many keys of a query cost as much time as the matmuls of a layer."""
    per_key = shape.num_heads * (2 * shape.head_size + _SCORE_PRODUCTS)
    products = sum(layer_products(shape, kind) for kind in shape.kinds) // shape.num_layers
    return max(1, products // per_key)


def seen_pairs(kind: Layer, lengths: Float[np.ndarray, " B"]) -> float:
    """Returns the pairs of a query and a key that it sees, in a layer of this kind."""
    triangle = lambda n: n * (n + 1) / 2  # noqa: E731
    if kind.window:
        beyond = np.maximum(lengths - kind.window, 0)
        return float((triangle(lengths - beyond) + beyond * kind.window).sum())
    if kind.chunk:
        whole, rest = np.divmod(lengths, kind.chunk)
        return float((whole * triangle(kind.chunk) + triangle(rest)).sum())
    return float(triangle(lengths).sum())


def forward(shape: Shape, lengths: Int[np.ndarray, " B"], num_labels: int = 0) -> float:
    """Returns the operations of one forward pass over sequences of these lengths.

    Matmuls only: `2 T` for each weight that a token meets, and in each layer `2 N (H + value)` for
    each pair of a query and a key that it sees. `num_labels` is the width of the head; 0: the
    vocabulary.
    """
    lengths = np.asarray(lengths, np.float64)  # those of a long run need more than 64 bits
    head = (num_labels or shape.vocab_size) * shape.hidden_size
    per_pair = 2 * shape.num_heads * (shape.head_size + shape.value_size)
    weights, attention = float(head), 0.0
    for kind, count in collections.Counter(shape.kinds).items():
        weights += count * layer_products(shape, kind)
        attention += count * per_pair * seen_pairs(kind, lengths)
    return float(2 * weights * lengths.sum() + attention)


def tower_layer(vision: Vision) -> int:
    """Returns the weights of one layer of a tower that every patch is multiplied with."""
    return 4 * vision.hidden_size**2 + 3 * vision.hidden_size * vision.mlp_size


def tower(vision: Vision, out_size: int, patches: Sequence[int]) -> float:
    """Returns the operations of reading images of so many patches each, as `forward` counts them.

    Layers of windows are counted as if no window had room left.
    """
    numbers, d = np.asarray(patches, np.float64), vision.hidden_size
    merged = d * vision.merge_size**2
    per_vector = merged * (merged + out_size)
    weights = vision.patch_dims * d + vision.num_layers * tower_layer(vision)
    weights += per_vector // vision.merge_size**2
    whole = len(vision.full_layers)
    pairs = whole * (numbers**2).sum()
    pairs += (vision.num_layers - whole) * vision.window_patches * numbers.sum()
    return float(2 * weights * numbers.sum() + 4 * d * pairs)


def training(
    shape: Shape, lengths: Int[np.ndarray, " B"], num_labels: int = 0, frozen: bool = False
) -> float:
    """Returns the operations of forward and backward pass, without rematerialization.

    Three times the forward pass; two times with a `frozen` base, whose adapters are not counted.
    """
    return (2 if frozen else 3) * forward(shape, lengths, num_labels)
