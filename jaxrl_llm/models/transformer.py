"""One decoder network: what its parameters are, and what it computes from them.

Flax defines the network, JAX owns the state: modules are split once into a graph
definition and a plain nested dict of arrays, and merged again only inside a trace. One
`Network` serves any number of parameter trees (policy, reference, critic, rollout copy).

Training and scoring scan over stacked layers (`params["layers"]` leaves are [L, ...]). The
rollout copy is a tuple of layers instead; `block` takes one layer of either.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import attention
from jaxrl_llm.models.layers import Attend, Block, RMSNorm, _param, rotary_table
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.sharding.mesh import constrain, constrain_as_weight

Params = dict[str, Any]  # nested dict of arrays

REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class _Ends(nnx.Module):
    """Everything that is not a block: embedding, final norm, head."""

    def __init__(self, shape: Shape, head: str, *, rngs: nnx.Rngs, dtype):
        table = (shape.vocab_size, shape.hidden_size)
        normal = nnx.initializers.normal(0.02)
        self.embed = _param(normal, rngs, table, ("vocab", "embed"), dtype)
        self.norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps, rngs=rngs, dtype=dtype)
        if head == "scalar":
            # Zero: a critic begins by predicting nothing, so the first advantages are the returns.
            zeros = nnx.initializers.zeros_init()
            self.score = _param(zeros, rngs, (1, shape.hidden_size), ("one", "embed"), dtype)
        elif not shape.tie_embeddings:
            self.head = _param(normal, rngs, table, ("vocab", "embed"), dtype)


def _pure(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.split(module)[1])


@dataclasses.dataclass(frozen=True)
class Network:
    """A decoder of one shape with a language-model or a scalar head.

    Attributes:
      shape: Sizes and switches of the architecture.
      head: "lm" predicts tokens; "scalar" gives one number a position (critic, reward model).
      param_dtype, compute_dtype: Of the parameters as created, and of the activations.
      remat: What the backward pass recomputes; a key of `REMAT_POLICIES` or "none".
    """

    shape: Shape
    head: Literal["lm", "scalar"] = "lm"
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "none"

    @functools.cached_property
    def _definitions(self):
        """Graph definitions of a block and of the ends, and the logical axes of both."""
        with nnx.use_eager_sharding(False):
            block = nnx.eval_shape(lambda: self._block(nnx.Rngs(0)))
            ends = nnx.eval_shape(lambda: self._ends(nnx.Rngs(0)))
        block_def, block_state = nnx.split(block)
        ends_def, ends_state = nnx.split(ends)
        return block_def, block_state, ends_def, ends_state

    def _block(self, rngs: nnx.Rngs) -> Block:
        return Block(self.shape, rngs=rngs, dtype=jnp.dtype(self.param_dtype))

    def _ends(self, rngs: nnx.Rngs) -> _Ends:
        return _Ends(self.shape, self.head, rngs=rngs, dtype=jnp.dtype(self.param_dtype))

    # Parameters.

    @property
    def units(self) -> dict[str, int]:
        """Logical dims of which the tensor axis may only take whole heads."""
        return {"heads": self.shape.head_size, "kv_heads": self.shape.head_size}

    def init(self, key: jax.Array) -> Params:
        """Returns random parameters: normal(0.02), norms one, biases and scalar head zero."""
        ends_key, layers_key = jax.random.split(key)
        layer = lambda k: _pure(self._block(nnx.Rngs(k)))  # noqa: E731
        layers = jax.vmap(layer)(jax.random.split(layers_key, self.shape.num_layers))
        return {**_pure(self._ends(nnx.Rngs(ends_key))), "layers": layers}

    def abstract(self) -> Params:
        """Returns the shapes and dtypes of the parameters, nothing allocated."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def logical_axes(self) -> Params:
        """Returns the tree of `init` with a tuple of logical dim names for each array."""
        _, block, _, ends = self._definitions

        def names(state, prefix=()):
            flat = nnx.to_flat_state(state)
            return nnx.traversals.unflatten_mapping(
                {path: prefix + variable.get_metadata("logical_axes") for path, variable in flat}
            )

        return {**names(ends), "layers": names(block, ("layers",))}

    # Arithmetic.

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = params["embed"].astype(self.compute_dtype)
        return constrain(table[tokens], "batch", "length", "embed")

    def _embed_rows(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns `embed` where the table is split over devices that share no rows.

        Split by features instead, it gives every device a slice of every token, and the slices
        are exchanged: no device holds the whole table or the whole of its gradient.
        """
        table = params["embed"].astype(self.compute_dtype)
        # Told its own split as well, so that the gradient comes back in it.
        table = constrain_as_weight(table, "vocab", None)
        slices = constrain_as_weight(table, None, "vocab")[tokens]
        slices = constrain_as_weight(slices, None, None, "vocab")
        return constrain(slices, "batch", "length", "embed")

    def rotary(self, positions: Int[Array, "B T"]):
        """Returns the rotary tables of these positions, shared by all layers."""
        shape = self.shape
        return rotary_table(positions, shape.head_size, shape.rope_theta, shape.rope_scaling)

    def block(self, layer: Params, x: Float[Array, "B T D"], rotary, attend: Attend):
        """Returns one layer's output and what `attend` kept."""
        block_def, block_state, _, _ = self._definitions
        state = jax.tree.map(lambda v: v, block_state)
        nnx.replace_by_pure_dict(state, layer)
        return nnx.merge(block_def, state)(x, rotary, attend)

    def norm(self, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the final normalization of the residual stream."""
        _, _, ends_def, ends_state = self._definitions
        state = jax.tree.map(lambda v: v, ends_state)
        nnx.replace_by_pure_dict(state, {k: v for k, v in params.items() if k != "layers"})
        return nnx.merge(ends_def, state).norm(x)

    def head_weight(self, params: Params) -> Float[Array, "V D"]:
        """Returns the output projection: [V, D], or [1, D] of a scalar head."""
        if self.head == "scalar":
            return params["score"]
        return params["embed" if self.shape.tie_embeddings else "head"]

    def logits(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Returns float32 logits; accumulation is in float32 whatever the dtype of `hidden`."""
        weight = self.head_weight(params).astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Returns the normalized last hidden state of every token of packed rows.

        Args:
          params: Stacked parameters.
          tokens: Right-padded rows; several sequences may share a row.
          positions: Of each token in its own sequence.
          segment_ids: Which sequence of the row; 0 is padding.
        """

        def attend(q, k, v):
            return attention.full_attention(q, k, v, segment_ids), None

        rotary = self.rotary(positions)

        def body(x, layer):
            return self.block(layer, x, rotary, attend)[0], None

        if self.remat != "none":
            body = jax.checkpoint(body, policy=REMAT_POLICIES[self.remat], prevent_cse=False)
        x, _ = jax.lax.scan(body, self._embed_rows(params, tokens), params["layers"])
        return self.norm(params, x)
