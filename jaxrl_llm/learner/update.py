"""One optimizer update of a role: gradients over microbatches, then AdamW.

The loss of a minibatch is a sum with fixed denominators, so how it is cut into
microbatches, packed into rows and split over devices does not change the gradient.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxrl_llm.algorithms import advantages, corrections, losses, selection
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.config import Config
from jaxrl_llm.learner import batches, optimizer
from jaxrl_llm.learner.batches import Microbatch, Plan
from jaxrl_llm.learner.roles import LearnerState, Roles, Trainable
from jaxrl_llm.models import casting, heads, lora
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools, resting
from jaxrl_llm.types import Minibatch

Metrics = Mapping[str, Float[Array, ""]]
# loss(params, microbatch) -> (its share of the minibatch's loss, arrays to be summed by name)
Loss = Callable[[Params, Microbatch], tuple[Float[Array, ""], Metrics]]

ABSENT = Trainable({}, (), ())  # type: ignore[arg-type]  # a learner that lives on other devices


def is_on_policy(config: Config) -> bool:
    """Returns whether a step is one update and needs no log-probs of the policy before it.

    The ratio to the old policy is then 1 by construction: the update takes its own log-probs,
    without a gradient, for the old ones. That saves a pass over the step and changes no gradient.
    Not where anything before the update reads the old log-probs: a KL in the reward, corrections
    and rejections, some advantages, losses that choose tokens from the whole minibatch, alerts
    that may skip the update.
    """
    algorithm, trainer = config.algorithm, config.trainer
    one_update = trainer.epochs == 1 and config.minibatch_size == config.sequences_per_step
    reads_old = (
        algorithm.old_log_probs == "rollout"
        or algorithm.kl_in == "reward"
        or algorithm.correction != "none"
        or algorithm.safe
        or bool(algorithm.rejections)
        or algorithm.policy_loss in selection.SELECTIONS
        or advantages.reads(algorithm, "old_log_probs", "sum_squared_probs")
        or "skip" in (config.alerts.entropy.action, config.alerts.log_prob_difference.action)
    )
    return one_update and not reads_old


def take_update(
    role: Trainable,
    transformation: optax.GradientTransformation,
    plan: Plan,
    loss: Loss,
    compute_dtype: str,
    prefix: str,
    max_kl: float = math.inf,
) -> tuple[Trainable, Metrics]:
    """Returns the role after one update on a plan's sequences, and the metrics of the update.

    An update changes nothing if its loss or gradient, or a parameter or moment after it, is not
    finite, or its `actor/ppo_kl` is above `max_kl`. That is decided within the program, and
    counted in `PREFIX/skipped_updates`.
    Gradients have the dtype that their backward pass computes in until the optimizer reads them;
    sums over microbatches are float32.
    """

    def of_variables(variables: Params, microbatch: Microbatch):
        return loss(casting.bound(role.params, variables), microbatch)

    gradient = jax.value_and_grad(of_variables, has_aux=True)
    variables = casting.variables(role.params, compute_dtype)
    first = jax.tree.map(lambda a: a[0], plan.microbatches)
    like = jax.eval_shape(gradient, variables, first)
    # Sums over microbatches are float32 whatever the dtype of the parameters.
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), like)
    (value, metrics), gradients = batches.add_up(plan, functools.partial(gradient, variables), like)
    allowed = jnp.isfinite(value) & ~(metrics.get("actor/ppo_kl", jnp.zeros(())) > max_kl)
    params, opt_state, norm, skipped = optimizer.apply_if_finite(
        transformation, gradients, role.opt_state, role.params, allowed
    )
    role = Trainable(params, opt_state, role.num_updates + ~skipped)
    return role, {
        **metrics,
        **optimizer.module_norms(gradients, f"{prefix}/grad_norm"),
        f"{prefix}/loss": value,
        f"{prefix}/grad_norm": norm,
        f"{prefix}/skipped_updates": skipped.astype(jnp.float32),
    }


def token_statistics(
    network: Network,
    params: Params,
    tokens: Array,
    microbatch: Microbatch,
    *,
    temperature: float,
    chunk: int,
    entropy: heads.Entropy,
) -> tuple[Float[Array, "R W"], Float[Array, "R W"], Float[Array, "R W"]]:
    """Returns log-probs, entropies and sums of squared probabilities of packed rows.

    Zero at tokens that `microbatch.scored` does not name.
    """
    packed = microbatch.packed(tokens)
    hidden = _hidden(network, params, packed, microbatch)
    weight = network.head_weight(params)
    settings: Any = {"temperature": temperature, "chunk": chunk, "entropy": entropy}
    if microbatch.scores_everything:
        return heads.token_statistics(hidden, weight, packed, microbatch.segment_ids, **settings)
    places = microbatch.scored, microbatch.before
    return heads.chosen_statistics(hidden, weight, packed, *places, **settings)


def _hidden(
    network: Network, params: Params, packed: Array, microbatch: Microbatch
) -> Float[Array, "R W D"]:
    places = microbatch.positions, microbatch.segment_ids
    return network.hidden(
        params,
        packed,
        *places,
        prefix_ids=microbatch.prefix_ids,
        key_blocks=microbatch.key_blocks,
    )


def token_values(
    network: Network, params: Params, tokens: Array, microbatch: Microbatch
) -> Float[Array, "R W"]:
    """Returns the value just before each token of packed rows.

    Zero at tokens that `microbatch.scored` does not name.
    """
    hidden = _hidden(network, params, microbatch.packed(tokens), microbatch)
    weight = network.head_weight(params)
    if microbatch.scores_everything:
        return heads.token_values(hidden, weight, microbatch.segment_ids)
    return heads.chosen_values(hidden, weight, microbatch.scored, microbatch.before)


def sequence_scores(
    network: Network, params: Params, tokens: Array, lengths: Array, microbatch: Microbatch
) -> Float[Array, " b"]:
    """Returns the score at the last token of each of the microbatch's sequences."""
    hidden = _hidden(network, params, microbatch.packed(tokens), microbatch)
    last = microbatch.starts + jnp.maximum(microbatch.take(lengths), 1) - 1
    at_end = hidden[microbatch.rows, last][:, None]
    return heads.sequence_scores(at_end, network.head_weight(params), jnp.zeros_like(last))


