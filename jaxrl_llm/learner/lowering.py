"""The programs of a run, lowered without a weight: for devices that need not be present.

What the loop runs is what is lowered here, from the same functions, with shapes and
shardings in place of arrays. Every sequence is taken to be as long as the run allows, so what
the compiler says of memory is the most that a step can need.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.data import packing
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.learner import automatic, batches, experience, networks, optimizer, places, update
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.learner.roles import LearnerState, Roles, Trainable
from jaxrl_llm.models import lora
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Minibatch

# What a run compiles, in the order of a step; see `lowered`.
PROGRAMS = ("prefill", "decode", "score", "score_critic", "train", "reshard", "reshard_layer")


def abstract_roles(config: Config, shape: Shape, devices: Sequence[Any]) -> Roles:
    """Returns the roles of a run on devices that may be absent; no folder is read.

    Args:
      config: The run. Its tokenizer plays no part: `shape` has the size of the vocabulary.
      shape: Of policy, reference and critic.
      devices: Real ones, or those of `jax.experimental.topologies`.

    Raises:
      ConfigError: If the mesh does not fit the devices.
    """
    config = automatic.here(config, shape, devices)
    meshes = places.meshes(config, devices)
    return roles_lib.assemble(config, meshes, tokenizer_lib.character_tokenizer(), (0,), shape)


def abstract_state(roles: Roles) -> LearnerState:
    """Returns the learner state of a run as shapes, dtypes and shardings."""
    algorithm = roles.config.algorithm
    number = lambda dtype: _array(roles, (), dtype)  # noqa: E731

    def trainable(shapes: Params, shardings: Params, transformation) -> Trainable:
        params = _placed(shapes, shardings)
        opt_state = roles_lib.abstract_optimizer(transformation, params, roles.mesh)
        return Trainable(params, opt_state, number(jnp.int32))

    def critic(needed: bool) -> Trainable:
        if needed:
            shapes = roles.value.abstract()
            return trainable(shapes, roles.value_shardings, roles.critic_optimizer)
        nothing = optimizer.make(roles.config.critic.optimizer, roles.num_updates)
        opt_state = roles_lib.abstract_optimizer(nothing, {}, roles.mesh)
        return Trainable({}, opt_state, number(jnp.int32))

    trained, trained_shardings = roles.policy.abstract(), roles.policy_shardings
    if roles.config.lora.rank:
        trained = roles.policy.abstract_adapters()
        trained_shardings = networks.adapter_shardings(roles.policy, roles.mesh)
    return LearnerState(
        policy=trainable(trained, trained_shardings, roles.policy_optimizer),
        critic=critic(algorithm.needs_critic),
        cost_critic=critic(algorithm.safe),
        kl_coef=number(jnp.float32),
        log_multiplier=number(jnp.float32),
    )


def lowered(roles: Roles) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns by name what lowers each program of the run, so that one may be asked for alone.

    `prefill`, `decode` (one chunk with the widest window), `score` (policy or
    reference), `score_critic` (critic; absent without one), `train` (one optimizer update of all
    learners), `reshard` (the ends, the largest of its programs) and `reshard_layer`.
    """
    config = roles.config
    state = abstract_state(roles)
    base = _placed(roles.policy.abstract(), roles.policy_shardings) if config.lora.rank else {}
    roles = dataclasses.replace(roles, base_params=base)
    policy = lora.joined(base, state.policy.params)
    width = config.max_sequence_tokens
    everything = config.sequences_per_step
    of_policy, of_critic = experience.scoring_programs(roles)
    tokens = _array(roles, (everything, width), jnp.int32)
    lengths = _array(roles, (everything,), jnp.int32)
    engine = roles.engine
    rollout_params = roles.resharder.abstract()
    layer_number = _array(roles, (), jnp.int32)

    def within_mesh(make: Callable[[], jax.stages.Lowered]) -> Callable[[], jax.stages.Lowered]:
        def lower() -> jax.stages.Lowered:
            with jax.set_mesh(roles.mesh):
                return make()

        return lower

    def train():
        program = update.updater(roles, state).program
        learners = (state.policy, state.critic, state.cost_critic)
        plan = abstract_plan(roles, config.minibatch_size)
        key = jax.eval_shape(lambda: jax.random.key(0))
        return program.lower(learners, base, abstract_batch(roles), plan, key, train_policy=True)

    def score(program, params: Params, **choices):
        return program.lower(params, tokens, lengths, abstract_plan(roles, everything), **choices)

    ends = lambda tree: {k: v for k, v in tree.items() if k != "layers"}  # noqa: E731
    programs: dict[str, Callable[[], jax.stages.Lowered]] = {
        "prefill": lambda: engine.compiled.lower_prefill(
            rollout_params, config.trainer.prompts_per_step, config.data.max_prompt_tokens
        ),
        "decode": lambda: engine.compiled.lower_generate(rollout_params),
        "score": lambda: score(of_policy, policy, entropy="value"),
        "score_critic": lambda: score(of_critic, state.critic.params),
        "train": train,
        "reshard": lambda: roles.resharder.jitted["ends"].lower(ends(rollout_params), ends(policy)),
        "reshard_layer": lambda: roles.resharder.jitted["layer"].lower(
            rollout_params["layers"][0], policy["layers"], layer_number
        ),
    }
    if not state.critic.params:
        del programs["score_critic"]
    return {name: within_mesh(make) for name, make in programs.items()}


def abstract_plan(roles: Roles, num_chosen: int) -> batches.Plan:
    """Returns the layout of so many sequences of a step, each as long as the run allows.

    Samples of a prompt share it where the run's rows would.
    """
    config = roles.config
    width, count = config.max_sequence_tokens, config.sequences_per_step
    prompt = config.data.max_prompt_tokens
    of_responses = np.tile(np.arange(width) >= prompt, (count, 1))
    layout = places.row_layout(config, roles.meshes, roles.policy)
    plan = layout.plan(
        np.full(count, width),
        np.arange(num_chosen),
        width=width,
        scored=batches.EVERY_TOKEN if roles.mesh.shape["sequence"] > 1 else of_responses,
        common=packing.Beginnings(
            np.arange(count) // config.algorithm.samples_per_prompt, np.full(count, prompt)
        ),
    )
    return jax.tree.map(lambda a: _array(roles, np.shape(a), a.dtype), plan)


def abstract_batch(roles: Roles) -> Minibatch:
    """Returns the shapes of what the update reads of all sequences of a step."""
    config = roles.config
    table = (config.sequences_per_step, config.max_sequence_tokens)
    numbers = lambda: _array(roles, table, jnp.float32)  # noqa: E731
    return Minibatch(
        tokens=_array(roles, table, jnp.int32),
        lengths=_array(roles, table[:1], jnp.int32),
        response_mask=_array(roles, table, jnp.bool_),
        loss_mask=_array(roles, table, jnp.bool_),
        old_log_probs=numbers(),
        ref_log_probs=numbers(),
        rollout_log_probs=numbers(),
        advantages=numbers(),
        returns=numbers(),
        values=numbers(),
        cost_returns=numbers(),
        cost_values=numbers(),
        correction_weights=numbers(),
    )


def _array(roles: Roles, shape: tuple[int, ...], dtype) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.replicated(roles.mesh))


def _placed(shapes: Params, shardings: Params) -> Params:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
    )
