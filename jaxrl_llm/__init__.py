"""Reinforcement learning for language models in JAX.

From Python, a run is a config and a call; submodules are imported on first use:

    import jaxrl_llm

    config = jaxrl_llm.default_config()
    config.rewards.functions.answer = {"function": "arithmetic"}
    state = jaxrl_llm.train(config, "runs/from_python")
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from jaxrl_llm.config import JobConfig
    from jaxrl_llm.learner.weights import LearnerState, Trainable
    from jaxrl_llm.training_api.training_session import TrainingSession

    Rows = Iterable[Mapping[str, Any]]

# Expected here: only the tokenizers of that library are used.
logging.getLogger("transformers").addFilter(
    lambda record: "PyTorch was not found" not in record.getMessage()
)


def default_config(job: str = "rl") -> "ConfigDict":
    """A config with every setting of a job ("rl", "sft", "dpo", "reward_model") at its default."""
    from jaxrl_llm.config.bridge import default_config_dict

    return default_config_dict(job)


def train(
    config: "JobConfig | ConfigDict | Mapping[str, Any]",
    workdir: str | os.PathLike[str],
    rows: "Rows | Mapping[str, Rows] | None" = None,
    replay: "Sequence[str | os.PathLike[str]]" = (),
) -> "LearnerState | Trainable":
    """Runs the job of a config, as `launch/train.py` does; returns the trained state.

    `config` is a modified `default_config`, nested dicts, or a validated `JobConfig`. The folder
    `workdir` is created if missing; the same one with the same config resumes the run. `rows` are
    the training data: dicts as a file would hold them (any iterable, also a Hugging Face
    `Dataset`), or a mapping of them by split, "train" and "eval". They replace `data.train_files`.
    `replay` are rollout dumps with tokens: RL trains on one per step and samples nothing.

    Raises:
      ConfigError: Listing every problem of the config, or where `workdir` belongs to another run.
      DataError, CheckpointError, RewardError: If rows, folders or reward functions cannot work.
    """
    from jaxrl_llm import program
    from jaxrl_llm.config import JobConfig
    from jaxrl_llm.config.bridge import from_config_dict, to_dict
    from jaxrl_llm.data import files
    from jaxrl_llm.trainer import loops

    if rows is not None:
        with files.in_memory_rows(rows if isinstance(rows, Mapping) else {"train": rows}) as names:
            values = config if isinstance(config, Mapping) else to_dict(config)
            data = {**values.get("data", {}), "task": "files"}
            data |= {f"{split}_files": (name,) for split, name in names.items()}
            return train({**values, "data": data}, workdir, replay=replay)
    program.set_xla_flags()
    if not isinstance(config, JobConfig):
        config = from_config_dict(config)
    program.enable_compilation_cache(workdir)
    return loops.train(config, workdir, replay)


def check(
    config: "JobConfig | ConfigDict | Mapping[str, Any]",
    workdir: str | os.PathLike[str],
    replay: "Sequence[str | os.PathLike[str]]" = (),
) -> "JobConfig":
    """Runs the checks of `train`; allocates no weights and writes nothing.

    Returns the config with the sizes that the planner chose; raises as `train`.
    """
    from jaxrl_llm import program
    from jaxrl_llm.config import JobConfig
    from jaxrl_llm.config.bridge import from_config_dict
    from jaxrl_llm.trainer import loops

    program.set_xla_flags()
    if not isinstance(config, JobConfig):
        config = from_config_dict(config)
    return loops.check(config, workdir, replay)


def training_session(config: "JobConfig | ConfigDict | Mapping[str, Any]") -> "TrainingSession":
    """A policy whose training loop is yours: passes, updates, samples, checkpoints.

    `config` is one of job "rl", as in `train`: its model, adapters, mesh, sampling and loss are
    used, and its loop, data and rewards are not.

    Raises:
      ConfigError: Listing every problem of the config.
      UserError: If the model folder cannot be used.
    """
    from jaxrl_llm import program
    from jaxrl_llm.config import JobConfig
    from jaxrl_llm.config.bridge import from_config_dict
    from jaxrl_llm.training_api import policy_base
    from jaxrl_llm.training_api.training_session import TrainingSession

    program.set_xla_flags()
    if not isinstance(config, JobConfig):
        config = from_config_dict(config)
    return TrainingSession(policy_base.load_base(config.require_rl()))
