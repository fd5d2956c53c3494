"""Dispatches a config to the training loop of its job."""

import os
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.config import JobConfig
from jaxrl_llm.errors import raise_flag_problems
from jaxrl_llm.trainer import rl, supervised

Paths = Sequence[str | os.PathLike[str]]

# By `config.job`: a module with `train(config, workdir)` and `check(config, workdir)`.
LOOPS: dict[str, Any] = {"rl": rl, "sft": supervised, "dpo": supervised, "reward_model": supervised}


def train(config: JobConfig, workdir: str | os.PathLike[str], replay: Paths = ()) -> Any:
    """Runs the training loop of the config's job; returns its final state, raises as the loop does.

    With rollout dumps in `replay`, RL trains on them instead of sampling.
    """
    return LOOPS[config.job].train(config, workdir, **_replay_arguments(config, replay))


def check(config: JobConfig, workdir: str | os.PathLike[str], replay: Paths = ()) -> JobConfig:
    """Checks a job as `train` does before it begins; returns the config with its chosen sizes."""
    return LOOPS[config.job].check(config, workdir, **_replay_arguments(config, replay))


def _replay_arguments(config: JobConfig, replay: Paths) -> dict[str, Paths]:
    if replay and not config.learns_from_samples:
        raise_flag_problems([("replay", "is of job='rl' alone; leave it out")])
    return {"replay": replay} if replay else {}
