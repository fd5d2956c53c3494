"""Inputs of a network for packed rows beside the tokens, and attention over such rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import attention, context_parallel
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.attention_modules import AttentionInputs
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.moe.router import RouterInputs, RouterOutputs
from jaxrl_llm.models.recurrent.gated_delta_net import GatedDeltaInputs

# Experts to replay by stack name; None: the router's own choice, or a stack without experts.
RoutesByStack = dict[str, Array | None]


class PackedInputs(NamedTuple):
    """Everything about packed rows but the tokens; see `full_attention` for the prefix arrays."""

    positions: Int[Array, "*M B T"]  # of each token in its own sequence
    segment_ids: Int[Array, "*M B T"]
    prefix_ids: Int[Array | np.ndarray, "*M _ prefix"]
    key_blocks: Int[Array | np.ndarray, "*M _ blocks seen"]
    routing: RouterInputs
    image_inputs: ImageInputs | None = None

    def attend(
        self,
        a: AttentionInputs | GatedDeltaInputs,
        kernel: attention.AttentionImplementation,
        form: context_parallel.ContextParallelForm,
    ) -> tuple[Float[Array, "B T N value"], None]:
        """Mixes the tokens of these rows, as `AttentionFunction`; there is no cache to return."""
        if isinstance(a, GatedDeltaInputs):
            assert not self.prefix_ids.shape[-1], "a state is not handed to several samples"
            return a.over_rows(self.segment_ids), None
        assert a.v is not None
        prefixes = attention.chunked_segment_ids(a.chunk, self.prefix_ids, self.positions)

        def whole_rows(q, k, v, ids, sinks, index):
            return attention.full_attention(
                q,
                k,
                v,
                ids,
                kernel,
                window=a.window,
                scoring=a.scoring._replace(sinks=sinks),
                prefix_ids=prefixes,
                key_blocks=self.key_blocks,
                positions=self.positions if self.prefix_ids.shape[1] else None,
                index=index,
                top_keys=a.top_keys,
            )

        ids = attention.chunked_segment_ids(a.chunk, self.segment_ids, self.positions)
        mixed = context_parallel.context_parallel_attention(
            a.q,
            a.k,
            a.v,
            segment_ids=ids,
            form=form,
            whole_rows=whole_rows,
            sinks=a.scoring.sinks,
            index=a.key_index,
        )
        return mixed, None


def routes_by_layer(shape: Architecture, routes: Int[Array, "B T routes"]) -> Int[Array, "L B T k"]:
    """Splits the experts of tokens, side by side for all MoE layers, by layer."""
    per_token = shape.experts.per_token if shape.experts else 1
    return jnp.moveaxis(routes.reshape(*routes.shape[:2], -1, per_token), 2, 0)


def routes_by_stack(shape: Architecture, routes: Int[Array, "B T routes"] | None) -> RoutesByStack:
    """The experts to replay in the layers of each stack, [L, B, T, k]."""
    if routes is None:
        return dict.fromkeys(shape.layer_stacks)
    by_layer, moe_layers = routes_by_layer(shape, routes), shape.moe_layers
    return {
        name: by_layer[np.array([moe_layers.index(n) for n in s.layer_indices])]
        if s.layer.experts
        else None
        for name, s in shape.layer_stacks.items()
    }


def routed_in_layer_order(
    shape: Architecture, routed: dict[str, RouterOutputs]
) -> RouterOutputs | None:
    """Concatenates router outputs of stacks in the order of layers; None without experts."""
    if not routed:
        return None
    numbers = [n for name in routed for n in shape.layer_stacks[name].layer_indices]
    order = np.argsort(np.array(numbers, int))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *routed.values())
