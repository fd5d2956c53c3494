"""Typed settings of a job, one file per group.

Files in `configs/` return a `ConfigDict`. The package reads these frozen dataclasses. `bridge`
converts between them. No field is optional.
"""

from jaxrl_llm.config.algorithm import AlgorithmConfig
from jaxrl_llm.config.data import DataConfig
from jaxrl_llm.config.job import JobConfig, RewardModelingConfig, SFTConfig, SupervisedConfig
from jaxrl_llm.config.model import CriticConfig, LoraConfig, ModelConfig, ReferenceConfig
from jaxrl_llm.config.placement import MeshConfig, PlacementConfig, PoolConfig
from jaxrl_llm.config.records import (
    AlertConfig,
    AlertsConfig,
    CheckpointConfig,
    MetricsConfig,
    ProfilerConfig,
)
from jaxrl_llm.config.rewards import RewardFunctionConfig, RewardModelConfig, RewardsConfig
from jaxrl_llm.config.rl import RLConfig
from jaxrl_llm.config.rollout import RolloutConfig, SpeculationConfig
from jaxrl_llm.config.trainer import (
    EvaluationConfig,
    OptimizerConfig,
    RLTrainerConfig,
    StageConfig,
    SupervisedTrainerConfig,
    TrainerConfig,
)
from jaxrl_llm.errors import ConfigError
