"""One decoder network: what its parameters are, and what it computes from them.

Flax defines the network, JAX owns the state: modules are split once into a graph
definition and a plain nested dict of arrays, and merged again only inside a trace. One
`Network` serves any number of parameter trees (policy, reference, critic, rollout copy).

Training and scoring scan over stacked layers (`params["layers"]` leaves are [L, ...]). The
rollout copy is a tuple of layers instead; `block` takes one layer of either.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import attention, casting, lora, sequence_attention
from jaxrl_llm.models.layers import (
    NO_ADAPTERS,
    PLAIN,
    Attend,
    Block,
    Products,
    RMSNorm,
    _param,
    rotary_table,
)
from jaxrl_llm.models.on_cpu.products import decode_products as on_cpu
from jaxrl_llm.models.sequence_attention import Form
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.sharding.mesh import constrain, constrain_as_weight

Params = dict[str, Any]  # nested dict of arrays

# What the backward pass finds again; all else it computes anew. Of a layer, "full" keeps its input
# alone, "attention" what surrounds the scores, "projections" the MLP's two inner products too,
# "dots" the result of every product with a weight. The last two keep them in the host's memory.
_AROUND_SCORES = ("q", "k", "v", "mixed")
_save = jax.checkpoint_policies.save_only_these_names


def _offload(*names: str):
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(),
        names_which_can_be_offloaded=("stream", *names),
        offload_src="device",
        offload_dst="pinned_host",
    )


REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": _save(*_AROUND_SCORES),
    "projections": _save(*_AROUND_SCORES, "gate", "up"),
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload_full": _offload(),
    "offload_attention": _offload(*_AROUND_SCORES),
}


# Platforms on which decode steps multiply faster than by `PLAIN`: a function of mesh and dtype.
DECODE_PRODUCTS: dict[str, Callable[[Mesh, str], Products]] = {
    "cpu": on_cpu,
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


@jax.custom_vjp
def _row_major_gradient(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """Returns `table`; its gradient lies in memory as it does.

    What an exchange between devices leaves is cheapest to read column by column, and with the
    gradient the compiler would turn the table and both of its moments, there and back.
    """
    return table


def _row_major_forward(table):
    return table, None


def _row_major_backward(_, bar):
    return (with_layout_constraint(bar, Layout((0, 1))),)


_row_major_gradient.defvjp(_row_major_forward, _row_major_backward)


def _pure(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.split(module)[1])


def _axes(state, prefix: tuple[str, ...] = ()) -> Params:
    flat = nnx.to_flat_state(state)
    return nnx.traversals.unflatten_mapping(
        {path: prefix + variable.get_metadata("logical_axes") for path, variable in flat}
    )


@dataclasses.dataclass(frozen=True)
class Network:
    """A decoder of one shape with a language-model or a scalar head.

    Attributes:
      shape: Sizes and switches of the architecture.
      head: "lm" predicts tokens; "scalar" gives one number a position (critic, reward model).
      param_dtype, compute_dtype: Of the parameters as created, and of the activations.
      remat: What the backward pass recomputes; a key of `REMAT_POLICIES` or "none".
      kernel: Of attention over whole rows.
      lora: Of the adapters that a parameter tree may have; one without them computes as if there
        were none.
      sequence_attention: How devices that share a row's length attend together.
      products: Functions for its matmuls; `for_decoding` chooses faster ones.
    """

    shape: Shape
    head: Literal["lm", "scalar"] = "lm"
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "none"
    lora: LoraConfig = NO_ADAPTERS
    kernel: attention.Implementation = "xla"
    sequence_attention: Form = "all_to_all"
    products: Products = PLAIN

    def for_decoding(self, mesh: Mesh) -> "Network":
        """Returns this network with the products that suit decode steps on a mesh."""
        choose = DECODE_PRODUCTS.get(mesh.devices.flat[0].platform)
        if choose is None:
            return self
        return dataclasses.replace(self, products=choose(mesh, self.compute_dtype))

    def stored(self, layer: Params) -> Params:
        """Returns one layer with plain kernels as this network stores it: some transposed."""
        plain, ours = (
            _axes(dataclasses.replace(self, products=products)._definitions[1])
            for products in (PLAIN, self.products)
        )
        turn = lambda a, given, wanted: a if given == wanted else a.T  # noqa: E731
        return jax.tree.map(turn, layer, plain, ours)

    @property
    def _definitions(self):
        """Graph definitions and states of a block, of the ends, and of a block with adapters."""
        return _definitions(self)

    def _block(self, rngs: nnx.Rngs, adapters: LoraConfig = NO_ADAPTERS) -> Block:
        dtype = jnp.dtype(self.param_dtype)
        kinds: dict[str, Any] = {"products": self.products, "rngs": rngs, "dtype": dtype}
        return Block(self.shape, lora=adapters, **kinds)

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
        return jax.tree.map(lambda a: a, _abstract(self))  # a tree of the caller's own

    def logical_axes(self) -> Params:
        """Returns the tree of `init` with a tuple of logical dim names for each array."""
        _, block, _, ends, _, _ = self._definitions
        return {**_axes(ends), "layers": _axes(block, ("layers",))}

    def init_adapters(self, key: jax.Array) -> Params:
        """Returns adapters that change nothing yet: the first factor random, the second zero."""
        layer = lambda k: lora.only(_pure(self._block(nnx.Rngs(k), self.lora)))  # noqa: E731
        return {"layers": jax.vmap(layer)(jax.random.split(key, self.shape.num_layers))}

    def abstract_adapters(self) -> Params:
        """Returns shapes and dtypes of the adapters, nothing allocated; `{}` with rank 0."""
        return lora.only(jax.eval_shape(self.init_adapters, jax.random.key(0)))

    def adapter_axes(self) -> Params:
        """Returns the tree of `abstract_adapters` with the logical dim names of each array."""
        *_, adapted = self._definitions
        return lora.only({"layers": _axes(adapted, ("layers",))})

    # Arithmetic.

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = params["embed"].astype(self.compute_dtype)
        return constrain(table[tokens], "batch", "length", "embed")

    def _embed_rows(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns `embed` where the table is split over devices that share no rows.

        Split by features instead, it gives every device a slice of every token, and the slices
        are exchanged: no device holds the whole table or the whole of its gradient.
        """
        table = _row_major_gradient(params["embed"]).astype(self.compute_dtype)
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
        block_def, block_state, _, _, adapted_def, adapted_state = self._definitions
        if lora.present(layer):
            block_def, block_state = adapted_def, adapted_state
        state = jax.tree.map(lambda v: v, block_state)
        nnx.replace_by_pure_dict(state, layer)
        return nnx.merge(block_def, state)(x, rotary, attend)

    def norm(self, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the final normalization of the residual stream."""
        _, _, ends_def, ends_state, _, _ = self._definitions
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
        return self.products.logits(hidden, self.head_weight(params).astype(hidden.dtype))

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        prefix_ids: Int[Array | np.ndarray, "_ P"] = attention.NOTHING_SHARED,
        key_blocks: Int[Array | np.ndarray, "_ Q C"] = attention.ALL_BLOCKS,
    ) -> Float[Array, "B T D"]:
        """Returns the normalized last hidden state of every token of packed rows.

        Args:
          params: Stacked parameters.
          tokens: Right-padded rows; several sequences may share a row.
          positions: Of each token in its own sequence.
          segment_ids: Which sequence of the row; 0 is padding.
          prefix_ids, key_blocks: As of `full_attention`; of rows whose length no devices share.
        """

        def attend(q, k, v):
            whole_rows = functools.partial(
                attention.full_attention,
                implementation=self.kernel,
                prefix_ids=prefix_ids,
                key_blocks=key_blocks,
            )
            form = self.sequence_attention
            return sequence_attention.attention(q, k, v, segment_ids, form, whole_rows), None

        rotary = self.rotary(positions)

        def body(x, numbered):
            stacked, index = numbered
            layer = casting.computed(stacked, index, self.compute_dtype)
            return self.block(layer, x, rotary, attend)[0], None

        if self.remat != "none":
            body = jax.checkpoint(body, policy=REMAT_POLICIES[self.remat], prevent_cse=False)
        numbered = params["layers"], jnp.arange(self.shape.num_layers)
        x, _ = jax.lax.scan(body, self._embed_rows(params, tokens), numbered)
        return self.norm(params, x)


# Traced once for equal networks: a run makes the same one several times.


@functools.lru_cache(maxsize=32)
def _definitions(network: Network):
    with nnx.use_eager_sharding(False):
        block = nnx.split(nnx.eval_shape(lambda: network._block(nnx.Rngs(0))))
        ends = nnx.split(nnx.eval_shape(lambda: network._ends(nnx.Rngs(0))))
        adapted = block
        if network.lora.rank:
            adapters = nnx.eval_shape(lambda: network._block(nnx.Rngs(0), network.lora))
            adapted = nnx.split(adapters)
    return *block, *ends, *adapted


@functools.lru_cache(maxsize=32)
def _abstract(network: Network) -> Params:
    return jax.eval_shape(network.init, jax.random.key(0))
