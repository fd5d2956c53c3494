"""Steps and their sizes, optimizers, the stages before RL, and evaluation."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from jaxrl_llm.config.ranges import Bound, Count, Every, Group, Range, Share, Tokens
from jaxrl_llm.config.rewards import RewardFunctionConfig
from jaxrl_llm.config.rollout import Temperature
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Group):
    """AdamW with warm-up, decay and clipping of the global gradient norm."""

    learning_rate: Annotated[float, Range("[0, 1000]")] = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Every = 0  # optimizer updates, not RL steps
    min_lr_ratio: Share = 0.0  # lowest value of the decay, relative to learning_rate
    weight_decay: Annotated[float, Range("[0, 1000]")] = 0.01
    # 1 - beta must be larger than the rounding error of float32.
    beta1: Annotated[float, Range("[0, 0.999999]")] = 0.9
    beta2: Annotated[float, Range("[0, 0.999999]")] = 0.999
    # With a smaller eps, a gradient whose square is 0 in float32 could make a step of any size.
    eps: Annotated[float, Range("[1e-18, 1000]")] = 1e-8
    max_grad_norm: Bound = 1.0
    moment_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig(Group):
    """The number of steps, the microbatches and the optimizer."""

    num_steps: Count = 100
    # Per device, including padding; a hard limit.
    max_tokens_per_microbatch: Annotated[int, Range("[0, 2147483647]", "0: chosen by the plan")] = 0
    shared_prompts: Literal["auto", "off"] = "auto"  # compute the prompt of a group once
    optimizer: OptimizerConfig = OptimizerConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLTrainerConfig(TrainerConfig):
    """Sizes of a step: prompts x samples, split into minibatches (one update each)."""

    prompts_per_step: Annotated[int, Range("[1, 1000000]")] = 8
    # Sequences of one update.
    minibatch_size: Annotated[int, Range("[0, 2147483647]", "0: the whole step")] = 0
    epochs: Count = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedTrainerConfig(TrainerConfig):
    """Sizes of supervised training: a step is one batch and one update."""

    batch_size: Annotated[int, Range("[1, 1000000]")] = 64  # rows: examples or pairs
    max_sequence_tokens: Tokens = 2048  # prompt and answer; a longer row is an error
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig(Group):
    """A supervised job before RL: warm start of the policy, or training of reward models."""

    num_steps: Annotated[int, Range("[0, 2147483647]", "0: no such stage")] = 0
    batch_size: Annotated[int, Range("[1, 1000000]")] = 64
    save_every: Every = 200  # steps between checkpoints of the stage
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Group):
    """Held-out evaluation: mean@k, pass@k and maj@k per data source."""

    # Reward functions of the evaluation. Empty: those of `rewards`.
    functions: Mapping[str, RewardFunctionConfig] = dataclasses.field(default_factory=dict)
    # RL steps.
    every: Annotated[int, Range("[0, 2147483647]", "0: only before and after")] = 0
    before: bool = True
    after: bool = True
    num_prompts: Annotated[int, Range("[0, 2147483647]", "0: all")] = 0
    samples_per_prompt: Annotated[int, Range("[1, 65536]")] = 1
    temperature: Temperature = 0.0
    top_p: Annotated[float, Range("(0, 1]")] = 1.0

    @property
    def wanted(self) -> bool:
        """Whether the run has any evaluation."""
        return self.before or self.after or self.every > 0

    def rules(self) -> Iterator[Problem]:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            message = f"{self.samples_per_prompt} greedy samples are all the same"
            yield "samples_per_prompt", f"{message}; set evaluation.temperature above 0"
