"""The models of a run: what each is, where it lives, and how it begins."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.algorithms import safe_rlhf
from jaxrl_llm.config import Config, OptimizerConfig
from jaxrl_llm.learner import automatic, networks, optimizer, places
from jaxrl_llm.learner.batches import Layout
from jaxrl_llm.models import families, huggingface, lora
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import capacity
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools, resting
from jaxrl_llm.sharding.reshard import Resharder

_ADAPTERS = 1  # folded into the seed for their first values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trainable:
    """Parameters and the optimizer that moves them. A role without a model has no parameters."""

    params: Params
    opt_state: Any
    num_updates: Int[Array, ""]  # taken; skipped ones are not counted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LearnerState:
    """All that learning changes; what a checkpoint holds."""

    policy: Trainable
    critic: Trainable
    cost_critic: Trainable
    kl_coef: Float[Array, ""]
    log_multiplier: Float[Array, ""]  # of Safe-RLHF's cost


@dataclasses.dataclass(frozen=True)
class Roles:
    """The fixed side of a run: networks, layouts, frozen weights, engine."""

    config: Config
    meshes: Mapping[str, Mesh]  # of each role; see `placement.ROLES`
    tokenizer: PreTrainedTokenizerBase
    eos_tokens: tuple[int, ...]
    policy: Network
    value: Network  # critics, reward and cost models of the policy's shape
    policy_shardings: Params
    value_shardings: Params
    engine: Engine
    resharder: Resharder
    layout: Layout
    reference_params: Params = dataclasses.field(default_factory=dict)
    base_params: Params = dataclasses.field(default_factory=dict)  # below adapters; else nothing
    scorers: Mapping[str, "Scalar"] = dataclasses.field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The policy's; where estimates are made and what each role says is brought together."""
        return self.meshes["policy"]

    @property
    def platform(self) -> str:
        """Of the mesh's devices: "cpu", "tpu", "gpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole run; what a schedule decays over."""
        return self.config.num_updates

    @property
    def policy_optimizer(self) -> optax.GradientTransformation:
        return optimizer.make(self.config.trainer.optimizer, self.num_updates)

    @property
    def critic_optimizer(self) -> optax.GradientTransformation:
        return optimizer.make(self.config.critic.optimizer, self.num_updates)

    def rollout_layout(self, params: Params, old: Params | None = None) -> Params:
        """Returns policy weights in the rollout layout, in the memory of `old` if there is one.

        `params` is what the policy trains; adapters are merged into the base on the way. To
        devices of rollout's own they are copied from the same parts on the policy's devices, which
        are freed afterwards.
        """
        source, target = self.mesh, self.meshes["rollout"]
        first, apart = old is None, source != target
        old = self.resharder.empty() if old is None or apart else old
        with jax.set_mesh(pools.staging(source, target)):
            moved = self.resharder.reshard(old, lora.joined(self.base_params, params))
        if first and self.meshes["policy"].size > 1:
            logging.info("weights for sampling: %s", self.resharder.report())
        return pools.move(moved, places.on(target, moved)) if apart else moved

    def whole_policy(self, params: Params) -> Params:
        """Returns the plain policy that the trained `params` amount to, in the training layout."""
        if not self.base_params:
            return params
        merge = jax.jit(
            networks.merge_adapters(self.config.lora), out_shardings=self.policy_shardings
        )
        with jax.set_mesh(self.mesh):
            return merge(lora.joined(self.base_params, params))


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A frozen model that gives one number a sequence: a reward or cost model."""

    network: Network
    params: Params


def build(config: Config) -> Roles:
    """Returns the roles of a run. Reads configuration files, allocates no weights.

    Raises:
      ConfigError, families.FormatError: If mesh, model folder or tokenizer cannot work.
    """
    tokenizer = networks.load_tokenizer(config.model)
    shape = networks.model_shape(config.model, tokenizer)
    networks.check_stop_tokens(config, shape)
    config = automatic.here(config, shape, jax.devices())
    meshes = places.meshes(config)
    eos = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if config.model.path:
        eos |= set(families.eos_token_ids(config.model.path))
    return assemble(config, meshes, tokenizer, tuple(sorted(eos)), shape)


def assemble(
    config: Config,
    meshes: Mapping[str, Mesh],
    tokenizer: PreTrainedTokenizerBase,
    eos_tokens: tuple[int, ...],
    shape: Shape,
) -> Roles:
    """Returns the roles of a policy of this shape on meshes, whose devices need not be present.

    No folder is read and nothing is allocated.

    Raises:
      ConfigError: If the mesh cannot hold this run's sequences and heads.
    """
    mesh, rollout_mesh = meshes["policy"], meshes["rollout"]
    rollout_layout = config.mesh.rollout if pools.fits(mesh, rollout_mesh) else "replicas"
    for each in set(meshes.values()):
        networks.check_mesh(config, each, shape)
    platform = mesh.devices.flat[0].platform
    policy = networks.network(config, shape, "lm", platform)
    policy = dataclasses.replace(policy, lora=config.lora)
    rollout = rollout_network(config, policy, rollout_mesh)
    value = networks.network(config, shape, "scalar", platform)
    return Roles(
        config=config,
        meshes=meshes,
        tokenizer=tokenizer,
        eos_tokens=eos_tokens,
        policy=policy,
        value=value,
        policy_shardings=networks.train_shardings(policy, mesh),
        value_shardings=networks.train_shardings(value, meshes["critic"]),
        engine=Engine(
            rollout,
            rollout_mesh,
            num_slots=config.rollout.num_slots
            or capacity.num_slots(
                rollout,
                rollout_mesh,
                config.max_sequence_tokens,
                config.sequences_per_step,
                config.rollout.speculation.draft_tokens,
            ),
            max_tokens=config.max_sequence_tokens,
            chunk_steps=config.rollout.chunk_steps,
            speculation=config.rollout.speculation,
            layout=rollout_layout,
            decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        ),
        layout=places.row_layout(config, meshes, policy),
        resharder=Resharder(
            policy.abstract(),
            policy.logical_axes(),
            policy.units,
            pools.staging(mesh, rollout_mesh),
            rollout.compute_dtype,
            rollout_layout,
            networks.merge_adapters(config.lora),
            rollout.logical_axes(),
        ),
    )


def rollout_network(config: Config, policy: Network, mesh: Mesh) -> Network:
    """Returns the policy as the engine runs it: same arithmetic, its own dtype and kernels."""
    wanted = config.rollout.dtype
    dtype = policy.compute_dtype if wanted == "compute" else wanted
    return dataclasses.replace(policy, compute_dtype=dtype).for_decoding(mesh)


def check_folders(roles: Roles) -> None:
    """Checks every model folder of the run by its headers, before any weights are read.

    Raises:
      CheckpointFormatError: If one is missing, cut short, or does not fit its role.
    """
    config = roles.config
    folders = [(config.model.path, roles.policy)]
    if config.algorithm.needs_reference:
        folders.append((config.reference.path, roles.policy))
    if config.algorithm.needs_critic:
        folders.append((config.critic.path, roles.value))
    for model in (*config.rewards.models.values(), *config.rewards.cost_models.values()):
        if model.path:
            folders.append(
                (model.path, networks.scorer_network(config, model.path, roles.platform))
            )
    for path, net in folders:
        if path:
            huggingface.check(path, net)
            for mesh in set(roles.meshes.values()):
                networks.check_heads(config, mesh, net.shape)


def initial_policy(roles: Roles) -> Params:
    """Returns the policy's first weights, born sharded: of the folder, or random by the seed."""
    if roles.config.model.path:
        return huggingface.load(roles.config.model.path, roles.policy, roles.policy_shardings)
    return _random(roles.policy, roles.policy_shardings, roles.config.seed)


