"""Vision encoders of Qwen2.5-VL (arXiv:2502.13923, Sec. 2.1.1) and Qwen3-VL (arXiv:2511.21631).

Patches in, embeddings out.

Rows hold the patches of several images in window order (`patches.pack_images`); images do not
attend to each other. Every window fills an equal slice of a row, so window attention is one batch
of small attention problems.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import lora, mixed_precision, nnx_bridge
from jaxrl_llm.models.architecture import (
    UNIFORM_LAYER,
    LayerType,
    RopeScaling,
    VisionArchitecture,
    VisionKind,
)
from jaxrl_llm.models.attention_modules import rotary_frequencies
from jaxrl_llm.models.layers import NO_ADAPTERS, ParamFactory
from jaxrl_llm.models.remat import REMAT_POLICIES
from jaxrl_llm.models.vision.blocks import VisionEncoderBlock
from jaxrl_llm.models.vision.ends import DeepstackEnds, VisionEnds, WindowedEnds
from jaxrl_llm.sharding.mesh import constrain

_THETA = 10_000.0


# The modules around the layers, by kind; `blocks.py` has those of the layers.
_ENDS: Mapping[VisionKind, type[VisionEnds]] = {
    "qwen2_5": WindowedEnds,
    "qwen3": DeepstackEnds,
}


@dataclasses.dataclass(frozen=True)
class VisionEncoder:
    """A vision encoder; its parameters are a nested dict of arrays, with layers stacked."""

    vision: VisionArchitecture
    out_size: int  # of an embedding: the decoder's hidden size; see `feature_size`
    param_dtype: str
    compute_dtype: str
    remat: str = "none"  # other than "none": only layer inputs are saved for the backward pass
    lora: LoraConfig = NO_ADAPTERS

    @property
    def feature_size(self) -> int:
        """Values of an image token: its embedding, and one more vector per deepstack layer."""
        return self.out_size * (1 + len(self.vision.deepstack_layers))

    def module(self, part: str, kind: LayerType = UNIFORM_LAYER) -> nnx.Module:
        """A module: a "block", a block with adapters ("adapted"), or the "ends"."""
        return self._make_module(part, nnx.Rngs(0))

    def _make_module(self, part: str, rngs: nnx.Rngs) -> nnx.Module:
        adapters = self.lora if part == "adapted" else NO_ADAPTERS
        build = ParamFactory(rngs, jnp.dtype(self.param_dtype), adapters)
        if part == "ends":
            ends: Any = _ENDS[self.vision.kind](build, self.vision, self.out_size)
            return ends
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
        coordinates: Int[Array, "rows patches 4"],
        image_ids: Int[Array, "rows patches"],
    ) -> Float[Array, "rows vectors features"]:
        """Encodes the patches of all images into token features, in the order of the patches.

        Args:
          coordinates: Row and column of each patch in its image, and the size of the image's grid.
          image_ids: Image of each patch, by its index in the row from 1; 0: padding.
        """
        vision = self.vision
        frequencies = rotary_frequencies(vision.head_size // 2, _THETA, RopeScaling())
        angles = coordinates[..., :2].astype(jnp.float32)[..., None] * frequencies
        angles = angles.reshape(*image_ids.shape, 1, -1)  # row angles, then column angles
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
        x = ends_module.embed(pixels.astype(self.compute_dtype), coordinates)
        x = constrain(x, "batch", None, "embed")
        layers = params["layers"], jnp.arange(vision.num_layers), jnp.asarray(is_full)
        # One scan up to each deepstack layer: a scan over all would have to return every output.
        outputs: dict[int, Array] = {}
        ends_of_scans = sorted({layer + 1 for layer in vision.deepstack_layers})
        for begin, end in itertools.pairwise(sorted({0, *ends_of_scans, vision.num_layers})):
            part = jax.tree.map(lambda a, span=slice(begin, end): a[span], layers)
            x, _ = jax.lax.scan(run_layer, x, part)
            outputs[end - 1] = x
        return ends_module.merge(x, [outputs[layer] for layer in vision.deepstack_layers])
