"""The numbers that make one decoder differ from another; no arrays here."""

import dataclasses

from jaxrl_llm.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary wavelengths beyond the original context.

    `factor` 1 leaves every wavelength as it is.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class Shape:
    """One decoder-only transformer: grouped queries, RMS norm, gated MLP, rotary embedding."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_size: int
    max_positions: int = 131_072
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    norm_eps: float = 1e-6
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3
    tie_embeddings: bool = True


def random_model(config: ModelConfig, vocab_size: int) -> Shape:
    """Returns the architecture that a config describes where it names no folder."""
    return Shape(
        family=config.family,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        mlp_size=config.mlp_size,
        rope_theta=config.rope_theta,
        qkv_bias=config.family == "qwen2",
        qk_norm=config.family == "qwen3",
        tie_embeddings=config.tie_embeddings,
    )
