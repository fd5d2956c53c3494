"""The networks of a run: where they come from, numbers and memory, adapters of the policy."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from jaxrl_llm.config.optimizer import OptimizerConfig
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy network: a Hugging Face folder, or a random one of a given shape."""

    path: str = ""  # folder with config.json and safetensors; "" makes a random model
    tokenizer: str = ""  # folder; "" is `path`, or the built-in character tokenizer
    chat_template: str = ""  # Jinja template file; "" is the tokenizer's own
    # Shape of a random model; unused with `path`.
    family: Literal["llama", "qwen2", "qwen3"] = "qwen2"
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    mlp_size: int = 256
    rope_theta: float = 10_000.0
    tie_embeddings: bool = True
    # Numbers and memory.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # What the backward pass recomputes, and where it keeps the rest: docs/performance.md.
    remat: Literal[
        "none", "full", "attention", "projections", "dots", "offload_full", "offload_attention"
    ] = "none"
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"  # kernel of whole rows
    vocab_chunk: int = 512  # tokens whose logits exist at one time

    def problems(self) -> Iterator[Problem]:
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            yield (
                "num_kv_heads",
                f"{self.num_kv_heads} does not divide num_heads={self.num_heads}",
            )
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "mlp_size"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if self.head_size < 2 or self.head_size % 2:
            yield "head_size", f"must be even and positive (rotary pairs), got {self.head_size}"
        if self.attention == "cudnn" and self.compute_dtype != "bfloat16":
            yield "attention", "cuDNN attends in 16 bits; set compute_dtype='bfloat16' or 'auto'"
        if self.vocab_chunk < 1:
            yield "vocab_chunk", f"must be at least 1 token, got {self.vocab_chunk}"


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen policy (arXiv:2106.09685): W + alpha / rank * A B.

    A critic, where there is one, is trained whole.
    """

    rank: int = 0  # 0: off, all of the policy is trained
    alpha: float = 16.0
    targets: tuple[str, ...] = PROJECTIONS  # which projections get adapters

    @property
    def scale(self) -> float:
        """What the product of the two factors is multiplied with."""
        return self.alpha / self.rank

    def problems(self) -> Iterator[Problem]:
        if self.rank < 0:
            yield "rank", f"must not be negative (0: off), got {self.rank}"
        if not 0.0 < self.alpha < math.inf:
            yield "alpha", f"must be positive and finite, got {self.alpha}"
        for name in self.targets:
            if name not in PROJECTIONS:
                yield "targets", f"unknown projection {name!r}; known: {', '.join(PROJECTIONS)}"
        if self.rank and not self.targets:
            yield "targets", "names no projection; nothing would be trained"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value network of PPO; used when the advantage is `gae`."""

    path: str = ""  # Hugging Face folder (one-label classifier or causal LM); "": policy's weights
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)

    def problems(self) -> Iterator[Problem]:
        yield from ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """The frozen policy of the KL terms."""

    path: str = ""  # "": the policy's weights when RL begins

    def problems(self) -> Iterator[Problem]:
        yield from ()
