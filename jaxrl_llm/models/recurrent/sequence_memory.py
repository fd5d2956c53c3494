"""The memory of a sequence while it is sampled, declared by the kind of each layer.

The engine allocates, copies, moves and frees it, and the planner counts it, from this description
alone. There are three forms. Entries per token (keys and values, or latents) lie in pages, which
all sequences that begin with the same tokens share. Where attention reads only the latest tokens
(sliding windows, chunks), the entries of older ones need not be kept: a decode slot can have a ring
of pages for such a layer. A state has a fixed size and belongs to one sequence at one position: it
is held by decode slot, copied where samples of one prompt part. A sequence whose ring or state is
gone is read again from its first token.
"""

import dataclasses
import math
from typing import NamedTuple

from jaxrl_llm.config.kv_cache_sizing import ring_pages
from jaxrl_llm.models.architecture import Architecture, LayerType


class StateArray(NamedTuple):
    """An array of a sequence's state; a dim of sequences is in front of these."""

    dims: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical names of the dims
    in_float32: bool = False  # else in the dtype of activations


@dataclasses.dataclass(frozen=True)
class SequenceMemory:
    """Memory of one layer: page entries of each token, and the state of each sequence."""

    # Heads, key dims and value dims of a token in the KV cache; heads 0: no pages.
    page_entries: tuple[int, int, int] = (0, 0, 0)
    window_tokens: int = 0  # latest tokens that a query sees, itself included; 0: all
    state: dict[str, StateArray] = dataclasses.field(default_factory=dict)


def layer_memory(shape: Architecture, kind: LayerType) -> SequenceMemory:
    """The memory that a layer of this kind keeps of a sequence."""
    if kind.mixer == "attention":
        windows = [tokens for tokens in (kind.window, kind.chunk) if tokens]
        return SequenceMemory(
            page_entries=shape.kv_cache_sizes, window_tokens=min(windows, default=0)
        )
    sizes = shape.gated_delta
    assert sizes is not None
    before = sizes.convolution_tokens - 1
    keys = (before, sizes.num_key_heads, sizes.key_size)
    values = (before, sizes.num_value_heads, sizes.value_size)
    memory = (sizes.num_value_heads, sizes.key_size, sizes.value_size)
    return SequenceMemory(
        state={
            "q": StateArray(keys, (None, "heads", None)),
            "k": StateArray(keys, (None, "heads", None)),
            "v": StateArray(values, (None, "heads", None)),
            "memory": StateArray(memory, ("heads", None, None), in_float32=True),
        }
    )


def paged_layers(shape: Architecture) -> tuple[int, ...]:
    """Indices of the layers that keep entries of each token in pages."""
    return tuple(i for i, kind in enumerate(shape.layer_types) if kind.mixer == "attention")


def layer_rings(shape: Architecture, page: int, max_tokens: int) -> tuple[int, ...]:
    """Pages of a slot's ring for each of `paged_layers`, 0: pages of whole sequences.

    (): no layer has a ring. See `ring_pages`.
    """
    kinds = (shape.layer_types[i] for i in paged_layers(shape))
    windows = (layer_memory(shape, kind).window_tokens for kind in kinds)
    rings = tuple(ring_pages(window, page, max_tokens) for window in windows)
    return rings if any(rings) else ()


def recurrent_layers(shape: Architecture) -> tuple[int, ...]:
    """Indices of the layers that keep a state of each sequence."""
    return tuple(i for i, kind in enumerate(shape.layer_types) if kind.mixer != "attention")


def has_state(shape: Architecture) -> bool:
    """Whether any layer keeps a state: then tokens in pages alone save no prefill."""
    return bool(recurrent_layers(shape))


def state_numbers(shape: Architecture) -> tuple[int, int]:
    """Numbers per sequence over all layers: of activations' dtype, and float32."""
    arrays = [
        array
        for i in recurrent_layers(shape)
        for array in layer_memory(shape, shape.layer_types[i]).state.values()
    ]
    counts = {False: 0, True: 0}
    for array in arrays:
        counts[array.in_float32] += math.prod(array.dims)
    return counts[False], counts[True]