@dataclasses.dataclass(frozen=True)
class Updater:
    """One update of every learner of a run.

    Attributes:
      homes: Where policy, critic and cost critic live.
      base: What the policy's adapters are added to, or nothing.
      programs: `(learners, base, batch, plan, key, *, train_policy) -> (learners, metrics)`,
        jitted, of each of these meshes; learners that live elsewhere are `ABSENT` in it.
      optimizer_rests: Whether optimizer state is in host memory between updates.
    """

    homes: tuple[Mesh, Mesh, Mesh]
    base: Params
    programs: Mapping[Mesh, Any]
    optimizer_rests: bool

    @property
    def program(self) -> Any:
        """The program of the policy's mesh."""
        return self.programs[self.homes[0]]

    def spread(self, batch: Minibatch) -> Mapping[Mesh, Minibatch]:
        """Returns all sequences of a step where learners live.

        Before any update of the step: a copy to other devices is cut out by the policy's, and
        there it would wait for the updates before it, and learners elsewhere with it.
        """
        return {mesh: pools.move(batch, mesh_lib.replicated(mesh)) for mesh in self.programs}

    def __call__(
        self,
        state: LearnerState,
        batch: Mapping[Mesh, Minibatch],
        plan: Plan,
        key,
        *,
        train_policy: bool = True,
    ) -> tuple[LearnerState, Metrics]:
        """Returns the state after the update, which consumes the old one, and its metrics.

        Args:
          state: As before the update.
          batch: As `spread` returns it.
          plan: Which of them make this minibatch.
          key: Of what the policy loss draws.
          train_policy: With False only the critics learn.
        """
        learners = _learners(state)
        metrics: dict[str, Any] = {}
        # Each call only dispatches: programs of different devices run at the same time.
        for mesh, program in self.programs.items():
            mine = _living(learners, self.homes, mesh)
            base = self.base if mesh == self.homes[0] else {}
            if self.optimizer_rests:
                mine = _with_optimizers(resting.working, mine)
            with jax.set_mesh(mesh):
                updated, found = program(
                    mine, base, batch[mesh], plan, key, train_policy=train_policy
                )
            if self.optimizer_rests:
                updated = _with_optimizers(resting.resting, updated)
            learners = tuple(
                new if home == mesh else old
                for old, new, home in zip(learners, updated, self.homes, strict=True)
            )
            metrics |= found
        policy, critic, cost_critic = learners
        state = dataclasses.replace(state, policy=policy, critic=critic, cost_critic=cost_critic)
        return state, {**metrics, "perf/padding_share": plan.padding_share()}


def _learners(state: LearnerState) -> tuple[Trainable, ...]:
    return state.policy, state.critic, state.cost_critic


def _living(learners: tuple[Trainable, ...], homes: tuple[Mesh, ...], mesh: Mesh):
    """Returns the learners of a mesh, others `ABSENT`."""
    return tuple(
        learner if home == mesh else ABSENT for learner, home in zip(learners, homes, strict=True)
    )


def _with_optimizers(move: Callable[[Any], Any], learners: tuple[Trainable, ...]):
    """Returns the learners with the state of their optimizers moved."""
    return tuple(dataclasses.replace(role, opt_state=move(role.opt_state)) for role in learners)


