"""The vision tower of Qwen2.5-VL (arXiv:2502.13923, Sec. 2.1.1): patches in, vectors out.

Rows hold the patches of several images in the order of their windows (`patches.in_rows`); no image
sees another. Every window fills a piece of a row of the same size, so that layers of windows are
one batch of small squares.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import casting
from jaxrl_llm.models.attention import QUERY_BLOCK, masked_attention
from jaxrl_llm.models.attention_layers import rotary_frequencies, rotate
from jaxrl_llm.models.layers import MLP, Build, Linear, RMSNorm
from jaxrl_llm.models.remat import REMAT_POLICIES
from jaxrl_llm.models.shape import RopeScaling, Vision
from jaxrl_llm.sharding.mesh import constrain

_THETA = 10_000.0
_OVER_HEADS = ("batch", None, "tower_heads", None)


class TowerBlock(nnx.Module):
    """One pre-norm layer; every image, or window, sees itself alone and all of itself."""

    def __init__(self, build: Build, vision: Vision):
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
        images: Int[Array, "rows patches"],
        whole: Array,
    ) -> Float[Array, "rows patches D"]:
        y = self.attention_norm(x)
        parts = (f(y).reshape(*x.shape[:2], -1, self.vision.head_size) for f in self._qkv())
        q, k, v = (constrain(part, *_OVER_HEADS) for part in parts)
        q, k = rotate(q, table), rotate(k, table)
        in_windows = functools.partial(_in_windows, self.vision.window_patches)
        mixed = jax.lax.cond(whole, _in_images, in_windows, q, k, v, images)
        x = x + self.o(mixed.reshape(x.shape))
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", None, "embed")

    def _qkv(self) -> tuple[Linear, Linear, Linear]:
        return self.q, self.k, self.v


class TowerEnds(nnx.Module):
    """What is not a layer: the embedding of patches, and the merger of their vectors."""

    def __init__(self, build: Build, vision: Vision, out_size: int):
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


def read(
    ends: TowerEnds,
    block: Any,  # (layer's parameters) -> `TowerBlock`
    layers: Any,  # parameters of all layers, stacked
    vision: Vision,
    pixels: Float[Array, "rows patches dims"],
    places: Int[Array, "rows patches 2"],
    images: Int[Array, "rows patches"],
    compute_dtype: str,
    remat: str,
) -> Float[Array, "rows vectors O"]:
    """Returns the vectors of all images, in the order of the patches.

    Args:
      places: Row and column of each patch in its image.
      images: Which image of the row; 0: none.
    """
    frequencies = rotary_frequencies(vision.head_size // 2, _THETA, RopeScaling())
    angles = places.astype(jnp.float32)[..., None] * frequencies  # [rows, patches, 2, quarter]
    angles = angles.reshape(*places.shape[:2], 1, -1)
    table = jnp.cos(angles), jnp.sin(angles)
    whole = jnp.isin(jnp.arange(vision.num_layers), jnp.array(vision.full_layers, jnp.int32))

    def one(x, entry):
        stacked, index, of_image = entry
        layer = casting.computed(stacked, index, compute_dtype)
        return block(layer)(x, table, images, of_image), None

    if remat != "none":
        one = jax.checkpoint(one, policy=REMAT_POLICIES["full"], prevent_cse=False)
    x = constrain(ends.embed(pixels.astype(compute_dtype)), "batch", None, "embed")
    x, _ = jax.lax.scan(one, x, (layers, jnp.arange(vision.num_layers), whole))
    return ends.merge(x)


def _in_windows(size: int, q, k, v, images) -> Float[Array, "rows patches N H"]:
    """Returns attention within pieces of `size` patches, each a window of one image."""
    cut = lambda x: x.reshape(-1, size, *x.shape[2:])  # noqa: E731
    ids = cut(images)
    mixed = masked_attention(cut(q), cut(k), cut(v), _same(ids, ids))
    return mixed.reshape(q.shape)


def _in_images(q, k, v, images) -> Float[Array, "rows patches N H"]:
    """Returns attention within images, for one block of queries after another."""
    rows, length = images.shape
    if length <= QUERY_BLOCK or length % QUERY_BLOCK:
        return masked_attention(q, k, v, _same(images, images))

    def blocks(x):
        return jnp.moveaxis(x.reshape(rows, -1, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    @jax.checkpoint  # so that only one block's scores exist at a time
    def attend(piece):
        queries, ids = piece
        return masked_attention(queries, k, v, _same(ids, images))

    mixed = jax.lax.map(attend, (blocks(q), blocks(images)))
    return jnp.moveaxis(mixed, 0, 1).reshape(q.shape)


def _same(of_queries, of_keys):
    # Padding sees padding: a row of scores without a key would be no number.
    return (of_queries[:, :, None] == of_keys[:, None, :])[:, None]
