"""What a network is told of packed rows beside their tokens, and what attention makes of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import attention, sequence_attention
from jaxrl_llm.models.attention_layers import Attention
from jaxrl_llm.models.router import Routed, Routing
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.sights import Sights

# Arrays of each stack by its name; None: it has no experts.
ByStack = dict[str, Array | None]


class Reading(NamedTuple):
    """Packed rows without their tokens; `prefix_ids`, `key_blocks` are as of `full_attention`."""

    positions: Int[Array, "*M B T"]  # of each token in its own sequence
    segment_ids: Int[Array, "*M B T"]
    prefix_ids: Int[Array | np.ndarray, "*M _ prefix"]
    key_blocks: Int[Array | np.ndarray, "*M _ blocks seen"]
    routing: Routing
    sights: Sights | None = None

    def attended(
        self, a: Attention, kernel: attention.Implementation, form: sequence_attention.Form
    ) -> tuple[Float[Array, "B T N value"], None]:
        """Returns attention over these rows; it keeps nothing."""
        assert a.v is not None
        prefixes = attention.by_chunk(a.chunk, self.prefix_ids, self.positions)

        def whole_rows(q, k, v, ids, sinks):
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
            )

        ids = attention.by_chunk(a.chunk, self.segment_ids, self.positions)
        given = a.q, a.k, a.v, ids, form, whole_rows, a.scoring.sinks
        return sequence_attention.attention(*given), None


def routes_by_layer(shape: Shape, routes: Int[Array, "B T routes"]) -> Int[Array, "L B T k"]:
    """Returns the experts that tokens visit, side by side, by layer with experts."""
    per_token = shape.experts.per_token if shape.experts else 1
    return jnp.moveaxis(routes.reshape(*routes.shape[:2], -1, per_token), 2, 0)


def routes_by_stack(shape: Shape, routes: Int[Array, "B T routes"] | None) -> ByStack:
    """Returns the experts to visit [L, B, T, k] in the layers of each stack."""
    if routes is None:
        return dict.fromkeys(shape.stacks)
    by_layer, at = routes_by_layer(shape, routes), shape.with_experts
    return {
        name: by_layer[np.array([at.index(n) for n in s.numbers])] if s.layer.experts else None
        for name, s in shape.stacks.items()
    }


def in_layer_order(shape: Shape, found: dict[str, Routed]) -> Routed | None:
    """Returns what the routers of stacks did in order of the layers; None without experts."""
    if not found:
        return None
    numbers = [n for name in found for n in shape.stacks[name].numbers]
    order = np.argsort(np.array(numbers, int))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *found.values())