def _random(net: Network, shardings: Params, seed: int) -> Params:
    return jax.jit(net.init, out_shardings=shardings)(jax.random.key(seed))


def trainable(params: Params, config: OptimizerConfig, num_updates: int, mesh: Mesh) -> Trainable:
    """Returns parameters with a fresh optimizer; its moments are split as the parameters are."""
    transformation = optimizer.make(config, num_updates)
    shardings = jax.tree.map(lambda a: a.sharding, abstract_optimizer(transformation, params, mesh))
    opt_state = jax.jit(transformation.init, out_shardings=shardings)(params)
    return Trainable(params, opt_state, jax.device_put(np.int32(0), mesh_lib.replicated(mesh)))


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
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state, shardings
    )


def initial_state(roles: Roles, policy_params: Params) -> LearnerState:
    """Returns the state RL begins with; the critics begin at the policy's weights.

    With LoRA the policy of the state is its adapters alone, which change nothing yet.
    """
    config = roles.config
    algorithm = config.algorithm
    replicated = mesh_lib.replicated(roles.mesh)

    def critic(needed: bool) -> Trainable:
        params = _initial_critic(roles, policy_params) if needed else {}
        return begun(params, config.critic.optimizer, roles.meshes["critic"])

    def begun(params: Params, of: OptimizerConfig, mesh: Mesh) -> Trainable:
        role = trainable(params, of, roles.num_updates, mesh)
        if "optimizer" in config.mesh.on_host:
            role = dataclasses.replace(role, opt_state=resting.resting(role.opt_state))
        return role

    if config.lora.rank:
        policy_params = _initial_adapters(roles)
    return LearnerState(
        policy=begun(policy_params, config.trainer.optimizer, roles.mesh),
        critic=critic(algorithm.needs_critic),
        cost_critic=critic(algorithm.safe),
        kl_coef=jax.device_put(
            np.float32(algorithm.kl_coef if algorithm.needs_reference else 0.0), replicated
        ),
        log_multiplier=jax.device_put(safe_rlhf.initial_log_multiplier(algorithm), replicated),
    )


