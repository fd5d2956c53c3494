"""The weights of a job: which are trained, which stay frozen, and their initial values."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import JobConfig, OptimizerConfig, RLConfig
from jaxrl_llm.learner import job_models, optimizer
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.models.hf import checkpoint, peft_adapter
from jaxrl_llm.models.quantized import kernels
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.models.vision.encoder import VisionEncoder
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.sharding import mesh as mesh_lib

_ADAPTER_SEED = 1  # folded into the seed of the initial adapters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trainable:
    """Parameters and their optimizer state. A role without a model has no parameters."""

    params: Params
    opt_state: Any
    num_updates: Int[Array, ""]  # taken; skipped ones are not counted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnerState:
    """All state that RL changes: the content of a checkpoint."""

    policy: Trainable
    critic: Trainable
    cost_critic: Trainable
    kl_coef: Float[Array, ""]
    log_multiplier: Float[Array, ""]  # of Safe-RLHF's cost


class RewardModel(NamedTuple):
    """A frozen reward or cost model: one score per sequence."""

    network: Network
    params: Params


class TeacherModel(NamedTuple):
    """A frozen language model whose log-probs the policy is distilled from."""

    network: Network
    params: Params


@dataclasses.dataclass(frozen=True)
class FrozenModels:
    """Weights that RL never changes; empty where a run has no such model."""

    reference: Params = dataclasses.field(default_factory=dict)
    base_params: Params = dataclasses.field(default_factory=dict)  # under the policy's adapters
    scorers: Mapping[str, RewardModel] = dataclasses.field(default_factory=dict)
    teachers: Mapping[str, TeacherModel] = dataclasses.field(default_factory=dict)


def make_trainable(
    params: Params, config: OptimizerConfig, num_updates: int, mesh: Mesh
) -> Trainable:
    """Parameters with a fresh optimizer state, whose moments are sharded like the parameters."""
    transformation = optimizer.make_optimizer(config, num_updates)
    shardings = jax.tree.map(lambda a: a.sharding, abstract_opt_state(transformation, params, mesh))
    opt_state = jax.jit(transformation.init, out_shardings=shardings)(params)
    return Trainable(params, opt_state, mesh_lib.replicate_host_value(np.int32(0), mesh))


def abstract_opt_state(
    transformation: optax.GradientTransformation, params: Params, mesh: Mesh
) -> Any:
    """Shapes and shardings of the optimizer state; `params` may be abstract too."""
    abstract_state = jax.eval_shape(transformation.init, params)
    shardings = optax.tree_map_params(
        transformation,
        lambda moment, param: jax.tree.map(lambda a: _state_sharding(a, param), moment),
        abstract_state,
        params,
        transform_non_params=lambda _: mesh_lib.replicated(mesh),
        is_leaf=optimizer.is_moment,
    )
    return _with_shardings(abstract_state, shardings)


def _state_sharding(array: Any, param: Any) -> NamedSharding:
    """The sharding of a parameter for an array of its state; dims that do not divide are whole.

    Scales of 8-bit moments have the parameter's dims, the last in blocks.
    """
    sharding = param.sharding
    if array.shape == param.shape:
        return sharding
    spec = [*sharding.spec, *[None] * (array.ndim - len(sharding.spec))]
    sizes = [math.prod(sharding.mesh.shape[a] for a in _axes(part)) for part in spec]
    parts = (
        None if dim % size else part
        for dim, size, part in zip(array.shape, sizes, spec, strict=True)
    )
    return NamedSharding(sharding.mesh, PartitionSpec(*parts))


def _axes(part: Any) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else (part,) if part else ()


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
    )


def abstract_arrays(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays, as `Saver.restore` takes them."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def abstract_params(network: Network, mesh: Mesh) -> Params:
    """Shapes and shardings of a network's parameters in training."""
    return _with_shardings(network.abstract_params(), job_models.train_shardings(network, mesh))


def abstract_tower(tower: VisionEncoder, network: Network, mesh: Mesh) -> Params:
    """Shapes and shardings of the vision tower's parameters, for a network without it."""
    shape = dataclasses.replace(network.shape, vision=tower.vision)
    return abstract_params(dataclasses.replace(network, shape=shape), mesh)["vision"]


def abstract_trained(network: Network, mesh: Mesh) -> Params:
    """Shapes and shardings of the trained parameters of a network; with LoRA as in
    `split_trainable`.
    """
    all_params = abstract_params(network, mesh)
    if not network.lora.rank:
        return all_params
    shardings = job_models.adapter_shardings(network, mesh)
    score = {"score": all_params["score"]} if network.head == "scalar" else {}
    return _with_shardings(network.abstract_adapters(), shardings) | score


