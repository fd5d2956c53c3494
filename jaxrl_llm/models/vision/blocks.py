"""The layers of vision encoders: bidirectional attention within images or windows, and an MLP."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.architecture import VisionArchitecture
from jaxrl_llm.models.attention import QUERY_BLOCK, masked_attention
from jaxrl_llm.models.attention_modules import apply_rotary
from jaxrl_llm.models.layers import MLP, LayerNorm, Linear, ParamFactory, RMSNorm
from jaxrl_llm.sharding.mesh import constrain

_HEAD_AXES = ("batch", None, "tower_heads", None)


class VisionMLP(nnx.Module):
    """`down(gelu(up(x)))` with biases, GELU by its tanh approximation."""

    def __init__(self, build: ParamFactory, vision: VisionArchitecture):
        d, size = vision.hidden_size, vision.mlp_size
        self.up = Linear(build, "up", d, size, ("embed", "mlp"), bias=True)
        self.down = Linear(build, "down", size, d, ("mlp", "embed"), bias=True)

    def __call__(self, x: Float[Array, "rows patches D"]) -> Float[Array, "rows patches D"]:
        return self.down(jax.nn.gelu(self.up(x)))


def vision_norm(build: ParamFactory, vision: VisionArchitecture, size: int) -> RMSNorm | LayerNorm:
    """A norm of an encoder of this kind."""
    return RMSNorm(build, size, vision) if vision.kind == "qwen2_5" else LayerNorm(build, size)


def _gated_mlp(build: ParamFactory, vision: VisionArchitecture) -> MLP:
    return MLP(build, vision, vision.mlp_size, bias=True)


_MLPS = {"qwen2_5": _gated_mlp, "qwen3": VisionMLP}


class VisionEncoderBlock(nnx.Module):
    """One pre-norm layer with bidirectional attention within each image or each window."""

    def __init__(self, build: ParamFactory, vision: VisionArchitecture):
        d, heads, kind = vision.hidden_size, ("embed", "tower_heads"), vision.kind
        self.attention_norm = vision_norm(build, vision, d)
        self.q = Linear(build, "q", d, d, heads, bias=True)
        self.k = Linear(build, "k", d, d, heads, bias=True)
        self.v = Linear(build, "v", d, d, heads, bias=True)
        self.o = Linear(build, "o", d, d, heads[::-1], bias=True)
        self.mlp_norm = vision_norm(build, vision, d)
        self.mlp = _MLPS[kind](build, vision)
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
        if self.vision.window_size:
            window_attention = functools.partial(_window_attention, self.vision.window_patches)
            attended = jax.lax.cond(
                sees_whole_image, _image_attention, window_attention, q, k, v, image_ids
            )
        else:
            attended = _image_attention(q, k, v, image_ids)
        x = x + self.o(attended.reshape(x.shape))
        return constrain(x + self.mlp(self.mlp_norm(x)), "batch", None, "embed")

    def _qkv(self) -> tuple[Linear, Linear, Linear]:
        return self.q, self.k, self.v


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
