"""Typed description of a job and its groups, one file each.

Experiments are written as `ConfigDict`s in `configs/`; everything inside the package receives
these frozen dataclasses. `bridge.from_config_dict` alone makes one of the other, and reports
every problem at once. No field is optional: what is not set in the ConfigDict (missing, or
`None`) takes the value of the recipe, then the default written in its class.
"""

from jaxrl_llm.config.algorithm import AlgorithmConfig
from jaxrl_llm.config.data import DataConfig
from jaxrl_llm.config.job import JobConfig
from jaxrl_llm.config.model import CriticConfig, LoraConfig, ModelConfig, ReferenceConfig
from jaxrl_llm.config.optimizer import OptimizerConfig
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
from jaxrl_llm.config.supervised import RewardModelingConfig, SFTConfig, SupervisedConfig
from jaxrl_llm.config.trainer import (
    EvaluationConfig,
    RLTrainerConfig,
    StageConfig,
    SupervisedTrainerConfig,
    TrainerConfig,
)
from jaxrl_llm.errors import ConfigError

__all__ = [
    "AlertConfig",
    "AlertsConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "EvaluationConfig",
    "JobConfig",
    "LoraConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlacementConfig",
    "PoolConfig",
    "ProfilerConfig",
    "RLConfig",
    "RLTrainerConfig",
    "ReferenceConfig",
    "RewardFunctionConfig",
    "RewardModelConfig",
    "RewardModelingConfig",
    "RewardsConfig",
    "RolloutConfig",
    "SFTConfig",
    "SpeculationConfig",
    "StageConfig",
    "SupervisedConfig",
    "SupervisedTrainerConfig",
    "TrainerConfig",
]