def split_trainable(
    config: JobConfig, network: Network, mesh: Mesh, params: Params
) -> tuple[Params, Params]:
    """Splits parameters into trained and frozen ones.

    Without LoRA all are trained. With LoRA the adapters are, of the folder `lora.path` or else
    initialized to change nothing yet, and a scalar head, as it is in `params`.
    """
    if not network.lora.rank:
        return params, {}
    score = {name: params[name] for name in ("score",) if name in params}
    base = {name: value for name, value in params.items() if name not in score}
    if config.lora.path:
        shardings = jax.tree.map(lambda a: a.sharding, abstract_trained(network, mesh))
        return score | peft_adapter.load(config.lora.path, network, shardings), base
    key = jax.random.fold_in(jax.random.key(config.seed), _ADAPTER_SEED)
    shardings = job_models.adapter_shardings(network, mesh)
    return jax.jit(network.init_adapters, out_shardings=shardings)(key) | score, base


def initial_policy(config: JobConfig, models: Models) -> Params:
    """The policy's initial weights, sharded: of the model folder, or random by the seed."""
    if config.model.path:
        return _load(config.model.path, models.policy, models.mesh)
    make = jax.jit(models.policy.init, out_shardings=models.policy_shardings)
    return make(jax.random.key(config.seed))


def initial_params(config: JobConfig, models: Models) -> Params:
    """The initial weights of the model that a job trains.

    A reward model starts from the classifier in the model folder, or from the policy's weights with
    a scalar head of zeros.
    """
    if config.trained_head == "lm":
        return initial_policy(config, models)
    if config.model.path:
        return _load(config.model.path, models.value, models.meshes["reward"])
    return scalar_head_from_policy(models, initial_policy(config, models), "reward")


def scalar_head_from_policy(models: Models, policy_params: Params, role: str) -> Params:
    """A copy of the policy's decoder with a scalar head of zeros, on the role's mesh."""
    body = {k: v for k, v in policy_params.items() if k not in ("head", "vision")}

    def make_params(body):
        if models.value.matmuls.quantization == "none":
            body = job_models.plain_params(models.policy, body)
        score = jnp.zeros((1, models.policy.shape.hidden_size), models.value.param_dtype)
        return {**jax.tree.map(jnp.copy, body), "score": score}

    policy_shardings = job_models.train_shardings(models.value, models.mesh)
    role_shardings = job_models.train_shardings(models.value, models.meshes[role])
    return device_pools.move_to_pool(
        jax.jit(make_params, out_shardings=policy_shardings)(body), role_shardings
    )


def initial_state(config: RLConfig, models: Models, policy_params: Params) -> LearnerState:
    """The state RL begins with; critics without a folder begin with the policy's weights.

    With LoRA the state has only the adapters of the policy.
    """
    algorithm, needed = config.algorithm, requirements.requirements(config.algorithm)
    kl_coef = np.float32(needed.reference and algorithm.kl_coef)
    log_multiplier = jnp.log(jnp.float32(algorithm.multiplier_init))

    def fresh_role(params: Params, optimizer_config: OptimizerConfig, mesh: Mesh) -> Trainable:
        role = make_trainable(params, optimizer_config, config.num_updates, mesh)
        if "optimizer" in config.mesh.on_host:
            role = dataclasses.replace(role, opt_state=device_pools.to_host_memory(role.opt_state))
        return role

    def critic(is_needed: bool) -> Trainable:
        params: Params = {}
        mesh = models.meshes["critic"]
        if is_needed and config.critic.path:
            params = _load(config.critic.path, models.value, mesh)
        elif is_needed:
            params = scalar_head_from_policy(models, policy_params, "critic")
        return fresh_role(params, config.critic.optimizer, mesh)

    trained, _ = split_trainable(config, models.policy, models.mesh, policy_params)
    return LearnerState(
        policy=fresh_role(trained, config.trainer.optimizer, models.mesh),
        critic=critic(needed.critic),
        cost_critic=critic(needed.cost_critic),
        kl_coef=mesh_lib.replicate_host_value(kl_coef, models.mesh),
        log_multiplier=mesh_lib.replicate_host_value(log_multiplier, models.mesh),
    )


def load_frozen(
    config: RLConfig, models: Models, policy_params: Params, trained: Mapping[str, Params]
) -> FrozenModels:
    """Loads the frozen models: reference, reward and cost models, teachers, the adapters' base.

    Args:
      policy_params: Those that RL begins with; the reference has them too unless it has a folder.
      trained: Parameters of the reward and cost models without a folder, by name.
    """
    scorers = {}
    for name, model in {**config.rewards.models, **config.rewards.cost_models}.items():
        if model.path:
            net = role_network(config, models, model.path, "scalar")
            scorers[name] = RewardModel(net, _load(model.path, net, models.meshes["reward"]))
        else:
            scorers[name] = RewardModel(models.value, trained[name])
    teachers = {}
    for name, teacher in config.distillation.teachers.items():
        net = role_network(config, models, teacher.path, "lm")
        teachers[name] = TeacherModel(net, _load(teacher.path, net, models.meshes["reward"]))
    reference: Params = {}
    if requirements.requirements(config.algorithm).reference:
        reference = initial_reference(config, models, policy_params)
        if "reference" in config.mesh.on_host and not config.lora.rank:
            reference = device_pools.to_host_memory(reference)
    return FrozenModels(reference, policy_params if config.lora.rank else {}, scorers, teachers)


