"""The numbers that make one decoder differ from another; no arrays here."""

import dataclasses


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
