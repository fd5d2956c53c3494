"""The networks of a run: weights, shape, dtypes, memory, and adapters of the policy."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import File, Folder, Group, Name, Range, Tokens
from jaxrl_llm.config.trainer import OptimizerConfig
from jaxrl_llm.errors import Problem

Width = Annotated[int, Range("[1, 16777216]")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Group):
    """The policy network: a Hugging Face folder, or random weights of a given shape."""

    path: Folder = ""  # folder with config.json and safetensors; "": random weights
    tokenizer: Folder = ""  # folder; "": `path`, or the built-in character tokenizer
    chat_template: File = ""  # Jinja template file; "": the template of the tokenizer
    # Shape of a random model; not used with `path`.
    family: Literal["llama", "qwen2", "qwen3"] = "qwen2"
    hidden_size: Width = 64
    num_layers: Annotated[int, Range("[1, 1024]")] = 2
    num_heads: Annotated[int, Range("[1, 65536]")] = 4
    num_kv_heads: Annotated[int, Range("[1, 65536]")] = 2
    head_size: Annotated[int, Range("[2, 65536]")] = 16
    mlp_size: Width = 256
    rope_theta: Annotated[float, Range("[1, 1e+12]")] = 10_000.0
    tie_embeddings: bool = True
    # Dtypes and memory.
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    # Rematerialization: which activations the backward pass recomputes or offloads
    # (docs/performance.md). "auto": the plan takes the least recomputation that fits.
    remat: Literal[
        "auto",
        "none",
        "full",
        "attention",
        "projections",
        "dots",
        "offload_full",
        "offload_attention",
    ] = "auto"
    attention: Literal["auto", "xla", "splash", "cudnn"] = "auto"  # kernel for packed rows
    vocab_chunk: Tokens = 512  # tokens whose logits exist at the same time

    def rules(self) -> Iterator[Problem]:
        if self.num_heads % self.num_kv_heads:
            message = f"{self.num_kv_heads} does not divide num_heads={self.num_heads}"
            yield "num_kv_heads", message
        if self.head_size % 2:
            yield "head_size", f"must be even (rotary pairs), got {self.head_size}"
        if self.attention == "cudnn" and self.compute_dtype != "bfloat16":
            yield "attention", "cuDNN attends in 16 bits; set compute_dtype='bfloat16' or 'auto'"


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(Group):
    """Low-rank adapters on a frozen policy (arXiv:2106.09685): W + alpha / rank * A B.

    All weights of a critic are trained.
    """

    rank: Annotated[int, Range("[0, 65536]", "0: off, all weights of the policy are trained")] = 0
    alpha: Annotated[float, Range("(0, 1000000]")] = 16.0
    targets: tuple[Name, ...] = PROJECTIONS  # projections that get adapters

    @property
    def scale(self) -> float:
        """The factor of the product A B."""
        return self.alpha / self.rank

    def rules(self) -> Iterator[Problem]:
        for name in self.targets:
            if name not in PROJECTIONS:
                yield "targets", f"unknown projection {name!r}; known: {', '.join(PROJECTIONS)}"
        if self.rank and not self.targets:
            yield "targets", "names no projection; nothing would be trained"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig(Group):
    """The value network; used by advantages that read `values`, such as `gae`."""

    # Hugging Face folder (one-label classifier or causal LM); "": the weights of the policy.
    path: Folder = ""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceConfig(Group):
    """The frozen reference policy of the KL terms."""

    path: Folder = ""  # "": the weights of the policy at the start of RL
