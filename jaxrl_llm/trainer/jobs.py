"""Runs whatever job a config describes."""

import os

from jaxrl_llm.config import JobConfig, RLConfig, SupervisedConfig
from jaxrl_llm.learner.weights import LearnerState, Trainable
from jaxrl_llm.trainer import rl, supervised


def train(config: JobConfig, workdir: str | os.PathLike[str]) -> LearnerState | Trainable:
    """Trains as the config says, and returns what was learned; see the module of the job."""
    if isinstance(config, RLConfig):
        return rl.train(config, workdir)
    assert isinstance(config, SupervisedConfig), f"{type(config).__name__} is no job"
    return supervised.train(config, workdir)
