"""Sizes of the stages of a run: the RL steps, supervised training before them, evaluation."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Literal

from jaxrl_llm.config.optimizer import OptimizerConfig
from jaxrl_llm.config.rewards import RewardFunctionConfig
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Sizes of a step. Prompts x samples make a step, cut into minibatches (one update each)."""

    num_steps: int = 100
    prompts_per_step: int = 8
    minibatch_size: int = 0  # sequences; 0: the whole step
    epochs: int = 1
    max_tokens_per_microbatch: int = 16_384  # per device, padding included; a hard cap
    shared_prompts: Literal["auto", "off"] = "auto"  # learners read a group's prompt once
    optimizer: OptimizerConfig = OptimizerConfig()

    def problems(self) -> Iterator[Problem]:
        for name in ("num_steps", "prompts_per_step", "epochs", "max_tokens_per_microbatch"):
            if getattr(self, name) < 1:
                yield name, f"must be at least 1, got {getattr(self, name)}"
        if self.minibatch_size < 0:
            yield (
                "minibatch_size",
                f"must not be negative (0: whole step), got {self.minibatch_size}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """A supervised stage before RL: warm start of the policy, or a reward model's training."""

    num_steps: int = 0  # 0: no such stage
    batch_size: int = 64
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)

    def problems(self) -> Iterator[Problem]:
        if self.num_steps < 0:
            yield "num_steps", f"must not be negative (0: no such stage), got {self.num_steps}"
        if self.batch_size < 1:
            yield "batch_size", f"must be at least 1, got {self.batch_size}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: mean@k, pass@k and maj@k per data source."""

    # What an answer is worth here. Empty: `rewards`; a reward model's score is no accuracy.
    functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    every: int = 0  # RL steps; 0: only before and after
    before: bool = True
    after: bool = True
    num_prompts: int = 0  # 0: all
    samples_per_prompt: int = 1
    temperature: float = 0.0
    top_p: float = 1.0

    def problems(self) -> Iterator[Problem]:
        if self.every < 0 or self.num_prompts < 0:
            yield "every", "every and num_prompts must not be negative"
        if self.samples_per_prompt < 1:
            yield "samples_per_prompt", f"must be at least 1, got {self.samples_per_prompt}"
        if self.samples_per_prompt > 1 and self.temperature == 0:
            yield (
                "samples_per_prompt",
                (
                    f"{self.samples_per_prompt} greedy samples are all the same;"
                    " set evaluation.temperature above 0"
                ),
            )
        if not 0.0 <= self.temperature < math.inf:
            yield "temperature", f"must be finite and not negative, got {self.temperature}"
        if not 0.0 < self.top_p <= 1.0:
            yield "top_p", f"must lie in (0, 1], got {self.top_p}"
