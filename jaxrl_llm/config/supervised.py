"""Jobs that learn from given answers: supervised fine-tuning and reward models."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jaxrl_llm.config.job import JobConfig
from jaxrl_llm.config.trainer import SupervisedTrainerConfig
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig(JobConfig):
    """A job over given answers."""

    trainer: SupervisedTrainerConfig = SupervisedTrainerConfig()

    @property
    def max_sequence_tokens(self) -> int:
        return self.trainer.max_sequence_tokens

    def rules(self) -> Iterator[Problem]:
        if self.lora.rank:
            yield "lora.rank", "this job trains all weights; set it to 0"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning of the policy on worked answers."""

    job: Literal["sft"] = "sft"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelingConfig(SupervisedConfig):
    """Training of a reward model on pairs of a chosen and a rejected answer."""

    job: Literal["reward_model"] = "reward_model"
