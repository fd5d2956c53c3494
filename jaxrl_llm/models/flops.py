"""Floating-point operations of a network, counted from its shape.

A compiler's cost analysis counts the body of a scan once, however many layers run through it.
"""

import numpy as np
from jaxtyping import Int

from jaxrl_llm.models.shape import Shape

# Multiplications that take as long as mask, softmax and their gradient at one score, on CPUs.
_SCORE_PRODUCTS = 256


def layer_products(shape: Shape) -> int:
    """Returns the weights of one layer that every token is multiplied with."""
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    return shape.hidden_size * (heads + 3 * shape.mlp_size)


def attention_parity(shape: Shape) -> int:
    """Returns how many keys of a query cost as much time as the matmuls of a layer."""
    per_key = shape.num_heads * (2 * shape.head_size + _SCORE_PRODUCTS)
    return max(1, layer_products(shape) // per_key)


def forward(shape: Shape, lengths: Int[np.ndarray, " B"], num_labels: int = 0) -> float:
    """Returns the operations of one forward pass over sequences of these lengths.

    Matmuls only: `2 T` for each weight, and in each layer `4 N H` for each of the T (T + 1) / 2
    pairs of a query and a key that it sees. `num_labels` is the width of the head; 0: the
    vocabulary.
    """
    lengths = np.asarray(lengths, np.float64)  # those of a long run need more than 64 bits
    tokens, pairs = lengths.sum(), (lengths * (lengths + 1) / 2).sum()
    head = (num_labels or shape.vocab_size) * shape.hidden_size
    weights = shape.num_layers * layer_products(shape) + head
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * pairs
    return float(2 * weights * tokens + attention)


def training(
    shape: Shape, lengths: Int[np.ndarray, " B"], num_labels: int = 0, frozen: bool = False
) -> float:
    """Returns the operations of forward and backward pass, without rematerialization.

    Three times the forward pass; two times with a `frozen` base, whose adapters are not counted.
    """
    return (2 if frozen else 3) * forward(shape, lengths, num_labels)
