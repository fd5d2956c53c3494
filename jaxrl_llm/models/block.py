"""The parts of a network: a decoder layer, and everything that is not a layer."""

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl_llm.models.attention_layers import Attend, GroupedAttention, LatentAttention, Rotary
from jaxrl_llm.models.experts import ExpertMLP
from jaxrl_llm.models.layers import MLP, Build, RMSNorm
from jaxrl_llm.models.router import Routing
from jaxrl_llm.models.shape import Layer, Shape
from jaxrl_llm.sharding.mesh import constrain


class Block(nnx.Module):
    """One pre-norm decoder layer."""

    def __init__(self, build: Build, shape: Shape, layer: Layer):
        d = shape.hidden_size
        self.attention_norm = RMSNorm(build, d, shape)
        self.attention = (
            LatentAttention(build, shape) if shape.latent else GroupedAttention(build, shape, layer)
        )
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
        attend: Attend,
        compressed: bool = False,
        routing: Routing | None = None,
    ):
        """Returns the output, what `attend` kept, and what a router did (None: no experts)."""
        x = checkpoint_name(x, "stream")
        mixed, kept = self.attention(self.attention_norm(x), rotary, attend, compressed)
        if hasattr(self, "attention_post_norm"):
            mixed = self.attention_post_norm(mixed)
        x = x + mixed
        routed, mlp = None, self.mlp
        if isinstance(mlp, ExpertMLP):
            y, routed = mlp(self.mlp_norm(x), routing)
        else:
            y = mlp(self.mlp_norm(x))
        if hasattr(self, "mlp_post_norm"):
            y = self.mlp_post_norm(y)
        return constrain(x + y, "batch", "length", "embed"), kept, routed


class Ends(nnx.Module):
    """Everything that is not a block: embedding, final norm, head."""

    def __init__(self, build: Build, shape: Shape, head: str):
        table = (shape.vocab_size, shape.hidden_size)
        self.embed = build.normal(table, ("vocab", "embed"))
        self.norm = RMSNorm(build, shape.hidden_size, shape)
        if head == "scalar":
            # Zero: a critic begins by predicting nothing, so the first advantages are the returns.
            self.score = build.zeros((1, shape.hidden_size), ("one", "embed"))
        elif not shape.tie_embeddings:
            self.head = build.normal(table, ("vocab", "embed"))
