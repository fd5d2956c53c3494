"""The parts of vision encoders around their layers: patch embedding, positions, patch mergers."""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.architecture import VisionArchitecture
from jaxrl_llm.models.layers import Linear, ParamFactory
from jaxrl_llm.models.vision.blocks import vision_norm


class VisionEnds(Protocol):
    """The modules before and after the layers of a vision encoder."""

    def __init__(self, build: ParamFactory, vision: VisionArchitecture, out_size: int): ...

    def embed(
        self,
        pixels: Float[Array, "rows patches dims"],
        coordinates: Int[Array, "rows patches 4"],
    ) -> Float[Array, "rows patches D"]:
        """The input of the first layer; `coordinates` are those of `PatchRows`."""

    def merge(
        self,
        x: Float[Array, "rows patches D"],
        deepstack: Sequence[Float[Array, "rows patches D"]],
    ) -> Float[Array, "rows vectors O"]:
        """The features of image tokens, from the output of the last layer and deepstack layers."""


def _patch_kernel(build: ParamFactory, vision: VisionArchitecture) -> nnx.Param:
    side = vision.patch_size
    sizes = (vision.hidden_size, 3, vision.frames, side, side)
    return build.normal(sizes, ("embed", *("patch",) * 4))


def _embedded_patches(kernel: nnx.Param, pixels: Float[Array, "rows patches dims"]):
    weight = kernel[...].astype(pixels.dtype)
    return pixels @ weight.reshape(weight.shape[0], -1).T


class WindowedEnds(nnx.Module):
    """The ends of Qwen2.5-VL's encoder: patch embedding and patch merger."""

    def __init__(self, build: ParamFactory, vision: VisionArchitecture, out_size: int):
        self.patch = _patch_kernel(build, vision)
        merged = vision.hidden_size * vision.merge_size**2
        self.norm = vision_norm(build, vision, vision.hidden_size)
        self.merge_in = Linear(build, "merge", merged, merged, ("embed", "mlp"), bias=True)
        self.merge_out = Linear(build, "merge", merged, out_size, ("mlp", "embed"), bias=True)

    def embed(
        self,
        pixels: Float[Array, "rows patches dims"],
        coordinates: Int[Array, "rows patches 4"],
    ) -> Float[Array, "rows patches D"]:
        return _embedded_patches(self.patch, pixels)

    def merge(
        self,
        x: Float[Array, "rows patches D"],
        deepstack: Sequence[Float[Array, "rows patches D"]],
    ) -> Float[Array, "rows vectors O"]:
        x = self.norm(x).reshape(x.shape[0], -1, self.merge_in.kernel.shape[0])
        return self.merge_out(jax.nn.gelu(self.merge_in(x), approximate=False))


class PatchMerger(nnx.Module):
    """Merges a square of patches into one vector; the norm is of each patch or of the square."""

    def __init__(
        self, build: ParamFactory, vision: VisionArchitecture, out_size: int, norm_merged: bool
    ):
        merged = vision.hidden_size * vision.merge_size**2
        self.norm = vision_norm(build, vision, merged if norm_merged else vision.hidden_size)
        self.merge_in = Linear(build, "merge", merged, merged, ("embed", "mlp"), bias=True)
        self.merge_out = Linear(build, "merge", merged, out_size, ("mlp", "embed"), bias=True)
        self.norm_merged, self.merged = norm_merged, merged

    def __call__(self, x: Float[Array, "rows patches D"]) -> Float[Array, "rows vectors O"]:
        squares = x.shape[0], -1, self.merged
        x = self.norm(x.reshape(squares)) if self.norm_merged else self.norm(x).reshape(squares)
        return self.merge_out(jax.nn.gelu(self.merge_in(x), approximate=False))


class DeepstackEnds(nnx.Module):
    """The ends of Qwen3-VL's encoder (arXiv:2511.21631): learned positions, several mergers.

    The square table of positions is interpolated to the grid of each image; its corners are those
    of the image.
    """

    def __init__(self, build: ParamFactory, vision: VisionArchitecture, out_size: int):
        d = vision.hidden_size
        self.patch = _patch_kernel(build, vision)
        self.patch_bias = build.zeros((d,), ("embed",))
        self.positions = build.normal((vision.position_side**2, d), ("patch", "embed"))
        self.merger = PatchMerger(build, vision, out_size, norm_merged=False)
        for number in range(len(vision.deepstack_layers)):
            merger = PatchMerger(build, vision, out_size, norm_merged=True)
            setattr(self, f"deepstack_{number}", merger)
        self.position_side, self.deepstack_layers = vision.position_side, vision.deepstack_layers

    def embed(
        self,
        pixels: Float[Array, "rows patches dims"],
        coordinates: Int[Array, "rows patches 4"],
    ) -> Float[Array, "rows patches D"]:
        x = _embedded_patches(self.patch, pixels) + self.patch_bias[...].astype(pixels.dtype)
        return x + self._interpolated_positions(coordinates).astype(x.dtype)

    def _interpolated_positions(
        self, coordinates: Int[Array, "rows patches 4"]
    ) -> Float[Array, "rows patches D"]:
        """Learned positions of patches, by bilinear interpolation in the table, in float32."""
        table, side = self.positions[...].astype(jnp.float32), self.position_side
        steps = jnp.maximum(coordinates[..., 2:] - 1, 1).astype(jnp.float32)
        places = coordinates[..., :2].astype(jnp.float32) * (side - 1) / steps
        first = jnp.clip(jnp.floor(places).astype(jnp.int32), 0, side - 1)
        second = jnp.minimum(first + 1, side - 1)
        share = places - first
        taps = ((first, 1.0 - share), (second, share))
        total = jnp.zeros((*coordinates.shape[:2], table.shape[1]), jnp.float32)
        for rows, row_share in taps:
            for columns, column_share in taps:
                index = rows[..., 0] * side + columns[..., 1]
                weight = row_share[..., 0] * column_share[..., 1]
                total = total + table[index] * weight[..., None]
        return total

    def merge(
        self,
        x: Float[Array, "rows patches D"],
        deepstack: Sequence[Float[Array, "rows patches D"]],
    ) -> Float[Array, "rows vectors O"]:
        # Mergers are in the order of the list of layers, features in that of the layers themselves.
        added = {
            layer: getattr(self, f"deepstack_{number}")(output)
            for number, (layer, output) in enumerate(
                zip(self.deepstack_layers, deepstack, strict=True)
            )
        }
        return jnp.concatenate([self.merger(x), *(added[layer] for layer in sorted(added))], -1)
