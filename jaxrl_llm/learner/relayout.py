"""Relayout of a run's weights in memory: to another mesh, to other device pools.

On the same devices arrays move one by one, each freeing its old memory: at most one array exists
twice at a time.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import OptimizerConfig, RLConfig
from jaxrl_llm.learner import job_models, optimizer
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.weights import (
    FrozenModels,
    LearnerState,
    RewardModel,
    TeacherModel,
    Trainable,
)
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.sharding import mesh as mesh_lib


def relayout_state(config: RLConfig, models: Models, state: LearnerState) -> LearnerState:
    """The learner state in the layout of `models`; consumes the old one."""
    mesh, critic_mesh = models.mesh, models.meshes["critic"]

    def move_role(
        role: Trainable, params: Params, optimizer_config: OptimizerConfig, mesh: Mesh
    ) -> Trainable:
        transformation = optimizer.make_optimizer(optimizer_config, config.num_updates)
        abstract = weights_lib.abstract_opt_state(transformation, params, mesh)
        opt_state = jax.tree.map(
            _move, device_pools.to_device_memory(role.opt_state), _shardings(abstract)
        )
        if "optimizer" in config.mesh.on_host:
            opt_state = device_pools.to_host_memory(opt_state)
        return Trainable(
            jax.tree.map(_move, role.params, _shardings(params)),
            opt_state,
            _move(role.num_updates, mesh_lib.replicated(mesh)),
        )

    def move_critic(role: Trainable) -> Trainable:
        params = weights_lib.abstract_params(models.value, critic_mesh) if role.params else {}
        return move_role(role, params, config.critic.optimizer, critic_mesh)

    trained = weights_lib.abstract_trained(models.policy, mesh)
    return LearnerState(
        policy=move_role(state.policy, trained, config.trainer.optimizer, mesh),
        critic=move_critic(state.critic),
        cost_critic=move_critic(state.cost_critic),
        kl_coef=_move(state.kl_coef, mesh_lib.replicated(mesh)),
        log_multiplier=_move(state.log_multiplier, mesh_lib.replicated(mesh)),
    )


def relayout_frozen(config: RLConfig, models: Models, frozen: FrozenModels) -> FrozenModels:
    """The frozen weights in the layout of `models`; consumes the old ones."""
    # true with LoRA, if both are on the same devices
    is_shared = frozen.reference is frozen.base_params
    on_host = "reference" in config.mesh.on_host and not config.lora.rank

    def move_params(params: Params, network: Network, mesh: Mesh) -> Params:
        if not params:
            return params
        shardings = job_models.train_shardings(network, mesh)
        return jax.tree.map(_move, device_pools.to_device_memory(params), shardings)

    def move_model(scorer: RewardModel | TeacherModel) -> Any:
        network = dataclasses.replace(
            scorer.network, sequence_attention=config.mesh.sequence_attention
        )
        return type(scorer)(network, move_params(scorer.params, network, models.meshes["reward"]))

    base = frozen.base_params
    reference_mesh = models.meshes["reference"]
    if is_shared and base and reference_mesh != models.mesh:
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        reference = move_params(copy(base), models.policy, reference_mesh)
        base = move_params(base, models.policy, models.mesh)
    elif is_shared:
        reference = base = move_params(base, models.policy, models.mesh)
    else:
        reference = move_params(frozen.reference, models.policy, reference_mesh)
        base = move_params(base, models.policy, models.mesh)
    if on_host:
        reference = device_pools.to_host_memory(reference)
    return FrozenModels(
        reference,
        base,
        {name: move_model(each) for name, each in frozen.scorers.items()},
        {name: move_model(each) for name, each in frozen.teachers.items()},
    )


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda a: a.sharding, abstract)


def _move(array: jax.Array, target: Any) -> jax.Array:
    """Moves an array to another sharding; consumes the old one."""
    if array.sharding == target:
        return array
    if array.sharding.device_set != target.device_set:
        # shards may be shared with the old array, which is freed later
        return device_pools.move_to_pool(array, target)
    resharded = _reshard_program(target)(array)
    if not array.is_deleted():  # donation was not possible: free it here
        jax.block_until_ready(resharded)
        array.delete()
    return resharded


@functools.lru_cache(maxsize=256)
def _reshard_program(target: Any):
    return jax.jit(lambda array: array, out_shardings=target, donate_argnums=0)
