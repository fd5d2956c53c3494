"""Jobs that learn from given answers: supervised fine-tuning and reward models."""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Literal

from jaxrl_llm.config.job import JobConfig
from jaxrl_llm.config.trainer import SupervisedTrainerConfig
from jaxrl_llm.errors import Problem

# Keys of every job that no job on given answers reads.
_UNREAD = (
    "lora",
    "data.eval_files",
    "data.prompt_column",
    "mesh.rollout",
    "mesh.on_host",
    "trainer.shared_prompts",
    "evaluation",
    "metrics.rollouts_every",
    "alerts.kl",
    "alerts.reference_kl",
    "alerts.entropy",
    "alerts.log_prob_difference",
    "alerts.constant_reward",
    "alerts.reward_failures",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig(JobConfig):
    """A job over given answers; nothing is sampled, scored or evaluated."""

    trainer: SupervisedTrainerConfig = SupervisedTrainerConfig()

    @property
    def unread(self) -> tuple[str, ...]:
        """Keys, and groups of them, without effect in this job."""
        return _UNREAD

    @property
    def max_sequence_tokens(self) -> int:
        return self.trainer.max_sequence_tokens

    def rules(self) -> Iterator[Problem]:
        if self.lora.rank:
            yield "lora.rank", "this job trains all weights; set it to 0"

    def warnings(self) -> Iterator[str]:
        for key in self.unread:
            read = operator.attrgetter(key)
            if read(self) != read(type(self)()):
                yield f"config.{key}: no effect, this job does not read it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning of the policy on worked answers."""

    job: Literal["sft"] = "sft"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelingConfig(SupervisedConfig):
    """Training of a reward model on pairs of a chosen and a rejected answer."""

    job: Literal["reward_model"] = "reward_model"

    @property
    def unread(self) -> tuple[str, ...]:
        return (*_UNREAD, "model.vocab_chunk", "data.train_files", "data.arithmetic_errors")
