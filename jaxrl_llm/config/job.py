"""What every job has, whatever it trains: a model, data, a mesh, steps, records."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated

from jaxrl_llm.config.data import DataConfig
from jaxrl_llm.config.model import LoraConfig, ModelConfig
from jaxrl_llm.config.placement import MeshConfig
from jaxrl_llm.config.ranges import Group, Range
from jaxrl_llm.config.records import AlertsConfig, CheckpointConfig, MetricsConfig, ProfilerConfig
from jaxrl_llm.config.trainer import EvaluationConfig, TrainerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobConfig(Group):
    """One job; its subclasses add what only they have, and the name of the job."""

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
        """Tokens of the longest sequence that a model reads."""
        raise NotImplementedError

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch on a device; where nothing has chosen them, enough for a row."""
        return self.trainer.max_tokens_per_microbatch or max(16_384, self.max_sequence_tokens)

    @property
    def max_scored_tokens(self) -> int:
        """Tokens of a sequence whose log-probs are wanted at most; 0: not known."""
        return 0

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole job; what a schedule decays over."""
        return self.trainer.num_steps

    def warnings(self) -> Iterator[str]:
        """Yields settings that have no effect in this job."""
        yield from ()
