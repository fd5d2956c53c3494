"""One decoder network: what its parameters are, and what it computes from them.

Parameters are a plain nested dict of arrays; Flax modules exist only inside a trace. One `Network`
serves any number of parameter trees (policy, reference, critic, rollout copy).

Training and scoring scan over stacked layers: `params["layers"]` has a tree for each stack of equal
layers (`Shape.stacks`), its leaves are [L, ...]. The rollout copy is a tuple of layers instead;
`block` takes one layer of either.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import attention, casting, heads, lora, modules, tower
from jaxrl_llm.models import reading as reading_lib
from jaxrl_llm.models.attention_layers import Attend, Rotary, rotary_tables
from jaxrl_llm.models.block import Block, Ends
from jaxrl_llm.models.layers import NO_ADAPTERS, PLAIN, Build, Products
from jaxrl_llm.models.low_precision import quantized
from jaxrl_llm.models.modules import Params
from jaxrl_llm.models.on_cpu.products import decode_products as on_cpu
from jaxrl_llm.models.reading import Reading
from jaxrl_llm.models.remat import REMAT_POLICIES
from jaxrl_llm.models.router import Routed, Routing
from jaxrl_llm.models.sequence_attention import Form
from jaxrl_llm.models.shape import EVERYWHERE, Layer, Shape, Stack
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.models.vocabulary import TokenRanges
from jaxrl_llm.sharding.mesh import constrain, constrain_as_weight

ROUTE_DTYPE = jnp.int16  # of numbers of experts, of which -1 is none

# Platforms on which decode steps have better products than `PLAIN`: a function of mesh and dtype.
DECODE_PRODUCTS: dict[str, Callable[[Mesh, str], Products]] = {
    "cpu": on_cpu,
    # Or the compiler lets heads come first, for which it turns the weights: a second copy of those
    # of all layers, for as long as the loop of decode steps runs.
    "tpu": lambda mesh, dtype: Products(projected=jax.lax.optimization_barrier),
}


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
      cache_dtype: Of keys and values that decoding keeps; "": `compute_dtype`.
      suppressed_tokens: Tokens of probability 0, for decoding and for log-probs in training.
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
    cache_dtype: str = ""
    suppressed_tokens: TokenRanges = ()

    def for_decoding(self, mesh: Mesh) -> "Network":
        """Returns this network with the products that suit decode steps on a mesh."""
        choose = DECODE_PRODUCTS.get(mesh.devices.flat[0].platform)
        if choose is None:
            return self
        return dataclasses.replace(self, products=choose(mesh, self.compute_dtype))

    @property
    def decode_kernel(self) -> Callable[..., Array] | None:
        """Attention of decode steps that skips what no query sees; None: XLA's."""
        as_computed = self.cached_dtype == self.compute_dtype
        return self.products.attention if self.shape.has_plain_scores and as_computed else None

    @property
    def cached_dtype(self) -> str:
        return self.cache_dtype or self.compute_dtype

    def stored(self, layer: Params, kind: Layer = EVERYWHERE) -> Params:
        """Returns a layer of a kind with plain kernels as this network stores it.

        Some are transposed, or rounded.
        """
        as_given = dataclasses.replace(PLAIN, quantization=self.products.quantization)
        plain, ours = (
            modules.axes(
                modules.definition(dataclasses.replace(self, products=products), "block", kind)[1]
            )
            for products in (as_given, self.products)
        )
        layer = quantized(layer, as_given.quantization, self.compute_dtype)
        turn = lambda a, given, wanted: a if given == wanted else a.T  # noqa: E731
        return jax.tree.map(turn, layer, plain, ours)

    def _build(self, rngs: nnx.Rngs, adapters: LoraConfig = NO_ADAPTERS) -> Build:
        return Build(rngs, jnp.dtype(self.param_dtype), adapters, self.products)

    def _block(self, kind: Layer, rngs: nnx.Rngs, adapters: LoraConfig = NO_ADAPTERS) -> Block:
        return Block(self._build(rngs, adapters), self.shape, kind)

    def _ends(self, rngs: nnx.Rngs) -> Ends:
        return Ends(self._build(rngs), self.shape, self.head)

    @property
    def units(self) -> dict[str, int]:
        """Logical dims of which the tensor axis may only take whole heads."""
        shape, latent = self.shape, self.shape.latent
        units = {"heads": shape.head_size, "kv_heads": shape.head_size}
        if latent:
            both = latent.plain_size + latent.value_size
            units |= {"key_value_heads": both, "value_heads": latent.value_size}
        if shape.vision:
            units["tower_heads"] = shape.vision.head_size
        return units

    @property
    def decoder(self) -> "Network":
        """This network without its tower: what samples, and reads what a tower saw."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, vision=None))

    def _stacked(self, key: jax.Array, adapters: LoraConfig = NO_ADAPTERS) -> dict[str, Params]:
        """Returns the parameters of all blocks, stacked; the key of a layer follows its number."""
        keys = jax.random.split(key, self.shape.num_layers)

        def of(kind: Layer, keys: jax.Array) -> Params:
            return jax.vmap(lambda k: modules.pure(self._block(kind, nnx.Rngs(k), adapters)))(keys)

        stacks = self.shape.stacks
        return {name: of(s.layer, keys[np.array(s.numbers)]) for name, s in stacks.items()}

    def init(self, key: jax.Array) -> Params:
        """Returns random parameters: normal(0.02), norms one, biases and scalar head zero."""
        ends_key, layers_key = jax.random.split(key)
        found = {
            **modules.pure(self._ends(nnx.Rngs(ends_key))),
            "layers": self._stacked(layers_key),
        }
        if self.shape.vision:
            found["vision"] = self.tower.init(jax.random.fold_in(key, 2))
        return found

    @property
    def tower(self) -> tower.Tower:
        """What reads images; for networks with `shape.vision` alone."""
        assert self.shape.vision is not None
        dtypes = self.param_dtype, self.compute_dtype
        return tower.Tower(
            self.shape.vision, self.shape.hidden_size, *dtypes, self.remat, self.lora
        )

    def module(self, part: str, kind: Layer) -> nnx.Module:
        """Returns a block, a block with adapters ("adapted"), or the "ends"."""
        rngs = nnx.Rngs(0)
        if part == "ends":
            return self._ends(rngs)
        return self._block(kind, rngs, self.lora if part == "adapted" else NO_ADAPTERS)

    def abstract(self) -> Params:
        """Returns the shapes and dtypes of the parameters, nothing allocated."""
        return jax.tree.map(lambda a: a, _abstract(self))  # a tree of the caller's own

    def logical_axes(self) -> Params:
        """Returns the tree of `init` with a tuple of logical dim names for each array."""
        found = {
            **modules.axes(modules.definition(self, "ends")[1]),
            "layers": self.stacked_axes("block"),
        }
        if self.shape.vision:
            found["vision"] = self.tower.logical_axes()
        return found

    def stacked_axes(self, part: Literal["block", "adapted"]) -> Params:
        """Returns the logical dim names of the layers' arrays, by stack; with adapters or not."""
        stacks = self.shape.stacks
        definition = functools.partial(modules.definition, self, part)
        dims = {name: "layers" if s.stages == 1 else "staged" for name, s in stacks.items()}
        return {
            name: modules.axes(definition(s.layer)[1], (dims[name],)) for name, s in stacks.items()
        }

    def init_adapters(self, key: jax.Array) -> Params:
        """Returns adapters that change nothing yet: the first factor random, the second zero."""
        found = lora.only({"layers": self._stacked(key, self.lora)})
        if self.shape.vision:
            found["vision"] = self.tower.init_adapters(jax.random.fold_in(key, 2))
        return found

    def abstract_adapters(self) -> Params:
        """Returns shapes and dtypes of the adapters, nothing allocated; `{}` with rank 0."""
        return jax.eval_shape(self.init_adapters, jax.random.key(0))

    def adapter_axes(self) -> Params:
        """Returns the tree of `abstract_adapters` with the logical dim names of each array."""
        found = lora.only({"layers": self.stacked_axes("adapted")})
        if self.shape.vision:
            found["vision"] = self.tower.adapter_axes()
        return found

    def embed(
        self, params: Params, tokens: Int[Array, "B T"], sights: Sights | None = None
    ) -> Float[Array, "B T D"]:
        table = params["embed"].astype(self.compute_dtype)
        x = self._scaled(table[tokens])
        x = x if sights is None else sights.over(x, sights.vectors)
        return constrain(x, "batch", "length", "embed")

    def _scaled(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if not self.shape.scale_embeddings:
            return x
        return x * jnp.asarray(self.shape.hidden_size**0.5, x.dtype)

    def begin(
        self, params: Params, tokens: Int[Array, "B T"], sights: Sights | None = None
    ) -> Float[Array, "B T D"]:
        """Returns `embed`; no device holds the whole table or its whole gradient.

        The table is split by features, so that each device looks up a slice of every token; then
        the slices are exchanged.
        """
        table = casting.row_major_gradient(params["embed"]).astype(self.compute_dtype)
        # Constrained to its own split as well, so that the gradient comes back in it.
        table = constrain_as_weight(table, "vocab", None)
        slices = self._scaled(constrain_as_weight(table, None, "vocab")[tokens])
        if sights is not None:
            slices = sights.over(slices, constrain_as_weight(sights.vectors, None, "vocab"))
        slices = constrain_as_weight(slices, None, None, "vocab")
        return constrain(slices, "batch", "length", "embed")

    def rotary(self, positions: Int[Array, "B T *parts"]) -> Rotary:
        """Returns the rotary tables of these positions, shared by all layers."""
        return rotary_tables(self.shape, positions)

    def block(
        self,
        layer: Params,
        x: Float[Array, "B T D"],
        rotary: Rotary,
        attend: Attend,
        kind: Layer = EVERYWHERE,
        *,
        compressed: bool = False,
        routing: Routing | None = None,
    ):
        """Returns one layer's output, what `attend` kept, and what a router did, see `Block`."""
        part = "adapted" if lora.present(layer) else "block"
        return modules.merged(self, part, layer, kind)(x, rotary, attend, compressed, routing)

    def norm(self, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the final normalization of the residual stream."""
        ends = {k: v for k, v in params.items() if k not in ("layers", "vision")}
        return modules.merged(self, "ends", ends).norm(x)

    def head_weight(self, params: Params) -> Float[Array, "V D"]:
        """Returns the output projection: [V, D], or [1, D] of a scalar head."""
        if self.head == "scalar":
            return params["score"]
        return params["embed" if self.shape.tie_embeddings else "head"]

    def logits(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Returns float32 logits; accumulation is in float32 whatever the dtype of `hidden`."""
        logits = self.products.logits(hidden, self.head_weight(params).astype(hidden.dtype))
        logits = attention.capped(logits, self.shape.logit_cap)
        return heads.masked(logits, jnp.arange(logits.shape[-1]), self.suppressed_tokens)

    def hidden(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        prefix_ids: Int[Array | np.ndarray, "_ prefix"] = attention.NOTHING_SHARED,
        key_blocks: Int[Array | np.ndarray, "_ blocks seen"] = attention.ALL_BLOCKS,
        sights: Sights | None = None,
    ) -> Float[Array, "B T D"]:
        """Returns the normalized last hidden state of every token of packed rows.

        `positions` are within each token's own sequence. `prefix_ids` and `key_blocks` are as of
        `full_attention`, for rows whose length is not split over devices.
        """
        given = tokens, positions, segment_ids, prefix_ids, key_blocks
        return self.read(params, *given, sights=sights)[0]

    def read(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        prefix_ids: Int[Array | np.ndarray, "_ prefix"] = attention.NOTHING_SHARED,
        key_blocks: Int[Array | np.ndarray, "_ blocks seen"] = attention.ALL_BLOCKS,
        routing: Routing | None = None,
        sights: Sights | None = None,
    ) -> tuple[Float[Array, "B T D"], Routed | None]:
        """Returns `hidden`, and what the routers did, by layer with experts (None: no experts).

        Experts that `routing` gives are those of each layer in turn, [B, T, routes]; by default
        none are given, and all tokens but padding are counted.
        """
        if self.shape.stages > 1:
            raise ValueError("Network.read: layers on stages are read by models/pipeline.py")
        routing = routing or Routing(segment_ids != 0)
        reading = Reading(positions, segment_ids, prefix_ids, key_blocks, routing, sights)
        routes = reading_lib.routes_by_stack(self.shape, routing.given)
        x, layers = self.begin(params, tokens, sights), params["layers"]
        x, found = self.through(self.shape.groups, layers, x, reading, routes)
        return self.norm(params, x), reading_lib.in_layer_order(self.shape, found)

    def through(
        self,
        groups: Sequence[Sequence[Stack]],
        stacked: Mapping[str, Params],
        x: Float[Array, "B T D"],
        reading: Reading,
        routes: reading_lib.ByStack,
    ) -> tuple[Float[Array, "B T D"], dict[str, Routed]]:
        """Returns hidden states after whole patterns of layers, and what routers did, by stack.

        `stacked` has their parameters, `routes` what `reading.routing` gives them.
        """
        attend = functools.partial(
            Reading.attended, reading, kernel=self.kernel, form=self.sequence_attention
        )
        sights = reading.sights
        rotary = self.rotary(reading.positions if sights is None else sights.positions)

        def one(kind: Layer, x, entry):
            layers, index, given = entry
            layer = casting.computed(layers, index, self.compute_dtype)
            told = dataclasses.replace(reading.routing, given=given) if kind.experts else None
            x, _, routed = self.block(layer, x, rotary, attend, kind, routing=told)
            return x, routed

        if self.remat != "none":
            policy = REMAT_POLICIES[self.remat]
            one = jax.checkpoint(one, policy=policy, prevent_cse=False, static_argnums=0)
        found: dict[str, Routed] = {}
        for group in groups:

            def run(x, entry, group=group):
                done = []
                for stack, layers in zip(group, entry, strict=True):
                    x, routed = jax.lax.scan(functools.partial(one, stack.layer), x, layers)
                    done.append(routed)
                return x, done

            numbers = [len(jax.tree.leaves(stacked[stack.name])[0]) for stack in group]
            entries = [
                (stacked[stack.name], jnp.arange(number), routes[stack.name])
                for stack, number in zip(group, numbers, strict=True)
            ]
            repeats = numbers[0] // group[0].run
            if repeats == 1 or len(group) == 1:
                x, routed = run(x, entries)
            else:
                by_repeat = functools.partial(_split, repeats)
                x, routed = jax.lax.scan(run, x, jax.tree.map(by_repeat, entries))
                routed = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), routed)
            names = [stack.name for stack in group]
            found |= {n: of for n, of in zip(names, routed, strict=True) if of is not None}
        return x, found

    @property
    def num_routes(self) -> int:
        """Experts that a token visits in all layers."""
        experts = self.shape.experts
        return experts.per_token * len(self.shape.with_experts) if experts else 0

    def routes(self, chosen: Int[Array, "L B T k"]) -> Int[Array, "B T routes"]:
        """Returns the experts that tokens visit in each layer with experts, side by side."""
        side_by_side = jnp.moveaxis(chosen, 0, 2)
        return side_by_side.reshape(*side_by_side.shape[:2], -1).astype(ROUTE_DTYPE)


def _split(repeats: int, stacked: Array) -> Array:
    """Returns parameters of all layers of a stack by the runs they stand in."""
    return stacked.reshape(repeats, -1, *stacked.shape[1:])


@functools.lru_cache(maxsize=32)
def _abstract(network: Network) -> Params:
    return jax.eval_shape(network.init, jax.random.key(0))
