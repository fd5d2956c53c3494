"""The router of a layer with experts: which of them each token visits, and with what weight."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.layers import Build
from jaxrl_llm.models.shape import Experts, Shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What routers are told of their tokens."""

    counted: Bool[Array, "*M B T"]  # tokens that their numbers are about
    given: Int[Array, "*M B T k"] | None = None  # experts to visit; -1: the router's own choice
    # False: given experts are only compared with.
    follows: bool = dataclasses.field(default=True, metadata={"static": True})
    # Which of them are of a sequence, for `balance`.
    sequences: Bool[Array, "*M B T s"] | None = None


class Routed(NamedTuple):
    """What a router did. Sums are over counted tokens; `None` without a `Routing`."""

    chosen: Int[Array, "B T k"]  # experts that were visited
    load: Float[Array, " E"] | None = None  # visits of each expert
    squares: Float[Array, ""] | None = None  # sum of the squared log of the sum of exp(logits)
    # Sum over sequences of the balance loss, 1 where all experts are chosen alike
    # (arXiv:2412.19437, Eq. 17 to 20); 0 without `Routing.sequences`.
    balance: Float[Array, ""] | None = None
    given: Float[Array, ""] | None = None  # tokens with given experts
    equal: Float[Array, ""] | None = None  # those of which the router's own choice is the same


class Router(nnx.Module):
    """Chooses experts and weighs them, in float32."""

    def __init__(self, build: Build, shape: Shape, experts: Experts):
        d, count = shape.hidden_size, experts.num
        self.kernel = build.normal((d, count), ("whole", "router"))
        if experts.bias:
            self.bias = build.zeros((count,), ("router",))
        if experts.selection_bias:
            # In bfloat16 a small `router.bias_rate` would not move it.
            self.selection_bias = build.zeros((count,), ("router",), jnp.float32)
        self.experts = experts

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing | None
    ) -> tuple[Float[Array, "B T k"], Routed]:
        """Returns the weights of each token's experts, and which they are."""
        experts = self.experts
        kernel = self.kernel[...].astype(jnp.float32)
        wide = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), kernel, **wide)
        if experts.bias:
            logits = logits + self.bias[...].astype(jnp.float32)
        by = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[experts.scores]
        scores = by(logits)
        wanted = lax.stop_gradient(scores)
        if experts.selection_bias:
            wanted = wanted + lax.stop_gradient(self.selection_bias[...].astype(jnp.float32))
        own = chosen = likeliest(wanted, experts)
        there = same = jnp.zeros((), bool)
        if routing is not None and routing.given is not None:
            given = routing.given.astype(own.dtype)
            there = (given >= 0).all(-1) & routing.counted
            same = (jnp.sort(own, -1) == jnp.sort(given, -1)).all(-1) & there
            if routing.follows:
                chosen = jnp.where(given < 0, own, given)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if experts.normalized:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        weights = weights * experts.scale
        if routing is None:
            return weights, Routed(chosen)
        counted = routing.counted.astype(jnp.float32)
        visits = jax.nn.one_hot(chosen, experts.num, dtype=jnp.float32).sum(-2)
        visits *= counted[..., None]
        squares = jnp.square(jax.nn.logsumexp(logits, -1)) * counted
        balance = jnp.zeros(())
        if routing.sequences is not None:
            shares = scores / scores.sum(-1, keepdims=True)
            member = routing.sequences.astype(jnp.float32) * counted[..., None]
            of_each = functools.partial(jnp.einsum, "bts,bte->se", member)
            lengths = jnp.maximum(member.sum((0, 1)), 1.0)
            products = (of_each(visits) * of_each(shares)).sum(-1) / lengths**2
            balance = products.sum() * experts.num / experts.per_token
        return weights, Routed(
            chosen,
            visits.sum((0, 1)),
            squares.sum(),
            balance,
            there.sum().astype(jnp.float32),
            same.sum().astype(jnp.float32),
        )


def likeliest(scores: Float[Array, "B T E"], experts: Experts) -> Int[Array, "B T k"]:
    """Returns the experts with the highest scores, of the best groups alone.

    A group is as good as its two best experts together (arXiv:2412.19437, Sec. 2.1.2).
    """
    if experts.groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], experts.groups, -1)
        best = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
        within = lax.top_k(best, experts.top_groups)[1]
        allowed = jax.nn.one_hot(within, experts.groups, dtype=bool).any(-2)
        scores = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, experts.per_token)[1]
