"""Settings of reinforcement learning, and the rules between them."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, TypeVar

from jaxrl_llm.config.algorithm import AlgorithmConfig
from jaxrl_llm.config.job import JobConfig, SupervisedConfig
from jaxrl_llm.config.model import CriticConfig, ReferenceConfig
from jaxrl_llm.config.placement import PlacementConfig
from jaxrl_llm.config.ranges import INT32_MAX
from jaxrl_llm.config.rewards import RewardsConfig
from jaxrl_llm.config.rollout import RolloutConfig
from jaxrl_llm.config.trainer import (
    EvaluationConfig,
    RLTrainerConfig,
    StageConfig,
    SupervisedTrainerConfig,
)
from jaxrl_llm.errors import Problem

Job = TypeVar("Job", bound=SupervisedConfig)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(JobConfig):
    """One run of reinforcement learning, with the stages before it."""

    job: Literal["rl"] = "rl"
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    trainer: RLTrainerConfig = RLTrainerConfig()
    warm_start: StageConfig = StageConfig()
    preference: StageConfig = StageConfig()
    placement: PlacementConfig = PlacementConfig()

    @property
    def sequences_per_step(self) -> int:
        return self.trainer.prompts_per_step * self.algorithm.samples_per_prompt

    @property
    def minibatch_size(self) -> int:
        return self.trainer.minibatch_size or self.sequences_per_step

    @property
    def num_updates(self) -> int:
        minibatches = self.sequences_per_step // max(1, self.minibatch_size)
        return self.trainer.num_steps * self.trainer.epochs * minibatches

    @property
    def max_sequence_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_scored_tokens(self) -> int:
        return self.rollout.max_response_tokens

    @property
    def evaluation_rewards(self) -> RewardsConfig:
        """Rewards of held-out answers: `evaluation.functions`, or if empty those of RL."""
        if not self.evaluation.functions:
            return self.rewards
        functions = self.evaluation.functions
        return dataclasses.replace(
            self.rewards, functions=functions, models={}, cost_functions={}, cost_models={}
        )

    def rules(self) -> Iterator[Problem]:
        sequences, size = self.sequences_per_step, self.minibatch_size
        for where, count, what in (
            ("trainer.prompts_per_step", sequences * self.max_sequence_tokens, "tokens in a step"),
            ("trainer.num_steps", self.num_updates, "updates in the run"),
        ):
            if count > INT32_MAX:
                yield where, f"makes {count} {what}; at most {INT32_MAX} can be, use less"
        if 0 < sequences <= INT32_MAX and size > 0 and sequences % size:
            small = [n for n in range(1, math.isqrt(sequences) + 1) if sequences % n == 0]
            divisors = sorted({*small, *(sequences // n for n in small)})
            near = sorted(sorted(divisors, key=lambda n: abs(n - size))[:2])
            yield (
                "trainer.minibatch_size",
                f"{size} does not divide the {sequences} sequences of a step"
                f" ({self.trainer.prompts_per_step} prompts x"
                f" {self.algorithm.samples_per_prompt} samples);"
                f" use {' or '.join(map(str, near))}",
            )
        shards = self.mesh.sequence  # -1: not known before the devices are
        if self.max_sequence_tokens > self.trainer.max_tokens_per_microbatch * shards > 0:
            yield (
                "trainer.max_tokens_per_microbatch",
                f"{self.trainer.max_tokens_per_microbatch} cannot hold one sequence of"
                f" data.max_prompt_tokens + rollout.max_response_tokens ="
                f" {self.max_sequence_tokens}; use at least that",
            )
        if self.algorithm.overlong_buffer_tokens > self.rollout.max_response_tokens:
            limit = f"rollout.max_response_tokens={self.rollout.max_response_tokens}"
            message = f"{self.algorithm.overlong_buffer_tokens} exceeds {limit}"
            yield "algorithm.overlong_buffer_tokens", message
        if self.rollout.temperature == 0 and self.algorithm.samples_per_prompt > 1:
            message = "0 (greedy) makes all samples of a prompt the same; set it above 0"
            yield "rollout.temperature", message
        if self.algorithm.safe and not (self.rewards.cost_functions or self.rewards.cost_models):
            message = "algorithm.safe needs a cost: add cost_models or cost_functions"
            yield "rewards.cost_models", message
        yield from self._skips_without_effect()
        for group in ("models", "cost_models"):
            for name, model in getattr(self.rewards, group).items():
                if not model.path and not self.preference.num_steps:
                    message = "required: a folder, or preference.num_steps > 0 to train one first"
                    yield f"rewards.{group}.{name}.path", message
        if self.warm_start.num_steps and self.data.task == "files":
            message = "data.task='files' has none, use 'arithmetic' or 'gsm8k'"
            yield "warm_start.num_steps", f"needs worked examples; {message}"
        if self.preference.num_steps and self.data.task != "arithmetic":
            message = f"data.task={self.data.task!r} has none, use 'arithmetic'"
            yield "preference.num_steps", f"needs preference pairs; {message}"

    def _skips_without_effect(self) -> Iterator[Problem]:
        """Yields alerts with action "skip" that can never skip an update in this run."""
        measured = self.algorithm.old_log_probs == "recompute"
        reasons = {}
        if measured and self.num_updates == self.trainer.num_steps:
            reasons["kl"] = (
                "a step has one update, before which the policy has not moved;"
                " use 'continue' or 'stop', or a smaller trainer.minibatch_size"
            )
        if not measured:
            reasons["log_prob_difference"] = (
                "old_log_probs='rollout' takes the engine's for the policy's own; use 'recompute'"
            )
        if not (self.rewards.functions or self.rewards.cost_functions):
            reasons["reward_failures"] = "no reward function is called; use 'off'"
        for name, reason in reasons.items():
            if getattr(self.alerts, name).action == "skip":
                yield f"alerts.{name}.action", f"'skip' would never skip: {reason}"

    def warnings(self) -> Iterator[str]:
        """Yields settings that have no effect in this run."""
        algorithm = self.algorithm
        costs = sorted({**self.rewards.cost_functions, **self.rewards.cost_models})
        if costs and not algorithm.safe:
            yield f"config.rewards: costs {costs} have no effect, algorithm.safe is off"
        if algorithm.old_log_probs == "rollout" and algorithm.correction != "none":
            yield "config.algorithm.correction: weights are all 1, old_log_probs is 'rollout'"

    def stage(self, stage: StageConfig, job: type[Job], longest: int) -> Job:
        """Returns a stage before RL as a job; `longest` is the maximum tokens of a sequence."""
        return job(
            seed=self.seed,
            model=self.model,
            data=self.data,
            mesh=self.mesh,
            trainer=SupervisedTrainerConfig(
                num_steps=stage.num_steps,
                batch_size=stage.batch_size,
                max_sequence_tokens=longest,
                max_tokens_per_microbatch=self.trainer.max_tokens_per_microbatch,
                optimizer=stage.optimizer,
            ),
            evaluation=EvaluationConfig(before=False, after=False),
            checkpoint=dataclasses.replace(
                self.checkpoint, every=stage.save_every, keep=1, best_metric=""
            ),
            metrics=self.metrics,
            alerts=self.alerts,
        )
