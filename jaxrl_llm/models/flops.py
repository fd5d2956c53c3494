"""How much arithmetic a network needs: counted from its shape, as the compiler cannot.

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
    """Returns how many keys of a query take as long as the products with a layer's weights.

    Where all scores of a row are written out; what no query may see costs as much.
    """
    per_key = shape.num_heads * (2 * shape.head_size + _SCORE_PRODUCTS)
    return max(1, layer_products(shape) // per_key)


def forward(shape: Shape, lengths: Int[np.ndarray, " B"], num_labels: int = 0) -> float:
    """Returns the floating-point operations of one forward pass over whole sequences.

    Products alone, two operations for each multiplication: `2 T` of all weights, and in each layer
    `4 N H` for every pair of a query with a key that it sees, T (T + 1) / 2 of them. Norms,
    rotations, softmax and embedding look-up are left out, as is usual.

    Args:
      shape: Of the network.
      lengths: Tokens of each sequence.
      num_labels: Width of the head; 0: the vocabulary.

    Returns:
      A float, as the numbers outgrow 64 bits for a long run.
    """
    lengths = np.asarray(lengths, np.float64)
    tokens, pairs = lengths.sum(), (lengths * (lengths + 1) / 2).sum()
    head = (num_labels or shape.vocab_size) * shape.hidden_size
    weights = shape.num_layers * layer_products(shape) + head
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * pairs
    return float(2 * weights * tokens + attention)


def training(
    shape: Shape, lengths: Int[np.ndarray, " B"], num_labels: int = 0, frozen: bool = False
) -> float:
    """Returns the operations of forward and backward pass: three times the forward pass.

    What rematerialization computes again does not count: it is the price of memory, not work.

    Args:
      shape, lengths, num_labels: As of `forward`.
      frozen: Of a base below adapters, whose own gradients nobody computes; twice the forward
        pass then, the adapters' few products left out.
    """
    return (2 if frozen else 3) * forward(shape, lengths, num_labels)