def _initial_adapters(roles: Roles) -> Params:
    key = jax.random.fold_in(jax.random.key(roles.config.seed), _ADAPTERS)
    shardings = networks.adapter_shardings(roles.policy, roles.mesh)
    return jax.jit(roles.policy.init_adapters, out_shardings=shardings)(key)


def _initial_critic(roles: Roles, policy_params: Params) -> Params:
    if roles.config.critic.path:
        return huggingface.load(roles.config.critic.path, roles.value, roles.value_shardings)
    return scalar_from_policy(roles, policy_params, "critic")


def scalar_from_policy(roles: Roles, policy_params: Params, role: str) -> Params:
    """Returns a copy of the policy's body under a scalar head of zeros, where a role lives."""
    body = {k: v for k, v in policy_params.items() if k != "head"}

    def make(body):
        score = jnp.zeros((1, roles.policy.shape.hidden_size), roles.value.param_dtype)
        return {**jax.tree.map(jnp.copy, body), "score": score}

    here, there = (
        networks.train_shardings(roles.value, mesh) for mesh in (roles.mesh, roles.meshes[role])
    )
    return pools.move(jax.jit(make, out_shardings=here)(body), there)


def abstract(tree: Any) -> Any:
    """Returns shapes, dtypes and shardings of a tree of arrays: what to restore it as."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def with_frozen_models(roles: Roles, policy_params: Params, trained: Mapping[str, Params]) -> Roles:
    """Returns the roles with reference, reward and cost models in place, and adapters' base.

    Args:
      roles: As built.
      policy_params: The policy when RL begins; what the reference is, unless it has a folder.
      trained: Parameters of the models without a folder, by name.
    """
    config = roles.config
    reference: Params = {}
    there = networks.train_shardings(roles.policy, roles.meshes["reference"])
    if config.algorithm.needs_reference:
        if config.reference.path:
            reference = huggingface.load(config.reference.path, roles.policy, there)
        elif roles.meshes["reference"] != roles.mesh:
            reference = pools.move(policy_params, there)
        else:
            # Below adapters the policy stays as it is and is the reference itself.
            copy = functools.partial(jax.tree.map, jnp.copy)
            copied = jax.jit(copy, out_shardings=there)
            reference = policy_params if config.lora.rank else copied(policy_params)
        if "reference" in config.mesh.on_host and not config.lora.rank:
            reference = resting.resting(reference)
    scorers = {}
    for name, model in {**config.rewards.models, **config.rewards.cost_models}.items():
        if model.path:
            net = networks.scorer_network(config, model.path, roles.platform)
            shardings = networks.train_shardings(net, roles.meshes["reward"])
            params = huggingface.load(model.path, net, shardings)
            scorers[name] = Scalar(net, params)
        else:
            scorers[name] = Scalar(roles.value, trained[name])
    return dataclasses.replace(
        roles,
        reference_params=reference,
        base_params=policy_params if config.lora.rank else {},
        scorers=scorers,
    )