def _load(path: str, network: Network, mesh: Mesh) -> Params:
    shardings = job_models.train_shardings(network.unquantized, mesh)
    return checkpoint.load(path, network.unquantized, shardings, store=_quantizer(network, mesh))


def _quantizer(network: Network, mesh: Mesh) -> checkpoint.StoreArray:
    """Quantizes each stack of kernels as soon as it is read; the plain stack is freed."""
    format = network.matmuls.quantization
    if format == "none":
        return checkpoint.store_plain
    shardings = traverse_util.flatten_dict(job_models.train_shardings(network, mesh))

    def store(path: tuple[str, ...], array: Array) -> dict[tuple[str, ...], Array]:
        if path[0] != "layers" or not kernels.is_quantizable(path):
            return {path: array}
        shape = jax.eval_shape(lambda a: kernels.quantize_stack(a, format), array)
        out_shardings = {name: shardings[*path[:-1], name] for name in shape}
        quantize = jax.jit(
            functools.partial(kernels.quantize_stack, format=format), out_shardings=out_shardings
        )
        stored = quantize(array)
        jax.block_until_ready(stored)
        array.delete()
        return {(*path[:-1], name): each for name, each in stored.items()}

    return store


def initial_reference(config: JobConfig, models: Models, policy_params: Params) -> Params:
    """The frozen reference: from its folder, or the policy's initial weights."""
    mesh = models.meshes["reference"]
    if config.reference_folder:
        return _load(config.reference_folder, models.policy, mesh)
    if mesh != models.mesh:
        return device_pools.move_to_pool(
            policy_params, job_models.train_shardings(models.policy, mesh)
        )
    if config.lora.rank:
        return policy_params  # only adapters change
    copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
    return jax.jit(copy, out_shardings=models.policy_shardings)(policy_params)


def role_network(
    config: JobConfig, models: Models, path: str, head: Literal["lm", "scalar"]
) -> Network:
    """The network of a reward or cost model or a teacher, by the config of its folder."""
    shape, mesh = checkpoint.read_architecture(path), models.meshes["reward"]
    net = job_models.make_network(config, shape, head, mesh)
    # A teacher is compared with the policy: both are distributions over the same tokens.
    return dataclasses.replace(net, suppressed_tokens=models.policy.suppressed_tokens)


def role_folders(config: RLConfig, models: Models) -> list[tuple[str, Network]]:
    """The folders of all models of RL but the policy, each with its network; "": no folder."""
    needed = requirements.requirements(config.algorithm)
    folders = [
        (config.reference.path if needed.reference else "", models.policy),
        (config.critic.path if needed.critic else "", models.value),
    ]
    for model in (*config.rewards.models.values(), *config.rewards.cost_models.values()):
        if model.path:
            folders.append((model.path, role_network(config, models, model.path, "scalar")))
    for teacher in config.distillation.teachers.values():
        folders.append((teacher.path, role_network(config, models, teacher.path, "lm")))
    return folders


def check_folders(config: JobConfig, models: Models, others: Sequence[tuple[str, Network]]) -> None:
    """Checks every model folder of a job by its headers, before any weights are read.

    `others` are the folders of the other models, each with the network it must fit; "" is none.

    Raises:
      CheckpointFormatError: If one is missing, cut short, or does not fit its role.
    """
    trained = models.value if config.trained_head == "scalar" else models.policy
    if config.lora.path:
        peft_adapter.check(config.lora.path, trained)
    for path, net in ((config.model.path, trained), *others):
        if path:
            checkpoint.check(path, net)
            for mesh in set(models.meshes.values()):
                job_models.check_heads(config, mesh, net.shape)


def check_rates(config: JobConfig, models: Models) -> None:
    """Raises ConfigError if learning rates of parameters are for parameters that no role trains."""
    trained = models.value if config.trained_head == "scalar" else models.policy
    params = abstract_trained(trained, models.mesh)
    optimizer.check_rates(config.trainer.optimizer, params, "trainer.optimizer")
    if not config.learns_from_samples:
        return
    as_rl, scores = config.require_rl(), models.value.abstract_params()
    if requirements.requirements(as_rl.algorithm).critic:
        optimizer.check_rates(as_rl.critic.optimizer, scores, "critic.optimizer")
    whole = models.policy.abstract_params()
    for name, stage, params in (
        ("warm_start", as_rl.warm_start, whole),
        ("preference", as_rl.preference, scores),
    ):
        if stage.num_steps:
            optimizer.check_rates(stage.optimizer, params, f"{name}.optimizer")
