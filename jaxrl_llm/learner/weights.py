"""The weights of a job: which learn, which stay frozen, and how each begins."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import JobConfig, OptimizerConfig, RLConfig
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import optimizer
from jaxrl_llm.learner.models import Models
from jaxrl_llm.models import huggingface, peft_folder
from jaxrl_llm.models.tower import Tower
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools

_ADAPTERS = 1  # folded into the seed for their first values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trainable:
    """Parameters and their optimizer. A role without a model has no parameters."""

    params: Params
    opt_state: Any
    num_updates: Int[Array, ""]  # taken; skipped ones are not counted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnerState:
    """All that RL changes; what a checkpoint holds."""

    policy: Trainable
    critic: Trainable
    cost_critic: Trainable
    kl_coef: Float[Array, ""]
    log_multiplier: Float[Array, ""]  # of Safe-RLHF's cost


class Scalar(NamedTuple):
    """A reward or cost model: frozen, one number a sequence."""

    network: Network
    params: Params


class Teacher(NamedTuple):
    """A frozen language model that says how likely tokens are."""

    network: Network
    params: Params


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Weights that RL never changes; empty where a run has no such model."""

    reference: Params = dataclasses.field(default_factory=dict)
    base: Params = dataclasses.field(default_factory=dict)  # what adapters are added to
    scorers: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    teachers: Mapping[str, Teacher] = dataclasses.field(default_factory=dict)


def trainable(params: Params, config: OptimizerConfig, num_updates: int, mesh: Mesh) -> Trainable:
    """Returns parameters with a fresh optimizer; its moments are split as the parameters are."""
    transformation = optimizer.make(config, num_updates)
    shardings = jax.tree.map(lambda a: a.sharding, abstract_optimizer(transformation, params, mesh))
    opt_state = jax.jit(transformation.init, out_shardings=shardings)(params)
    return Trainable(params, opt_state, mesh_lib.everywhere(np.int32(0), mesh))


def abstract_optimizer(
    transformation: optax.GradientTransformation, params: Params, mesh: Mesh
) -> Any:
    """Returns shapes and shardings of the optimizer's state; `params` may be abstract too."""
    abstract_state = jax.eval_shape(transformation.init, params)
    shardings = optax.tree_map_params(
        transformation,
        lambda _, param: param.sharding,
        abstract_state,
        params,
        transform_non_params=lambda _: mesh_lib.replicated(mesh),
    )
    return _with_shardings(abstract_state, shardings)


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
    )


def abstract(tree: Any) -> Any:
    """Returns shapes, dtypes and shardings of a tree of arrays, as `Saver.restore` takes them."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def abstract_params(network: Network, mesh: Mesh) -> Params:
    """Returns `abstract` of a network's parameters in training."""
    return _with_shardings(network.abstract(), models_lib.train_shardings(network, mesh))


def abstract_tower(tower: Tower, network: Network, mesh: Mesh) -> Params:
    """Returns `abstract` of the parameters of a tower beside a network."""
    shape = dataclasses.replace(network.shape, vision=tower.vision)
    return abstract_params(dataclasses.replace(network, shape=shape), mesh)["vision"]


def abstract_trained(network: Network, mesh: Mesh) -> Params:
    """Returns `abstract` of what is trained of a network: all of it, or as `divided` says."""
    whole = abstract_params(network, mesh)
    if not network.lora.rank:
        return whole
    shardings = models_lib.adapter_shardings(network, mesh)
    score = {"score": whole["score"]} if network.head == "scalar" else {}
    return _with_shardings(network.abstract_adapters(), shardings) | score


def divided(
    config: JobConfig, network: Network, mesh: Mesh, params: Params
) -> tuple[Params, Params]:
    """Returns what is trained of a network with these parameters, and what stays as it is.

    With LoRA the adapters are trained, and a scalar head: those of the folder `lora.path`, else
    such that change nothing yet, and the given head.
    """
    if not network.lora.rank:
        return params, {}
    score = {name: params[name] for name in ("score",) if name in params}
    base = {name: value for name, value in params.items() if name not in score}
    if config.lora.path:
        shardings = jax.tree.map(lambda a: a.sharding, abstract_trained(network, mesh))
        return score | peft_folder.load(config.lora.path, network, shardings), base
    key = jax.random.fold_in(jax.random.key(config.seed), _ADAPTERS)
    shardings = models_lib.adapter_shardings(network, mesh)
    return jax.jit(network.init_adapters, out_shardings=shardings)(key) | score, base


def initial_policy(config: JobConfig, models: Models) -> Params:
    """Returns the policy's first weights, sharded: of the folder, or random by the seed."""
    if config.model.path:
        return _read(config.model.path, models.policy, models.mesh)
    make = jax.jit(models.policy.init, out_shardings=models.policy_shardings)
    return make(jax.random.key(config.seed))


def initial(config: JobConfig, models: Models) -> Params:
    """Returns the first weights of what a job trains.

    Those of a reward model are a classifier's of the folder, or the policy's with a head of zeros.
    """
    if config.trained_head == "lm":
        return initial_policy(config, models)
    if config.model.path:
        return _read(config.model.path, models.value, models.meshes["reward"])
    return scalar_from_policy(models, initial_policy(config, models), "reward")


def scalar_from_policy(models: Models, policy_params: Params, role: str) -> Params:
    """Returns a copy of the policy's body with a scalar head of zeros, on the role's mesh."""
    body = {k: v for k, v in policy_params.items() if k not in ("head", "vision")}

    def make(body):
        score = jnp.zeros((1, models.policy.shape.hidden_size), models.value.param_dtype)
        return {**jax.tree.map(jnp.copy, body), "score": score}

    here = models_lib.train_shardings(models.value, models.mesh)
    there = models_lib.train_shardings(models.value, models.meshes[role])
    return pools.move(jax.jit(make, out_shardings=here)(body), there)


