"""Settings of every job, and the jobs that learn from given answers."""

import dataclasses
import operator
from collections.abc import Iterator
from typing import Annotated, Literal

from jaxrl_llm.config.data import DataConfig
from jaxrl_llm.config.model import LoraConfig, ModelConfig
from jaxrl_llm.config.placement import MeshConfig
from jaxrl_llm.config.ranges import Group, Range
from jaxrl_llm.config.records import AlertsConfig, CheckpointConfig, MetricsConfig, ProfilerConfig
from jaxrl_llm.config.trainer import EvaluationConfig, SupervisedTrainerConfig, TrainerConfig
from jaxrl_llm.errors import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Group):
    """Settings of every job; subclasses add their own settings and the name of the job."""

    seed: Annotated[int, Range("[0, 4294967295]")] = 0
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    alerts: AlertsConfig = AlertsConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum tokens of a sequence, prompt and answer."""
        raise NotImplementedError

    @property
    def microbatch_tokens(self) -> int:
        """Maximum tokens of a microbatch on a device; if not set, enough for one row."""
        return self.trainer.max_tokens_per_microbatch or max(16_384, self.max_sequence_tokens)

    @property
    def max_scored_tokens(self) -> int:
        """Maximum tokens of a sequence that need log-probs; 0: not known."""
        return 0

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole job; a schedule decays over them."""
        return self.trainer.num_steps

    def warnings(self) -> Iterator[str]:
        """Yields settings that have no effect in this job."""
        yield from ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig(JobConfig):
    """A job on given answers; it does not sample, score or evaluate."""

    trainer: SupervisedTrainerConfig = SupervisedTrainerConfig()

    # Settings and groups of every job that have no effect in this one.
    unread = frozenset(
        {
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
        }
    )

    @property
    def max_sequence_tokens(self) -> int:
        return self.trainer.max_sequence_tokens

    def rules(self) -> Iterator[Problem]:
        if self.lora.rank:
            yield "lora.rank", "this job trains all weights; set it to 0"

    def warnings(self) -> Iterator[str]:
        for key in sorted(self.unread):
            read = operator.attrgetter(key)
            if read(self) != read(type(self)()):
                yield f"config.{key}: no effect, this job does not read it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning of the policy on given answers."""

    job: Literal["sft"] = "sft"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelingConfig(SupervisedConfig):
    """Training of a reward model on pairs of a chosen and a rejected answer."""

    job: Literal["reward_model"] = "reward_model"

    unread = SupervisedConfig.unread | {
        "model.vocab_chunk",
        "data.train_files",
        "data.arithmetic_errors",
    }
