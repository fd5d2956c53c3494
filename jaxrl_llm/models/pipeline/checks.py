"""Checks of pipeline parallelism: whether a run can have the stages of `mesh.stage`."""

import math
from collections.abc import Mapping

from jaxrl_llm.config import ConfigError, JobConfig
from jaxrl_llm.models import architecture
from jaxrl_llm.models.architecture import Architecture


def check_layers(config: JobConfig, shape: Architecture, stages: int) -> None:
    """Raises ConfigError if a model has too few layers for the stages and their rounds."""
    if problem := architecture.stage_split_problem(shape, stages, config.mesh.stage_rounds):
        raise ConfigError(f"config.mesh.stage: {problem}")


def check_roles(config: JobConfig, meshes: Mapping[str, Mapping[str, int]]) -> None:
    """Raises ConfigError if roles with these mesh axis sizes cannot have their stages.

    All roles need the policy's stages, as they exchange weights in their stacked form. There must
    be a microbatch for every stage. A trained vision encoder is not supported with stages.
    """
    stages = meshes["policy"]["stage"]
    trained = {role: sizes for role, sizes in meshes.items() if role != "rollout"}
    for role, sizes in trained.items():
        if sizes["stage"] != stages:
            raise ConfigError(
                f"config.placement: the mesh of the {role} has {sizes['stage']} stages, the"
                f" policy's has {stages}; use the same mesh.stage for all pools"
            )
    if stages > 1 and config.trains_vision_tower:
        raise ConfigError(
            f"config.mesh.stage: {stages}, but a trained vision encoder is not split over stages;"
            " use 1, or trainer.tower_learning_rate=0"
        )
    name, sequences = config.update_size_setting, config.sequences_per_update
    rows = math.lcm(*(s["data"] * s["fsdp"] * s["expert"] for s in trained.values()))
    if stages > 1 and sequences < stages * rows:
        fits = next(n for n in range(stages, 0, -1) if n == 1 or n * rows <= sequences)
        raise ConfigError(
            f"config.mesh.stage: {stages} stages need as many microbatches, and {name}="
            f"{sequences} makes {sequences // rows} with a row for each of {rows} devices; use"
            f" mesh.stage={fits}, or {name} >= {stages * rows}"
        )
