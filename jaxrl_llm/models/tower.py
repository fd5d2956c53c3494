"""The vision tower of Qwen2.5-VL (arXiv:2502.13923, Sec. 2.1.1): patches in, vectors out.

Rows hold the patches of several images in the order of their windows (`patches.in_rows`); no image
sees another. Every window fills a piece of a row of the same size, so that layers of windows are
one batch of small squares.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import casting, lora, modules
from jaxrl_llm.models.attention import QUERY_BLOCK, masked_attention
from jaxrl_llm.models.attention_layers import rotary_frequencies, rotate
from jaxrl_llm.models.layers import MLP, NO_ADAPTERS, Build, Linear, RMSNorm
from jaxrl_llm.models.remat import REMAT_POLICIES
from jaxrl_llm.models.shape import EVERYWHERE, Layer, RopeScaling, Vision
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


@dataclasses.dataclass(frozen=True)
class Tower:
    """The tower of one shape; its parameters are a nested dict of arrays, of layers stacked."""

    vision: Vision
    out_size: int  # of a vector: the decoder's hidden size
    param_dtype: str
    compute_dtype: str
    remat: str = "none"  # not "none": the backward pass keeps what layers read, and no more
    lora: LoraConfig = NO_ADAPTERS

    def module(self, part: str, kind: Layer = EVERYWHERE) -> nnx.Module:
        """Returns a "block", one with adapters ("adapted"), or the "ends"."""
        return self._made(part, nnx.Rngs(0))

    def _made(self, part: str, rngs: nnx.Rngs) -> nnx.Module:
        adapters = self.lora if part == "adapted" else NO_ADAPTERS
        build = Build(rngs, jnp.dtype(self.param_dtype), adapters)
        if part == "ends":
            return TowerEnds(build, self.vision, self.out_size)
        return TowerBlock(build, self.vision)

    def init(self, key: jax.Array) -> modules.Params:
        """Returns random parameters, as `Network.init` draws them."""
        keys = jax.random.split(key, self.vision.num_layers + 1)
        ends = modules.pure(self._made("ends", nnx.Rngs(keys[-1])))
        return {**ends, "layers": self._stacked("block", keys[:-1])}

    def init_adapters(self, key: jax.Array) -> modules.Params:
        """Returns adapters that change nothing yet, as `Network.init_adapters`."""
        keys = jax.random.split(key, self.vision.num_layers)
        return lora.only({"layers": self._stacked("adapted", keys)})

    def _stacked(self, part: str, keys: jax.Array) -> modules.Params:
        return jax.vmap(lambda k: modules.pure(self._made(part, nnx.Rngs(k))))(keys)

    def logical_axes(self) -> modules.Params:
        """Returns the tree of `init` with a tuple of logical dim names for each array."""
        ends = modules.axes(modules.definition(self, "ends")[1])
        return {**ends, "layers": self._axes("block")}

    def adapter_axes(self) -> modules.Params:
        """Returns the tree of `init_adapters` with the logical dim names of each array."""
        return lora.only({"layers": self._axes("adapted")})

    def _axes(self, part: str) -> modules.Params:
        return modules.axes(modules.definition(self, part)[1], ("layers",))

    def read(
        self,
        params: modules.Params,
        pixels: Float[Array, "rows patches dims"],
        places: Int[Array, "rows patches 2"],
        images: Int[Array, "rows patches"],
    ) -> Float[Array, "rows vectors O"]:
        """Returns the vectors of all images, in the order of the patches.

        Args:
          places: Row and column of each patch in its image.
          images: Which image of the row; 0: none.
        """
        vision = self.vision
        frequencies = rotary_frequencies(vision.head_size // 2, _THETA, RopeScaling())
        angles = places.astype(jnp.float32)[..., None] * frequencies
        angles = angles.reshape(*places.shape[:2], 1, -1)  # those of the row, then of the column
        table = jnp.cos(angles), jnp.sin(angles)
        whole = np.isin(np.arange(vision.num_layers), vision.full_layers)

        def one(x, entry):
            stacked, index, of_image = entry
            layer = casting.computed(stacked, index, self.compute_dtype)
            part = "adapted" if lora.present(layer) else "block"
            return modules.merged(self, part, layer)(x, table, images, of_image), None

        if self.remat != "none":
            one = jax.checkpoint(one, policy=REMAT_POLICIES["full"], prevent_cse=False)
        ends = {name: value for name, value in params.items() if name != "layers"}
        around = modules.merged(self, "ends", ends)
        x = around.embed(pixels.astype(self.compute_dtype))
        x = constrain(x, "batch", None, "embed")
        layers = params["layers"], jnp.arange(vision.num_layers), jnp.asarray(whole)
        x, _ = jax.lax.scan(one, x, layers)
        return around.merge(x)


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