def updater(roles: Roles, state: LearnerState) -> Updater:
    """Returns the update of a run, compiled once.

    Args:
      roles: The fixed side of the run.
      state: Arrays, or their shapes and shardings: only those are looked at.
    """
    config = roles.config
    algorithm = config.algorithm
    compute_dtype = config.model.compute_dtype
    temperature = config.rollout.temperature or 1.0
    statistics = functools.partial(
        token_statistics,
        roles.policy,
        temperature=temperature,
        chunk=config.model.vocab_chunk,
    )
    on_policy = is_on_policy(config)
    entropy: heads.Entropy = "value" if on_policy else "none"
    if algorithm.entropy_coef:
        entropy = "gradient"
    of_kl = config.alerts.kl
    max_kl = of_kl.limit if of_kl.action == "skip" else math.inf

    def policy_update(role: Trainable, base: Params, batch: Minibatch, plan: Plan, key):
        width = batch.tokens.shape[1]
        denominators = minibatch_denominators(
            batch.loss_mask & plan.chosen[:, None],
            algorithm.loss_scale or float(config.rollout.max_response_tokens),
        )
        chosen = _selection(lora.joined(base, role.params), batch, plan, key)

        def loss(params: Params, microbatch: Microbatch):
            whole = lora.joined(base, params)
            log_probs, entropies, _ = statistics(whole, batch.tokens, microbatch, entropy=entropy)
            unpack = functools.partial(microbatch.unpacked, lengths=batch.lengths, width=width)
            log_probs = unpack(log_probs)
            rows = jax.tree.map(microbatch.take, batch)
            now = jax.lax.stop_gradient(log_probs)
            if on_policy:
                rows = dataclasses.replace(rows, old_log_probs=now)
            value, metrics = losses.policy_objective(
                algorithm,
                log_probs,
                unpack(entropies),
                rows,
                microbatch.take(chosen),
                denominators,
            )
            seen = microbatch.put(jnp.zeros_like(batch.old_log_probs), now)
            return value, {**metrics, "log_probs": seen}

        role, found = take_update(
            role, roles.policy_optimizer, plan, loss, compute_dtype, "actor", max_kl
        )
        # An entropy that was not computed is no entropy of zero.
        unseen = {"log_probs", *(["actor/entropy"] if entropy == "none" else [])}
        metrics = {name: value for name, value in found.items() if name not in unseen}
        if on_policy:
            metrics |= corrections.engine_gap(
                found["log_probs"],
                batch.rollout_log_probs,
                batch.response_mask & plan.chosen[:, None],
            )
        return role, metrics

    def _selection(params, batch: Minibatch, plan: Plan, key):
        """Returns what clip_cov and kl_cov choose from the whole minibatch."""
        num_sequences, width = batch.tokens.shape
        if algorithm.policy_loss not in selection.SELECTIONS:
            return jnp.zeros((num_sequences, width), bool)

        def log_probs(microbatch: Microbatch):
            values, _, _ = statistics(params, batch.tokens, microbatch, entropy="none")
            return microbatch.unpacked(values, batch.lengths, width)

        values = batches.collect(plan, log_probs, num_sequences, width)
        return selection.select(algorithm, values, _only(batch, plan), key)

    def critic_update(role: Trainable, batch: Minibatch, plan: Plan, old, returns, prefix: str):
        width = batch.tokens.shape[1]
        denominators = minibatch_denominators(batch.loss_mask & plan.chosen[:, None])

        def loss(params: Params, microbatch: Microbatch):
            values = token_values(roles.value, params, batch.tokens, microbatch)
            return losses.value_loss(
                algorithm,
                microbatch.unpacked(values, batch.lengths, width),
                microbatch.take(old),
                microbatch.take(returns),
                microbatch.take(batch.loss_mask),
                denominators,
                prefix,
            )

        return take_update(role, roles.critic_optimizer, plan, loss, compute_dtype, prefix)

    def update(learners, base: Params, batch: Minibatch, plan: Plan, key, *, train_policy: bool):
        policy, critic, cost_critic = learners
        metrics: dict[str, Array] = {}
        if critic.params:
            critic, of_critic = critic_update(
                critic, batch, plan, batch.values, batch.returns, "critic"
            )
            metrics |= of_critic
        if cost_critic.params:
            cost_critic, of_costs = critic_update(
                cost_critic, batch, plan, batch.cost_values, batch.cost_returns, "cost_critic"
            )
            metrics |= of_costs
        if train_policy and policy.params:
            policy, of_policy = policy_update(policy, base, batch, plan, key)
            metrics |= of_policy
        return (policy, critic, cost_critic), metrics

    homes = (roles.meshes["policy"], roles.meshes["critic"], roles.meshes["critic"])

    def on(mesh: Mesh):
        learners = _living(_learners(state), homes, mesh)
        return jax.jit(
            update,
            static_argnames="train_policy",
            donate_argnums=0,
            out_shardings=(
                jax.tree.map(lambda a: resting.in_use(a.sharding), learners),
                mesh_lib.replicated(mesh),
            ),
        )

    busy = [home for home, role in zip(homes, _learners(state), strict=True) if role.params]
    programs = {mesh: on(mesh) for mesh in dict.fromkeys(busy)}
    return Updater(homes, roles.base_params, programs, "optimizer" in config.mesh.on_host)


def _only(batch: Minibatch, plan: Plan) -> Minibatch:
    """Returns the batch with sequences outside the plan masked out of the loss."""
    return dataclasses.replace(batch, loss_mask=batch.loss_mask & plan.chosen[:, None])
