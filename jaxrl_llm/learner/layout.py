"""Weights of a run that move to another layout, in memory: another mesh, other pools.

On the same devices arrays move one after the other and take their old memory with them: never more
than one is there twice.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import OptimizerConfig, RLConfig
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import optimizer
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.weights import Frozen, LearnerState, Scalar, Teacher, Trainable
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools


def moved_state(config: RLConfig, models: Models, state: LearnerState) -> LearnerState:
    """Returns the learner state as a run in this layout would hold it; consumes the old one."""
    mesh, of_critics = models.mesh, models.meshes["critic"]

    def moved(role: Trainable, params: Params, of: OptimizerConfig, mesh: Mesh) -> Trainable:
        transformation = optimizer.make(of, config.num_updates)
        abstract = weights_lib.abstract_optimizer(transformation, params, mesh)
        opt_state = jax.tree.map(_moved, pools.working(role.opt_state), _shardings(abstract))
        if "optimizer" in config.mesh.on_host:
            opt_state = pools.resting(opt_state)
        return Trainable(
            jax.tree.map(_moved, role.params, _shardings(params)),
            opt_state,
            _moved(role.num_updates, mesh_lib.replicated(mesh)),
        )

    def critic(role: Trainable) -> Trainable:
        params = weights_lib.abstract_params(models.value, of_critics) if role.params else {}
        return moved(role, params, config.critic.optimizer, of_critics)

    trained = weights_lib.abstract_trained(models.policy, mesh)
    return LearnerState(
        policy=moved(state.policy, trained, config.trainer.optimizer, mesh),
        critic=critic(state.critic),
        cost_critic=critic(state.cost_critic),
        kl_coef=_moved(state.kl_coef, mesh_lib.replicated(mesh)),
        log_multiplier=_moved(state.log_multiplier, mesh_lib.replicated(mesh)),
    )


def moved_frozen(config: RLConfig, models: Models, frozen: Frozen) -> Frozen:
    """Returns the frozen weights in this layout; consumes the old ones."""
    shared = frozen.reference is frozen.base  # with adapters, if both live on the same devices
    on_host = "reference" in config.mesh.on_host and not config.lora.rank

    def moved(params: Params, network: Network, mesh: Mesh) -> Params:
        if not params:
            return params
        shardings = models_lib.train_shardings(network, mesh)
        return jax.tree.map(_moved, pools.working(params), shardings)

    def model(of: Scalar | Teacher) -> Any:
        network = dataclasses.replace(of.network, sequence_attention=config.mesh.sequence_attention)
        return type(of)(network, moved(of.params, network, models.meshes["reward"]))

    base = frozen.base
    reference_mesh = models.meshes["reference"]
    if shared and base and reference_mesh != models.mesh:
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        reference = moved(copy(base), models.policy, reference_mesh)
        base = moved(base, models.policy, models.mesh)
    elif shared:
        reference = base = moved(base, models.policy, models.mesh)
    else:
        reference = moved(frozen.reference, models.policy, reference_mesh)
        base = moved(base, models.policy, models.mesh)
    if on_host:
        reference = pools.resting(reference)
    return Frozen(
        reference,
        base,
        {name: model(each) for name, each in frozen.scorers.items()},
        {name: model(each) for name, each in frozen.teachers.items()},
    )


def _shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda a: a.sharding, abstract)


def _moved(array: jax.Array, target: Any) -> jax.Array:
    """Returns an array in another sharding; the old one is gone."""
    if array.sharding == target:
        return array
    if array.sharding.device_set != target.device_set:
        return pools.move(array, target)  # parts may stay where they are: the old one goes later
    moved = _relaid(target)(array)
    if not array.is_deleted():  # nothing of it could be used again
        jax.block_until_ready(moved)
        array.delete()
    return moved


@functools.lru_cache(maxsize=256)
def _relaid(target: Any):
    return jax.jit(lambda array: array, out_shardings=target, donate_argnums=0)
