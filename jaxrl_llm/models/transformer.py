"""The decoder-only transformer: its parameter tree, and its forward pass.

Parameters are a plain nested dict of arrays; Flax modules exist only inside a trace. One `Network`
serves any number of parameter trees (policy, reference, critic, rollout copy).

Training and scoring scan over stacked layers: `params["layers"]` has a tree for each stack of equal
layers (`Architecture.layer_stacks`), its leaves are [L, ...]. The rollout copy is a tuple of layers
instead; `block` takes one layer of either.
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
from jaxrl_llm.models import attention, heads, lora, mixed_precision, nnx_bridge
from jaxrl_llm.models import packed_inputs as inputs_lib
from jaxrl_llm.models.architecture import UNIFORM_LAYER, Architecture, LayerStack, LayerType
from jaxrl_llm.models.attention_modules import AttentionFunction, Rotary, rotary_tables
from jaxrl_llm.models.block import Block, EmbedAndHead
from jaxrl_llm.models.context_parallel import ContextParallelForm
from jaxrl_llm.models.cpu_kernels.matmuls import decode_products as cpu_kernels_products
from jaxrl_llm.models.hf.vocabulary import TokenRanges
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.layers import DEFAULT_MATMULS, NO_ADAPTERS, MatmulImpl, ParamFactory
from jaxrl_llm.models.moe.router import RouterInputs, RouterOutputs
from jaxrl_llm.models.nnx_bridge import Params
from jaxrl_llm.models.packed_inputs import PackedInputs
from jaxrl_llm.models.quantization import quantize_layer
from jaxrl_llm.models.quantized import kernels
from jaxrl_llm.models.remat import REMAT_POLICIES
from jaxrl_llm.models.vision import encoder
from jaxrl_llm.sharding.mesh import constrain, constrain_as_weight

ROUTE_DTYPE = jnp.int16  # of expert ids; -1 is none

# Platforms with faster matmuls for decode steps than `DEFAULT_MATMULS`, as functions of mesh and
# dtype.
DECODE_PRODUCTS: dict[str, Callable[[Mesh, str], MatmulImpl]] = {
    "cpu": cpu_kernels_products,
    # Without the barrier XLA chooses a heads-first layout and transposes the weights for it: a
    # second copy of all layers' projections while the loop of decode steps runs.
    "tpu": lambda mesh, dtype: MatmulImpl(after_qkv_projection=jax.lax.optimization_barrier),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A decoder of one architecture with a language-model or a scalar head.

    Attributes:
      head: "lm" predicts tokens; "scalar" gives one value per position (critic, reward model).
      param_dtype, compute_dtype: Of the parameters at initialization, and of the activations.
      remat: What the backward pass recomputes; a key of `REMAT_POLICIES` or "none".
      kernel: Attention kernel for whole rows (training, scoring, prefill).
      lora: Config of the adapters that a parameter tree may have.
      num_adapters: Adapters of each projection, of which every token uses one or none (see
        `lora.assign_adapters`); 0: a single one that all tokens use.
      sequence_attention: Form of context parallelism, where a row is sharded over devices.
      products: Implementations of its matmuls; `for_decoding` chooses faster ones.
      cache_dtype: Of the KV cache; "": `compute_dtype`.
      suppressed_tokens: Tokens of probability 0, for decoding and for log-probs in training.
    """

    shape: Architecture
    head: Literal["lm", "scalar"] = "lm"
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "none"
    lora: LoraConfig = NO_ADAPTERS
    kernel: attention.AttentionImplementation = "xla"
    sequence_attention: ContextParallelForm = "all_to_all"
    matmuls: MatmulImpl = DEFAULT_MATMULS
    cache_dtype: str = ""
    suppressed_tokens: TokenRanges = ()
    num_adapters: int = 0

    def for_decoding(self, mesh: Mesh) -> "Network":
        """This network with the fastest matmuls for decode steps on a mesh."""
        choose = DECODE_PRODUCTS.get(mesh.devices.flat[0].platform)
        if choose is None:
            return self
        return dataclasses.replace(self, matmuls=choose(mesh, self.compute_dtype))

    @property
    def decode_attention(self) -> Callable[..., Array] | None:
        """The decode attention kernel over the paged cache, or None if XLA's is used."""
        same_dtype = self.cached_dtype == self.compute_dtype
        return self.matmuls.attention if self.shape.has_plain_scores and same_dtype else None

    @property
    def cached_dtype(self) -> str:
        return self.cache_dtype or self.compute_dtype

    def to_stored_layout(self, layer: Params, kind: LayerType = UNIFORM_LAYER) -> Params:
        """Converts a layer with plain kernels [in, out] to this network's storage.

        Some kernels are transposed or quantized, as `matmuls` says.
        """
        plain_products = dataclasses.replace(
            DEFAULT_MATMULS, quantization=self.matmuls.quantization
        )
        plain_axes, stored_axes = (
            nnx_bridge.logical_axes(
                nnx_bridge.graph_and_state(
                    dataclasses.replace(self, matmuls=products), "block", kind
                )[1]
            )
            for products in (plain_products, self.matmuls)
        )
        layer = quantize_layer(layer, plain_products.quantization, self.compute_dtype)
        transposed = lambda a, axes, target: a if axes == target else a.T  # noqa: E731
        return jax.tree.map(transposed, layer, plain_axes, stored_axes)

    def _build(self, rngs: nnx.Rngs, adapters: LoraConfig = NO_ADAPTERS) -> ParamFactory:
        dtype = jnp.dtype(self.param_dtype)
        return ParamFactory(rngs, dtype, adapters, self.matmuls, self.num_adapters)

    def _block(self, kind: LayerType, rngs: nnx.Rngs, adapters: LoraConfig = NO_ADAPTERS) -> Block:
        return Block(self._build(rngs, adapters), self.shape, kind)

    def _ends(self, rngs: nnx.Rngs) -> EmbedAndHead:
        return EmbedAndHead(self._build(rngs), self.shape, self.head)

    @property
    def sharding_units(self) -> dict[str, int]:
        """Logical dims that the tensor axis must split in multiples of a size: whole heads."""
        shape, latent = self.shape, self.shape.latent
        units = {"heads": shape.head_size, "kv_heads": shape.head_size}
        if latent:
            key_and_value_size = latent.plain_size + latent.value_size
            units |= {"key_value_heads": key_and_value_size, "value_heads": latent.value_size}
        if shape.vision:
            units["tower_heads"] = shape.vision.head_size
        if shape.output_gate:
            units["gated_heads"] = 2 * shape.head_size
        if shape.gated_delta:
            units["delta_keys"] = shape.gated_delta.key_size
            units["delta_values"] = shape.gated_delta.value_size
        return units

    @property
    def unquantized(self) -> "Network":
        """This network with plain kernels."""
        return dataclasses.replace(
            self, matmuls=dataclasses.replace(self.matmuls, quantization="none")
        )

    @property
    def decoder(self) -> "Network":
        """This network without its vision encoder; it takes image features as `ImageInputs`."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, vision=None))

    def _stacked(self, key: jax.Array, adapters: LoraConfig = NO_ADAPTERS) -> dict[str, Params]:
        """The parameters of all blocks, stacked; a layer's key depends only on its number."""
        keys = jax.random.split(key, self.shape.num_layers)

        def init_stack(kind: LayerType, keys: jax.Array) -> Params:
            return jax.vmap(
                lambda k: nnx_bridge.module_params(self._block(kind, nnx.Rngs(k), adapters))
            )(keys)

        stacks = self.shape.layer_stacks
        return {
            name: init_stack(s.layer, keys[np.array(s.layer_indices)]) for name, s in stacks.items()
        }

    def init(self, key: jax.Array) -> Params:
        """Random parameters: normal(0.02), norms one, biases and scalar head zero.

        Of a quantized network they are those of the plain one, quantized.
        """
        if (format := self.matmuls.quantization) != "none":
            params = self.unquantized.init(key)
            layers = params["layers"].items()
            stacks = {name: kernels.quantize_layers(stack, format) for name, stack in layers}
            return {**params, "layers": stacks}
        ends_key, layers_key = jax.random.split(key)
        params = {
            **nnx_bridge.module_params(self._ends(nnx.Rngs(ends_key))),
            "layers": self._stacked(layers_key),
        }
        if self.shape.vision:
            params["vision"] = self.vision_encoder.init(jax.random.fold_in(key, 2))
        return params

    @property
    def vision_encoder(self) -> encoder.VisionEncoder:
        """The vision encoder; only for networks with `shape.vision`."""
        assert self.shape.vision is not None
        return encoder.VisionEncoder(
            self.shape.vision,
            self.shape.hidden_size,
            self.param_dtype,
            self.compute_dtype,
            self.remat,
            self.lora,
        )

    def module(self, part: str, kind: LayerType) -> nnx.Module:
        """The module of a "block", of a block with adapters ("adapted"), or of the "ends"."""
        rngs = nnx.Rngs(0)
        if part == "ends":
            return self._ends(rngs)
        return self._block(kind, rngs, self.lora if part == "adapted" else NO_ADAPTERS)

    def abstract_params(self) -> Params:
        """The shapes and dtypes of the parameters, without allocating any."""
        # a copy: the cached tree is shared
        return jax.tree.map(lambda a: a, _abstract_params(self))

    def logical_axes(self) -> Params:
        """The tree of `init` with a tuple of logical dim names for each array."""
        axes = {
            **nnx_bridge.logical_axes(nnx_bridge.graph_and_state(self, "ends")[1]),
            "layers": self.stacked_axes("block"),
        }
        if self.shape.vision:
            axes["vision"] = self.vision_encoder.logical_axes()
        return axes

    def stacked_axes(self, part: Literal["block", "adapted"]) -> Params:
        """The logical dim names of the layers' arrays by stack, with adapters or without."""
        stacks = self.shape.layer_stacks
        definition = functools.partial(nnx_bridge.graph_and_state, self, part)
        dims = {name: "layers" if s.stages == 1 else "staged" for name, s in stacks.items()}
        return {
            name: nnx_bridge.logical_axes(definition(s.layer)[1], (dims[name],))
            for name, s in stacks.items()
        }

    def init_adapters(self, key: jax.Array) -> Params:
        """Initial adapters, which leave the output unchanged: A random, B zero."""
        adapters = lora.adapter_params({"layers": self._stacked(key, self.lora)})
        if self.shape.vision:
            adapters["vision"] = self.vision_encoder.init_adapters(jax.random.fold_in(key, 2))
        return adapters

    def abstract_adapters(self) -> Params:
        """The shapes and dtypes of the adapters, without allocating any; `{}` with rank 0."""
        return jax.eval_shape(self.init_adapters, jax.random.key(0))

    def adapter_axes(self) -> Params:
        """The tree of `abstract_adapters` with the logical dim names of each array."""
        axes = lora.adapter_params({"layers": self.stacked_axes("adapted")})
        if self.shape.vision:
            axes["vision"] = self.vision_encoder.adapter_axes()
        return axes

    def embed(
        self, params: Params, tokens: Int[Array, "B T"], image_inputs: ImageInputs | None = None
    ) -> Float[Array, "B T D"]:
        table = params["embed"].astype(self.compute_dtype)
        x = self._scale_embeddings(table[tokens])
        if image_inputs is not None:
            embeddings = image_inputs.embeddings(self.shape.hidden_size)
            x = image_inputs.replace_embeddings(x, embeddings)
        return constrain(x, "batch", "length", "embed")

    def _scale_embeddings(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if not self.shape.scale_embeddings:
            return x
        return x * jnp.asarray(self.shape.hidden_size**0.5, x.dtype)

    def embed_sharded(
        self, params: Params, tokens: Int[Array, "B T"], image_inputs: ImageInputs | None = None
    ) -> Float[Array, "B T D"]:
        """`embed` for training: no device holds the whole table or its whole gradient.

        The table is resharded by features, so that each device looks up a slice of every token's
        embedding; then an all-to-all gathers the slices.
        """
        table = mixed_precision.row_major_gradient(params["embed"]).astype(self.compute_dtype)
        # Constrained to its own sharding first, so that the gradient comes back in it.
        table = constrain_as_weight(table, "vocab", None)
        slices = self._scale_embeddings(constrain_as_weight(table, None, "vocab")[tokens])
        if image_inputs is not None:
            embeddings = image_inputs.embeddings(self.shape.hidden_size)
            slices = image_inputs.replace_embeddings(
                slices, constrain_as_weight(embeddings, None, "vocab")
            )
        slices = constrain_as_weight(slices, None, None, "vocab")
        return constrain(slices, "batch", "length", "embed")

    def rotary(self, positions: Int[Array, "B T *parts"]) -> Rotary:
        """The rotary tables of these positions, shared by all layers."""
        return rotary_tables(self.shape, positions)

    def block(
        self,
        layer: Params,
        x: Float[Array, "B T D"],
        rotary: Rotary,
        attend: AttentionFunction,
        kind: LayerType = UNIFORM_LAYER,
        *,
        compressed: bool = False,
        routing: RouterInputs | None = None,
        image_inputs: ImageInputs | None = None,
    ):
        """Runs one layer; returns as `Block`: output, result of `attend`, router outputs.

        The output includes the deepstack features of `image_inputs` that are of this layer.
        """
        part = "adapted" if lora.has_adapters(layer) else "block"
        block = nnx_bridge.merge_module(self, part, layer, kind)
        x, cache, routed = block(x, rotary, attend, compressed, routing)
        if image_inputs is not None and kind.deepstack:
            x = image_inputs.add_deepstack(x, kind.deepstack)
        return x, cache, routed

    def norm(self, params: Params, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The final norm of the residual stream."""
        ends = {k: v for k, v in params.items() if k not in ("layers", "vision")}
        return nnx_bridge.merge_module(self, "ends", ends).norm(x)

    def head_weight(self, params: Params) -> Float[Array, "V D"]:
        """The output projection: [V, D], or [1, D] of a scalar head."""
        if self.head == "scalar":
            return params["score"]
        return params["embed" if self.shape.tie_embeddings else "head"]

    def logits(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits, accumulated in float32 whatever the dtype of `hidden`."""
        logits = self.matmuls.logits(hidden, self.head_weight(params).astype(hidden.dtype))
        logits = attention.soft_capped(logits, self.shape.logit_cap)
        return heads.mask_suppressed(logits, jnp.arange(logits.shape[-1]), self.suppressed_tokens)

    def forward(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        prefix_ids: Int[Array | np.ndarray, "_ prefix"] = attention.NO_PREFIXES,
        key_blocks: Int[Array | np.ndarray, "_ blocks seen"] = attention.ALL_KEY_BLOCKS,
        routing: RouterInputs | None = None,
        image_inputs: ImageInputs | None = None,
    ) -> tuple[Float[Array, "B T D"], RouterOutputs | None]:
        """The normalized last hidden states of packed rows, and router outputs.

        `positions` are within each token's own sequence. For `prefix_ids` and `key_blocks`, which
        need rows that are not sharded along their length, see `full_attention`. Router outputs are
        stacked by MoE layer (None: no experts).

        Experts that `routing` replays are those of all layers side by side, [B, T, routes]. By
        default there are none, and all tokens but padding are counted.
        """
        if self.shape.stages > 1:
            raise ValueError(
                "Network.forward: layers on stages are read by models/pipeline/schedule.py"
            )
        routing = routing or RouterInputs(segment_ids != 0)
        inputs = PackedInputs(positions, segment_ids, prefix_ids, key_blocks, routing, image_inputs)
        routes = inputs_lib.routes_by_stack(self.shape, routing.replayed)
        x, layers = self.embed_sharded(params, tokens, image_inputs), params["layers"]
        x, routed = self.run_layers(self.shape.layer_groups, layers, x, inputs, routes)
        return self.norm(params, x), inputs_lib.routed_in_layer_order(self.shape, routed)

    def run_layers(
        self,
        groups: Sequence[Sequence[LayerStack]],
        stacked: Mapping[str, Params],
        x: Float[Array, "B T D"],
        inputs: PackedInputs,
        routes: inputs_lib.RoutesByStack,
    ) -> tuple[Float[Array, "B T D"], dict[str, RouterOutputs]]:
        """Runs groups of layers; returns hidden states, and router outputs by stack.

        `stacked` are the parameters of each stack, `flatten_routes` the experts to replay in it.
        """
        attend = functools.partial(
            PackedInputs.attend, inputs, kernel=self.kernel, form=self.sequence_attention
        )
        sights = inputs.image_inputs
        rotary = self.rotary(inputs.positions if sights is None else sights.positions)

        def run_layer(kind: LayerType, x, layer_inputs):
            layers, index, layer_routes = layer_inputs
            layer = mixed_precision.cast_layer(layers, index, self.compute_dtype)
            routing = (
                dataclasses.replace(inputs.routing, replayed=layer_routes) if kind.experts else None
            )
            x, _, routed = self.block(
                layer, x, rotary, attend, kind, routing=routing, image_inputs=sights
            )
            return x, routed

        if self.remat != "none":
            policy = REMAT_POLICIES[self.remat]
            run_layer = jax.checkpoint(
                run_layer, policy=policy, prevent_cse=False, static_argnums=0
            )
        routed_by_stack: dict[str, RouterOutputs] = {}
        for group in groups:
            # Stacks of a group alternate, as (5 local layers, 1 global) x 8. A scan over each stack
            # would run layers out of order, and unrolling compiles every layer. So an outer scan
            # runs over repeats of the pattern and an inner one over a run of equal layers: one
            # layer of each stack is compiled.
            def run_pattern(x, pattern_inputs, group=group):
                routed_of_stacks = []
                for stack, stack_inputs in zip(group, pattern_inputs, strict=True):
                    x, routed = jax.lax.scan(
                        functools.partial(run_layer, stack.layer), x, stack_inputs
                    )
                    routed_of_stacks.append(routed)
                return x, routed_of_stacks

            lengths = [len(jax.tree.leaves(stacked[stack.name])[0]) for stack in group]
            group_inputs = [
                (stacked[stack.name], jnp.arange(length), routes[stack.name])
                for stack, length in zip(group, lengths, strict=True)
            ]
            repeats = lengths[0] // group[0].run_length
            if repeats == 1 or len(group) == 1:
                x, routed = run_pattern(x, group_inputs)
            else:
                by_repeat = functools.partial(_split_repeats, repeats)
                x, routed = jax.lax.scan(run_pattern, x, jax.tree.map(by_repeat, group_inputs))
                routed = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), routed)
            names = [stack.name for stack in group]
            routed_by_stack |= {n: r for n, r in zip(names, routed, strict=True) if r is not None}
        return x, routed_by_stack

    @property
    def num_routes(self) -> int:
        """The number of experts a token visits in all layers together."""
        experts = self.shape.experts
        return experts.per_token * len(self.shape.moe_layers) if experts else 0

    def flatten_routes(self, chosen: Int[Array, "L B T k"]) -> Int[Array, "B T routes"]:
        """Concatenates the chosen experts of all MoE layers along the last dim."""
        side_by_side = jnp.moveaxis(chosen, 0, 2)
        return side_by_side.reshape(*side_by_side.shape[:2], -1).astype(ROUTE_DTYPE)


def _split_repeats(repeats: int, stacked: Array) -> Array:
    """Splits the layers dim of a stack [L, ...] into [repeats, run, ...]."""
    return stacked.reshape(repeats, -1, *stacked.shape[1:])


@functools.lru_cache(maxsize=32)
def _abstract_params(network: Network) -> Params:
    return jax.eval_shape(network.init, jax.random.key(0))
