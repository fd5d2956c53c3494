"""The vision encoder of Qwen2.5-VL (arXiv:2502.13923, Sec. 2.1.1): patches in, embeddings out.

Rows hold the patches of several images in window order (`patches.pack_images`); images do not
attend to each other. Every window fills an equal slice of a row, so window attention is one batch
of small attention problems.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import lora, mixed_precision, nnx_bridge
from jaxrl_llm.models.architecture import UNIFORM_LAYER, LayerType, RopeScaling, VisionArchitecture
from jaxrl_llm.models.attention import QUERY_BLOCK, masked_attention
from jaxrl_llm.models.attention_modules import apply_rotary, rotary_frequencies
from jaxrl_llm.models.layers import MLP, NO_ADAPTERS, Linear, ParamFactory, RMSNorm
from jaxrl_llm.models.remat import REMAT_POLICIES
from jaxrl_llm.sharding.mesh import constrain

_THETA = 10_000.0
_HEAD_AXES = ("batch", None, "tower_heads", None)


class VisionEncoderBlock(nnx.Module):
    """One pre-norm layer with bidirectional attention within each image or each window."""

    def __init__(self, build: ParamFactory, vision: VisionArchitecture):
        d, heads = vision.hidden_size, ("embed", "tower_heads")
        self.attention_norm = RMSNorm(build, d, vision)
        self.q = Linear(build, "q", d, d, heads, bias=True)
        self.k = Linear(build, "k", d, d, heads, bias=True)
        self.v = Linear(build, "v", d, d, heads, bias=True)
        self.o = Linear(build, "o", d, d, heads[::-1], bias=True)
        self.mlp_norm = RMSNorm(build, d, vision)
        self.mlp = MLP(build, vision, vision.mlp_size, bias=True)
        self.vision = vision

    def __call__(
        self,
        x: Float[Array, "rows patches D"],
        table: tuple[Array, Array],
        image_ids: Int[Array, "rows patches"],
        sees_whole_image: Array,
    ) -> Float[Array, "rows patches D"]:
        y = self.attention_norm(x)
        projections = (f(y).reshape(*x.shape[:2], -1, self.vision.head_size) for f in self._qkv())
        q, k, v = (constrain(projection, *_HEAD_AXES) for projection in projections)
        q, k = apply_rotary(q, table), apply_rotary(k, table)
        window_attention = functools.partial(_window_attention, self.vision.window_patches)
        attended = jax.lax.cond(
            sees_whole_image, _image_attention, window_attention, q, k, v, image_ids
        )
        x = x + self.o(attended.reshape(x.shape))
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", None, "embed")

    def _qkv(self) -> tuple[Linear, Linear, Linear]:
        return self.q, self.k, self.v


class VisionEmbedAndMerger(nnx.Module):
    """The parts around the layers: patch embedding and patch merger."""

    def __init__(self, build: ParamFactory, vision: VisionArchitecture, out_size: int):
        d, side = vision.hidden_size, vision.patch_size
        sizes = (d, 3, vision.frames, side, side)
        self.patch = build.normal(sizes, ("embed", *("patch",) * 4))
        merged = d * vision.merge_size**2
        self.norm = RMSNorm(build, d, vision)
        self.merge_in = Linear(build, "merge", merged, merged, ("embed", "mlp"), bias=True)
        self.merge_out = Linear(build, "merge", merged, out_size, ("mlp", "embed"), bias=True)

    def embed(self, pixels: Float[Array, "rows patches dims"]) -> Float[Array, "rows patches D"]:
        kernel = self.patch[...].astype(pixels.dtype)
        return pixels @ kernel.reshape(kernel.shape[0], -1).T

    def merge(self, x: Float[Array, "rows patches D"]) -> Float[Array, "rows vectors O"]:
        x = self.norm(x).reshape(x.shape[0], -1, self.merge_in.kernel.shape[0])
        return self.merge_out(jax.nn.gelu(self.merge_in(x), approximate=False))


@dataclasses.dataclass(frozen=True)
class VisionEncoder:
    """A vision encoder; its parameters are a nested dict of arrays, with layers stacked."""

    vision: VisionArchitecture
    out_size: int  # of an embedding: the decoder's hidden size
    param_dtype: str
    compute_dtype: str
    remat: str = "none"  # other than "none": only layer inputs are saved for the backward pass
    lora: LoraConfig = NO_ADAPTERS

    def module(self, part: str, kind: LayerType = UNIFORM_LAYER) -> nnx.Module:
        """A module: a "block", a block with adapters ("adapted"), or the "ends"."""
        return self._make_module(part, nnx.Rngs(0))

    def _make_module(self, part: str, rngs: nnx.Rngs) -> nnx.Module:
        adapters = self.lora if part == "adapted" else NO_ADAPTERS
        build = ParamFactory(rngs, jnp.dtype(self.param_dtype), adapters)
        if part == "ends":
            return VisionEmbedAndMerger(build, self.vision, self.out_size)
        return VisionEncoderBlock(build, self.vision)

    def init(self, key: jax.Array) -> nnx_bridge.Params:
        """Random initial parameters, drawn as in `Network.init`."""
        keys = jax.random.split(key, self.vision.num_layers + 1)
        ends = nnx_bridge.module_params(self._make_module("ends", nnx.Rngs(keys[-1])))
        return {**ends, "layers": self._stacked_params("block", keys[:-1])}

    def init_adapters(self, key: jax.Array) -> nnx_bridge.Params:
        """Initial adapters, which change nothing yet; see `Network.init_adapters`."""
        keys = jax.random.split(key, self.vision.num_layers)
        return lora.adapter_params({"layers": self._stacked_params("adapted", keys)})

    def _stacked_params(self, part: str, keys: jax.Array) -> nnx_bridge.Params:
        return jax.vmap(lambda k: nnx_bridge.module_params(self._make_module(part, nnx.Rngs(k))))(
            keys
        )

    def logical_axes(self) -> nnx_bridge.Params:
        """The tree of `init` with a tuple of logical axis names per array."""
        ends = nnx_bridge.logical_axes(nnx_bridge.graph_and_state(self, "ends")[1])
        return {**ends, "layers": self._layer_axes("block")}

    def adapter_axes(self) -> nnx_bridge.Params:
        """The tree of `init_adapters` with a tuple of logical axis names per array."""
        return lora.adapter_params({"layers": self._layer_axes("adapted")})

    def _layer_axes(self, part: str) -> nnx_bridge.Params:
        return nnx_bridge.logical_axes(nnx_bridge.graph_and_state(self, part)[1], ("layers",))

    def encode(
        self,
        params: nnx_bridge.Params,
        pixels: Float[Array, "rows patches dims"],
        coordinates: Int[Array, "rows patches 2"],
        image_ids: Int[Array, "rows patches"],
    ) -> Float[Array, "rows vectors O"]:
        """Encodes the patches of all images into token embeddings, in the order of the patches.

        Args:
          coordinates: Row and column of each patch in its image.
          image_ids: Image of each patch, by its index in the row from 1; 0: padding.
        """
        vision = self.vision
        frequencies = rotary_frequencies(vision.head_size // 2, _THETA, RopeScaling())
        angles = coordinates.astype(jnp.float32)[..., None] * frequencies
        angles = angles.reshape(*coordinates.shape[:2], 1, -1)  # row angles, then column angles
        table = jnp.cos(angles), jnp.sin(angles)
        is_full = np.isin(np.arange(vision.num_layers), vision.full_layers)

        def run_layer(x, layer_inputs):
            stacked, index, sees_whole_image = layer_inputs
            layer = mixed_precision.cast_layer(stacked, index, self.compute_dtype)
            part = "adapted" if lora.has_adapters(layer) else "block"
            return nnx_bridge.merge_module(self, part, layer)(
                x, table, image_ids, sees_whole_image
            ), None

        if self.remat != "none":
            run_layer = jax.checkpoint(run_layer, policy=REMAT_POLICIES["full"], prevent_cse=False)
        ends = {name: value for name, value in params.items() if name != "layers"}
        ends_module = nnx_bridge.merge_module(self, "ends", ends)
        x = ends_module.embed(pixels.astype(self.compute_dtype))
        x = constrain(x, "batch", None, "embed")
        layers = params["layers"], jnp.arange(vision.num_layers), jnp.asarray(is_full)
        x, _ = jax.lax.scan(run_layer, x, layers)
        return ends_module.merge(x)


def _window_attention(size: int, q, k, v, image_ids) -> Float[Array, "rows patches N H"]:
    """Attention within windows: slices of `size` patches of a row, each of one image."""
    split_windows = lambda x: x.reshape(-1, size, *x.shape[2:])  # noqa: E731
    ids = split_windows(image_ids)
    attended = masked_attention(
        split_windows(q), split_windows(k), split_windows(v), _same_image_mask(ids, ids)
    )
    return attended.reshape(q.shape)


def _image_attention(q, k, v, image_ids) -> Float[Array, "rows patches N H"]:
    """Attention within images, one block of queries after the other."""
    rows, length = image_ids.shape
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return masked_attention(q, k, v, _same_image_mask(image_ids, image_ids))

    def split_blocks(x):
        return jnp.moveaxis(x.reshape(rows, -1, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    @jax.checkpoint  # rematerialized: only one block's scores exist at a time
    def attend(query_block):
        queries, ids = query_block
        return masked_attention(queries, k, v, _same_image_mask(ids, image_ids))

    attended = jax.lax.map(attend, (split_blocks(q), split_blocks(image_ids)))
    return jnp.moveaxis(attended, 0, 1).reshape(q.shape)


def _same_image_mask(query_ids, key_ids):
    # Padding attends to padding: a fully masked row of scores would give NaN.
    return (query_ids[:, :, None] == key_ids[:, None, :])[:, None]
