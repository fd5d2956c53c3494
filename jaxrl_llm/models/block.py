"""The modules of a network: a decoder layer, and the embedding, final norm and head."""

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl_llm.models.architecture import Architecture, LayerType
from jaxrl_llm.models.attention_modules import (
    AttentionFunction,
    GroupedQueryAttention,
    LatentAttention,
    Rotary,
)
from jaxrl_llm.models.layers import MLP, ParamFactory, RMSNorm
from jaxrl_llm.models.moe.expert_mlp import ExpertMLP
from jaxrl_llm.models.moe.router import RouterInputs
from jaxrl_llm.models.recurrent.gated_delta_net import GatedDeltaNet
from jaxrl_llm.sharding.mesh import constrain


class Block(nnx.Module):
    """One decoder layer: attention and an MLP or experts, with norms before or after each."""

    def __init__(self, build: ParamFactory, shape: Architecture, layer: LayerType):
        d = shape.hidden_size
        if shape.pre_norms:
            self.attention_norm = RMSNorm(build, d, shape)
        self.attention = _mixer(build, shape, layer)
        if shape.pre_norms:
            self.mlp_norm = RMSNorm(build, d, shape)
        self.mlp: MLP | ExpertMLP = (
            ExpertMLP(build, shape) if layer.experts else MLP(build, shape, shape.mlp_size)
        )
        if shape.post_norms:
            self.attention_post_norm = RMSNorm(build, d, shape)
            self.mlp_post_norm = RMSNorm(build, d, shape)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotary: Rotary,
        attend: AttentionFunction,
        compressed: bool = False,
        routing: RouterInputs | None = None,
    ):
        """The output, the second result of `attend`, and router outputs (None: no experts)."""
        x = checkpoint_name(x, "stream")
        normed = self.attention_norm(x) if hasattr(self, "attention_norm") else x
        mixed, cache = self.attention(normed, rotary, attend, compressed)
        if hasattr(self, "attention_post_norm"):
            mixed = self.attention_post_norm(mixed)
        x = x + mixed
        normed = self.mlp_norm(x) if hasattr(self, "mlp_norm") else x
        routed, mlp = None, self.mlp
        if isinstance(mlp, ExpertMLP):
            y, routed = mlp(normed, routing)
        else:
            y = mlp(normed)
        if hasattr(self, "mlp_post_norm"):
            y = self.mlp_post_norm(y)
        return constrain(x + y, "batch", "length", "embed"), cache, routed


def _mixer(
    build: ParamFactory, shape: Architecture, layer: LayerType
) -> GroupedQueryAttention | LatentAttention | GatedDeltaNet:
    """The module that mixes tokens in a layer of this kind."""
    if layer.mixer == "gated_delta":
        return GatedDeltaNet(build, shape)
    if shape.latent:
        return LatentAttention(build, shape, layer)
    return GroupedQueryAttention(build, shape, layer)


class EmbedAndHead(nnx.Module):
    """The parameters outside the layers: embedding, final norm, head."""

    def __init__(self, build: ParamFactory, shape: Architecture, head: str):
        table = (shape.vocab_size, shape.hidden_size)
        self.embed = build.normal(table, ("vocab", "embed"))
        self.norm = RMSNorm(build, shape.hidden_size, shape)
        if head == "scalar":
            # Zero: a critic first predicts 0 everywhere, so the first advantages are the returns.
            self.score = build.zeros((1, shape.hidden_size), ("one", "embed"))
        elif not shape.tie_embeddings:
            self.head = build.normal(table, ("vocab", "embed"))
