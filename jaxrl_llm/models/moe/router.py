"""The router of an MoE layer: the experts of each token, and their weights."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.architecture import Architecture, Experts
from jaxrl_llm.models.layers import ParamFactory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterInputs:
    """Inputs of routers: the tokens to count, and experts to replay (router replay)."""

    counted: Bool[Array, "*M B T"]  # tokens of which loads and losses are computed
    replayed: Int[Array, "*M B T k"] | None = None  # experts to replay; -1: the router's own choice
    # False: given experts are only compared with the router's own choice.
    replays: bool = dataclasses.field(default=True, metadata={"static": True})
    # Which tokens belong to each sequence, for `balance_loss`.
    sequences: Bool[Array, "*M B T s"] | None = None


class RouterOutputs(NamedTuple):
    """Outputs of a router. Sums are over counted tokens; `None` without a `RouterInputs`."""

    chosen: Int[Array, "B T k"]  # experts of each token
    load: Float[Array, " E"] | None = None  # tokens of each expert
    z_loss: Float[Array, ""] | None = None  # sum of logsumexp(logits) ** 2: the z-loss
    # Sum over sequences of the balance loss, 1 for a uniform load
    # (arXiv:2412.19437, Eq. 17 to 20); 0 without `RouterInputs.sequences`.
    balance_loss: Float[Array, ""] | None = None
    num_replayed: Float[Array, ""] | None = None  # tokens with given experts
    num_agreeing: Float[Array, ""] | None = None  # those whose own choice is the same experts


class Router(nnx.Module):
    """Chooses the experts of each token and computes their weights, in float32."""

    def __init__(self, build: ParamFactory, shape: Architecture, experts: Experts):
        d, count = shape.hidden_size, experts.num
        self.kernel = build.normal((d, count), ("whole", "router"))
        if experts.bias:
            self.bias = build.zeros((count,), ("router",))
        if experts.selection_bias:
            # In bfloat16 a small `router.bias_rate` would not move it.
            self.selection_bias = build.zeros((count,), ("router",), jnp.float32)
        self.experts = experts

    def __call__(
        self, x: Float[Array, "B T D"], routing: RouterInputs | None
    ) -> tuple[Float[Array, "B T k"], RouterOutputs]:
        """The weights of each token's experts, and the router's outputs."""
        experts = self.experts
        kernel = self.kernel[...].astype(jnp.float32)
        in_float32 = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), kernel, **in_float32)
        if experts.bias:
            logits = logits + self.bias[...].astype(jnp.float32)
        score_function = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[experts.scores]
        scores = score_function(logits)
        selection_scores = lax.stop_gradient(scores)
        if experts.selection_bias:
            selection_scores = selection_scores + lax.stop_gradient(
                self.selection_bias[...].astype(jnp.float32)
            )
        own = chosen = top_k_experts(selection_scores, experts)
        is_given = is_equal = jnp.zeros((), bool)
        if routing is not None and routing.replayed is not None:
            replayed = routing.replayed.astype(own.dtype)
            is_given = (replayed >= 0).all(-1) & routing.counted
            is_equal = (jnp.sort(own, -1) == jnp.sort(replayed, -1)).all(-1) & is_given
            if routing.replays:
                chosen = jnp.where(replayed < 0, own, replayed)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if experts.normalized:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        weights = weights * experts.scale
        if routing is None:
            return weights, RouterOutputs(chosen)
        counted = routing.counted.astype(jnp.float32)
        visits = jax.nn.one_hot(chosen, experts.num, dtype=jnp.float32).sum(-2)
        visits *= counted[..., None]
        squares = jnp.square(jax.nn.logsumexp(logits, -1)) * counted
        balance = jnp.zeros(())
        if routing.sequences is not None:
            shares = scores / scores.sum(-1, keepdims=True)
            membership = routing.sequences.astype(jnp.float32) * counted[..., None]
            sum_by_sequence = functools.partial(jnp.einsum, "bts,bte->se", membership)
            lengths = jnp.maximum(membership.sum((0, 1)), 1.0)
            products = (sum_by_sequence(visits) * sum_by_sequence(shares)).sum(-1) / lengths**2
            balance = products.sum() * experts.num / experts.per_token
        return weights, RouterOutputs(
            chosen,
            visits.sum((0, 1)),
            squares.sum(),
            balance,
            is_given.sum().astype(jnp.float32),
            is_equal.sum().astype(jnp.float32),
        )


def top_k_experts(scores: Float[Array, "B T E"], experts: Experts) -> Int[Array, "B T k"]:
    """The top-k experts by score, from the best groups of experts only.

    The score of a group is the sum of its two best experts' (arXiv:2412.19437, Sec. 2.1.2).
    """
    if experts.groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], experts.groups, -1)
        group_scores = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        top_groups = lax.top_k(group_scores, experts.top_groups)[1]
        allowed = jax.nn.one_hot(top_groups, experts.groups, dtype=bool).any(-2)
        scores = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, experts.per_token)[1]
