"""One decoder network: what its parameters are, and what it computes from them.

Parameters are a plain nested dict of arrays; Flax modules exist only inside a trace. One `Network`
serves any number of parameter trees (policy, reference, critic, rollout copy).

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
    Build,
    Products,
    RMSNorm,
    rotary_table,
)
from jaxrl_llm.models.on_cpu.products import decode_products as on_cpu
from jaxrl_llm.models.sequence_attention import Form
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.sharding.mesh import constrain, constrain_as_weight

Params = dict[str, Any]  # nested dict of arrays

# What the forward pass keeps for the backward pass, which computes the rest again. Of a layer,
# "full" keeps its input, "attention" what surrounds the scores, "projections" the MLP's two inner
# products too, "dots" the result of every product with a weight; the last two keep it on the host.
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

    def __init__(self, build: Build, shape: Shape, head: str):
        table = (shape.vocab_size, shape.hidden_size)
        self.embed = build.normal(table, ("vocab", "embed"))
        self.norm = RMSNorm(build, shape.hidden_size, shape.norm_eps)
        if head == "scalar":
            # Zero: a critic begins by predicting nothing, so the first advantages are the returns.
            self.score = build.zeros((1, shape.hidden_size), ("one", "embed"))
        elif not shape.tie_embeddings:
            self.head = build.normal(table, ("vocab", "embed"))


@jax.custom_vjp
def _row_major_gradient(table: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """Returns `table`; its gradient lies in memory by rows.

    An exchange between devices leaves columns that are cheap to read; the compiler would transpose
    the table and both of its moments, to columns and back.
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
      head: "lm" predicts tokens; "scalar" gives one number a position (critic, reward model).
      param_dtype, compute_dtype: Of the parameters as created, and of the activations.
      remat: What the backward pass recomputes; a key of `REMAT_POLICIES` or "none".
      kernel: Of attention over whole rows.
      lora: Of the adapters that a parameter tree may have.
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
            _axes(_definition(dataclasses.replace(self, products=products), "block")[1])
            for products in (PLAIN, self.products)
        )
        turn = lambda a, given, wanted: a if given == wanted else a.T  # noqa: E731
        return jax.tree.map(turn, layer, plain, ours)

    def _build(self, rngs: nnx.Rngs, adapters: LoraConfig = NO_ADAPTERS) -> Build:
        return Build(rngs, jnp.dtype(self.param_dtype), adapters, self.products)

    def _block(self, rngs: nnx.Rngs, adapters: LoraConfig = NO_ADAPTERS) -> Block:
        return Block(self._build(rngs, adapters), self.shape)

    def _ends(self, rngs: nnx.Rngs) -> _Ends:
        return _Ends(self._build(rngs), self.shape, self.head)

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
        block, ends = (_definition(self, part)[1] for part in ("block", "ends"))
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
        return lora.only({"layers": _axes(_definition(self, "adapted")[1], ("layers",))})

    def embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = params["embed"].astype(self.compute_dtype)
        return constrain(table[tokens], "batch", "length", "embed")

    def _embed_rows(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns `embed`; no device holds the whole table or its whole gradient.

        The table is split by features, so that each device looks up a slice of every token; then
        the slices are exchanged.
        """
        table = _row_major_gradient(params["embed"]).astype(self.compute_dtype)
        # Constrained to its own split as well, so that the gradient comes back in it.
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
        part = "adapted" if lora.present(layer) else "block"
        return _merged(self, part, layer)(x, rotary, attend)

    def norm(self, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the final normalization of the residual stream."""
        ends = {k: v for k, v in params.items() if k != "layers"}
        return _merged(self, "ends", ends).norm(x)

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
        prefix_ids: Int[Array | np.ndarray, "_ prefix"] = attention.NOTHING_SHARED,
        key_blocks: Int[Array | np.ndarray, "_ blocks seen"] = attention.ALL_BLOCKS,
    ) -> Float[Array, "B T D"]:
        """Returns the normalized last hidden state of every token of packed rows.

        `positions` are within each token's own sequence. `prefix_ids` and `key_blocks` are as of
        `full_attention`, for rows whose length is not split over devices.
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


@functools.lru_cache(maxsize=96)
def _definition(network: Network, part: str):
    """Returns the graph definition and the state of a block, the ends, a block with adapters."""
    make: dict[str, Callable[[], nnx.Module]] = {
        "block": lambda: network._block(nnx.Rngs(0)),
        "ends": lambda: network._ends(nnx.Rngs(0)),
        "adapted": lambda: network._block(nnx.Rngs(0), network.lora),
    }
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(make[part]))


def _merged(network: Network, part: str, params: Params) -> Any:
    graph, state = _definition(network, part)
    state = jax.tree.map(lambda v: v, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@functools.lru_cache(maxsize=32)
def _abstract(network: Network) -> Params:
    return jax.eval_shape(network.init, jax.random.key(0))
