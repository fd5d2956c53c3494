"""Where the roles of a run live: a mesh for each, and rows that all of them can split."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxrl_llm.config import Config, ConfigError
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.learner.batches import Layout
from jaxrl_llm.models import attention, flops
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.planning import filling
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools


def meshes(config: Config, devices: Sequence[Any] = ()) -> dict[str, Mesh]:
    """Returns the mesh of each role, as `config.placement` says; without `devices`, over all.

    Raises:
      ConfigError: If the devices cannot be shared out so.
    """
    if config.placement.choice == "colocate":
        whole = mesh_lib.make_mesh(config.mesh, *([list(devices)] if devices else []))
        return dict.fromkeys(ROLES, whole)
    used = {"policy", "rollout"}
    used |= {"critic"} if config.algorithm.needs_critic else set()
    used |= {"reference"} if config.algorithm.needs_reference else set()
    used |= {"reward"} if config.rewards.models or config.rewards.cost_models else set()
    return pools.meshes(config.placement, config.mesh, used, list(devices) or jax.devices())


def row_layout(config: Config, places: Mapping[str, Mesh], network: Network) -> Layout:
    """Returns the layout of rows that every model can split over its devices.

    Args:
      config: The run.
      places: The mesh of each role.
      network: The policy: its size says up to where wider rows pay, its kernel whether
        sequences may share a beginning.

    Raises:
      ConfigError: If the pool that splits rows the least cannot hold its part of them.
    """
    split = row_split(config, places)
    share = config.trainer.shared_prompts == "auto" and attention.shares_prefixes(network.kernel)
    return Layout(
        *split,
        attention_parity=flops.attention_parity(network.shape) if share else 0,
        max_scored=config.rollout.max_response_tokens,
        fewest_tokens=filling.fewest_tokens(places["policy"].devices.flat[0].platform, split[1]),
    )


def row_split(config: Config, places: Mapping[str, Mesh | AbstractMesh]) -> tuple[int, int, int]:
    """Returns tokens of a device in one microbatch, and over how many rows and lengths are split.

    Raises:
      ConfigError: If the pool that splits rows the least cannot hold its part of them.
    """
    splits = {mesh_lib.row_shards(places[role]) for role in ROLES if role != "rollout"}
    rows, length = (math.lcm(*numbers) for numbers in zip(*splits, strict=True))
    # Of all devices, those of the pool that splits the least hold the most.
    fewest, most = min(a * b for a, b in splits), rows * length
    budget = config.trainer.max_tokens_per_microbatch * fewest // most
    if len(splits) > 1 and budget * length < config.max_sequence_tokens:
        raise ConfigError(
            [
                f"config.placement: microbatches are split over {most} devices, and a pool of"
                f" {fewest} holds as much of them on each; rows of {config.max_sequence_tokens}"
                " tokens need trainer.max_tokens_per_microbatch >="
                f" {-(-config.max_sequence_tokens * most // (fewest * length))}, or pools of more"
                " equal size"
            ]
        )
    return budget, rows, length


def on(mesh: Mesh, tree: Params) -> Params:
    """Returns the shardings of the arrays of `tree`, on another mesh with the same axes."""
    return jax.tree.map(lambda a: NamedSharding(mesh, a.sharding.spec), tree)
