"""Typed settings of a job, one file per subject: frozen dataclasses without optional fields.

Files in `configs/` return a `ConfigDict`; `bridge` converts between the two.
"""

from jaxrl_llm.config.algorithm import AlgorithmConfig
from jaxrl_llm.config.job import JobConfig, RLConfig, SFTConfig, SupervisedConfig
from jaxrl_llm.config.learner import LoraConfig, ModelConfig, OptimizerConfig, RLTrainerConfig
from jaxrl_llm.config.logging_config import (
    AlertsConfig,
    CheckpointConfig,
    MetricsConfig,
    ProfilerConfig,
)
from jaxrl_llm.config.placement import (
    MeshConfig,
    PlacementConfig,
    PoolConfig,
    ProcessesConfig,
)
from jaxrl_llm.config.rollout_data import (
    CurriculumConfig,
    DataConfig,
    RewardsConfig,
    RolloutConfig,
    SpeculationConfig,
)
from jaxrl_llm.errors import ConfigError