def initial_state(config: RLConfig, models: Models, policy_params: Params) -> LearnerState:
    """Returns the state RL begins with; critics without a folder begin at the policy's weights.

    With LoRA the policy of the state is its adapters alone.
    """
    algorithm, needed = config.algorithm, needs.of(config.algorithm)
    kl_coef = np.float32(needed.reference and algorithm.kl_coef)
    log_multiplier = jnp.log(jnp.float32(algorithm.multiplier_init))

    def begun(params: Params, of: OptimizerConfig, mesh: Mesh) -> Trainable:
        role = trainable(params, of, config.num_updates, mesh)
        if "optimizer" in config.mesh.on_host:
            role = dataclasses.replace(role, opt_state=pools.resting(role.opt_state))
        return role

    def critic(wanted: bool) -> Trainable:
        params: Params = {}
        mesh = models.meshes["critic"]
        if wanted and config.critic.path:
            params = _read(config.critic.path, models.value, mesh)
        elif wanted:
            params = scalar_from_policy(models, policy_params, "critic")
        return begun(params, config.critic.optimizer, mesh)

    trained, _ = divided(config, models.policy, models.mesh, policy_params)
    return LearnerState(
        policy=begun(trained, config.trainer.optimizer, models.mesh),
        critic=critic(needed.critic),
        cost_critic=critic(needed.cost_critic),
        kl_coef=mesh_lib.everywhere(kl_coef, models.mesh),
        log_multiplier=mesh_lib.everywhere(log_multiplier, models.mesh),
    )


def frozen(
    config: RLConfig, models: Models, policy_params: Params, trained: Mapping[str, Params]
) -> Frozen:
    """Returns reference, reward and cost models, teachers, and the base of adapters.

    `policy_params` are those that RL begins with; the reference too, unless it has a folder.
    `trained` are those of the reward and cost models without a folder, by name.
    """
    scorers = {}
    for name, model in {**config.rewards.models, **config.rewards.cost_models}.items():
        if model.path:
            net = network_of(config, models, model.path, "scalar")
            scorers[name] = Scalar(net, _read(model.path, net, models.meshes["reward"]))
        else:
            scorers[name] = Scalar(models.value, trained[name])
    teachers = {}
    for name, teacher in config.distillation.teachers.items():
        net = network_of(config, models, teacher.path, "lm")
        teachers[name] = Teacher(net, _read(teacher.path, net, models.meshes["reward"]))
    reference: Params = {}
    if needs.of(config.algorithm).reference:
        reference = first_reference(config, models, policy_params)
        if "reference" in config.mesh.on_host and not config.lora.rank:
            reference = pools.resting(reference)
    return Frozen(reference, policy_params if config.lora.rank else {}, scorers, teachers)


def _read(path: str, network: Network, mesh: Mesh) -> Params:
    return huggingface.load(path, network, models_lib.train_shardings(network, mesh))


def first_reference(config: JobConfig, models: Models, policy_params: Params) -> Params:
    """Returns the frozen reference: of its folder, or the policy's first weights."""
    mesh = models.meshes["reference"]
    if config.reference_folder:
        return _read(config.reference_folder, models.policy, mesh)
    if mesh != models.mesh:
        return pools.move(policy_params, models_lib.train_shardings(models.policy, mesh))
    if config.lora.rank:
        return policy_params  # only adapters change
    copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
    return jax.jit(copy, out_shardings=models.policy_shardings)(policy_params)


def network_of(
    config: JobConfig, models: Models, path: str, head: Literal["lm", "scalar"]
) -> Network:
    """Returns the network of a reward or cost model, or a teacher; its shape is its folder's."""
    shape, mesh = huggingface.read_shape(path), models.meshes["reward"]
    net = models_lib.network(config, shape, head, mesh)
    # A teacher is compared with the policy: both are distributions over the same tokens.
    return dataclasses.replace(net, suppressed_tokens=models.policy.suppressed_tokens)


def folders_of_roles(config: RLConfig, models: Models) -> list[tuple[str, Network]]:
    """The folders of all models of RL but the policy, each with its network; "": no folder."""
    needed = needs.of(config.algorithm)
    folders = [
        (config.reference.path if needed.reference else "", models.policy),
        (config.critic.path if needed.critic else "", models.value),
    ]
    for model in (*config.rewards.models.values(), *config.rewards.cost_models.values()):
        if model.path:
            folders.append((model.path, network_of(config, models, model.path, "scalar")))
    for teacher in config.distillation.teachers.values():
        folders.append((teacher.path, network_of(config, models, teacher.path, "lm")))
    return folders


def check_folders(config: JobConfig, models: Models, others: Sequence[tuple[str, Network]]) -> None:
    """Checks every model folder of a job by its headers, before any weights are read.

    `others` are folders beside that of the trained model, each with the network it must fit; "" is
    none.

    Raises:
      CheckpointFormatError: If one is missing, cut short, or does not fit its role.
    """
    trained = models.value if config.trained_head == "scalar" else models.policy
    if config.lora.path:
        peft_folder.check(config.lora.path, trained)
    for path, net in ((config.model.path, trained), *others):
        if path:
            huggingface.check(path, net)
            for mesh in set(models.meshes.values()):
                models_lib.check_heads(config, mesh, net.shape)
