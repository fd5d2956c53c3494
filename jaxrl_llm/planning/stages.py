"""Whether a run can have the pipeline stages (`mesh.stage`) that it asks for."""

import math
from collections.abc import Mapping

from jaxrl_llm.config import ConfigError, JobConfig
from jaxrl_llm.models import shape as shape_lib
from jaxrl_llm.models.shape import Shape


def check_layers(config: JobConfig, shape: Shape, stages: int) -> None:
    """Raises ConfigError if a model has too few layers for so many stages and their rounds."""
    if found := shape_lib.problem(shape, stages, config.mesh.stage_rounds):
        raise ConfigError(f"config.mesh.stage: {found}")


def check_roles(config: JobConfig, meshes: Mapping[str, Mapping[str, int]]) -> None:
    """Raises ConfigError if the roles with these sizes of mesh axes cannot have their stages.

    All have the policy's stages, as weights of one network go from role to role as they are
    stacked. There is a microbatch for every stage. A tower that learns has none.
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
            f"config.mesh.stage: {stages}, but a tower that learns is not split over stages; use 1,"
            " or trainer.tower_learning_rate=0"
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
