"""States of decode slots: what recurrent layers keep of a sequence beside the pages of others.

`SequenceMemory.state` declares the arrays of a layer. They are held by slot, one entry per
recurrent layer, next to the cache and not in it: a page is read by all who have its tokens, a state
belongs to one sequence at one position. So it is written where a sample enters its slot, copied
where samples of one prompt part, updated by decode steps in a copy of the chunk, and moved along
with its slot. Nothing is done when a sample leaves: the next one overwrites it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.recurrent.gated_delta_net import GatedDeltaInputs, LayerState
from jaxrl_llm.models.recurrent.sequence_memory import StateArray, layer_memory, recurrent_layers
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding import mesh as mesh_lib

LayerStates = tuple[LayerState, ...]  # one per recurrent layer


def declared_states(shape: Architecture) -> tuple[dict[str, StateArray], ...]:
    """The declarations of all recurrent layers, in layer order."""
    return tuple(layer_memory(shape, shape.layer_types[i]).state for i in recurrent_layers(shape))


def empty_states(network: Network, num_sequences: int) -> LayerStates:
    """States of sequences without tokens."""

    def zeros(array: StateArray) -> Array:
        return jnp.zeros((num_sequences, *array.dims), _dtype(network, array))

    return tuple(
        {name: zeros(array) for name, array in layer.items()}
        for layer in declared_states(network.shape)
    )


def state_shardings(shape: Architecture, num_slots: int, mesh: Mesh) -> Any:
    """The shardings of the states of `num_slots` slots under the current logical axis rules."""

    def sharding(array: StateArray) -> jax.sharding.NamedSharding:
        dims, axes = (num_slots, *array.dims), ("batch", *array.axes)
        return mesh_lib.activation_sharding(dims, axes, mesh)

    return tuple(
        {name: sharding(array) for name, array in layer.items()} for layer in declared_states(shape)
    )


def state_bytes(network: Network, mesh: Mesh, num_slots: int) -> int:
    """Bytes per device of the states of all slots."""
    return sum(
        mesh_lib.activation_bytes(
            (num_slots, *array.dims), ("batch", *array.axes), mesh, _dtype(network, array)
        )
        for layer in declared_states(network.shape)
        for array in layer.values()
    )


def _dtype(network: Network, array: StateArray) -> Any:
    return jnp.dtype(jnp.float32 if array.in_float32 else network.compute_dtype)


def advanced(
    states: LayerStates, inputs: Sequence[GatedDeltaInputs], counts: Int[Array, " S"]
) -> LayerStates:
    """The states after the first `counts` of the tokens that each layer has read.

    Speculation knows which drafts were right when all layers have read them: the state after those
    is made again from the state before, by the recurrence alone, instead of one kept per draft.
    """
    width = inputs[0].beta.shape[1] if inputs else 0
    is_token = jnp.arange(width) < counts[:, None]
    pairs = zip(states, inputs, strict=True)
    return tuple(layer.after_state(state, is_token)[1] for state, layer in pairs)


def read_slots(states: LayerStates, slots: Int[Array, " n"], begins: Bool[Array, " n"]) -> Any:
    """The states of slots; zero where a sequence begins, whatever the slot held before."""

    def read(array: Array) -> Array:
        kept = array.at[slots].get(mode="clip")
        return jnp.where(begins.reshape(-1, *[1] * (array.ndim - 1)), 0, kept)

    return jax.tree.map(read, states)


def write_slots(states: LayerStates, slots: Int[Array, " n"], new: Sequence[LayerState]) -> Any:
    """The states with those of some slots replaced; a slot past the last one is padding."""
    return jax.tree.map(
        lambda array, value: array.at[slots].set(value.astype(array.dtype), mode="drop"),
        states,
        tuple(new),
    )
