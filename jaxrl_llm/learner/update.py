"""The optimizer updates of a step: gradients over microbatches, then AdamW.

The loss of a minibatch is a sum with fixed denominators: how it is cut into microbatches, packed
into rows and split over devices does not change the gradient.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms import corrections, losses, selection
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.config import OptimizerConfig, RLConfig
from jaxrl_llm.config.learner import RouterLossConfig
from jaxrl_llm.data import packing
from jaxrl_llm.data.packing import Microbatch, PackedBatch
from jaxrl_llm.learner import distillation, eyes, optimizer, routing, wide
from jaxrl_llm.learner import gradients as gradients_lib
from jaxrl_llm.learner.batches import Order, minibatches, padding_share
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.predict import Reader, is_on_policy, token_statistics, token_values
from jaxrl_llm.learner.weights import LearnerState, Trainable
from jaxrl_llm.metrics import statistics
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models import flops, heads, lora
from jaxrl_llm.models.shape import Shape
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import hosts, pools
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Minibatch, Rollouts

Metrics = Mapping[str, Float[Array, ""]]


def take_update(
    role: Trainable,
    config: OptimizerConfig,
    num_updates: int,
    packed: PackedBatch,
    reader: Reader,
    loss: gradients_lib.Loss,
    compute_dtype: str,
    prefix: str,
    max_kl: float = math.inf,
    whole: Callable[[Params], Params] = lambda params: params,
) -> tuple[Trainable, Metrics]:
    """Returns the role after one update on a batch, and the metrics of the update.

    The program skips the update, and counts it in `PREFIX/skipped_updates`, if its loss or
    gradient, or a parameter or moment after it, is not finite, or its `actor/ppo_kl` is above
    `max_kl`. Gradients have the dtype of their backward pass; sums over microbatches are float32.
    `whole` adds to the parameters what is not trained; `reader` says how stages read the batch.
    """

    (value, metrics), gradients = gradients_lib.of_batch(
        reader, whole, role.params, packed, loss, compute_dtype
    )
    allowed = jnp.isfinite(value) & ~(metrics.get("actor/ppo_kl", jnp.zeros(())) > max_kl)
    tower_rate = 0.0 if reader.eyes is None else reader.eyes.learning_rate
    params, opt_state, norm, skipped = optimizer.apply_if_finite(
        optimizer.make(config, num_updates, tower_rate),
        gradients,
        role.opt_state,
        role.params,
        allowed,
        look=optimizer.may_overflow(config, num_updates, tower_rate),
    )
    role = Trainable(params, opt_state, role.num_updates + ~skipped)
    return role, {
        **metrics,
        **optimizer.module_norms(gradients, f"{prefix}/grad_norm"),
        f"{prefix}/loss": value,
        f"{prefix}/grad_norm": norm,
        f"{prefix}/skipped_updates": skipped.astype(jnp.float32),
    }


def after_routers(
    router: RouterLossConfig, shape: Shape, role: Trainable, found: Mapping[str, Any], prefix: str
) -> tuple[Trainable, Metrics]:
    """Returns a role after `take_update` with its selection biases moved, and router metrics.

    They come of the sums "routers" of the loss (`routing.penalty`), if it has any.
    """
    metrics = {name: value for name, value in found.items() if name != "routers"}
    routers: Any = found.get("routers")
    if not routers:
        return role, metrics
    skipped = found[f"{prefix}/skipped_updates"] > 0
    params = routing.rebalanced(router, shape, role.params, routers[0].load, skipped)
    role = dataclasses.replace(role, params=params)
    return role, {**metrics, **routing.metrics(router, routers)}


@dataclasses.dataclass(frozen=True)
class Updater:
    """The updates of a step, for every learner of a run.

    A program is `(learners, base, batch, packed, key, *, train_policy) -> (learners, metrics)`,
    jitted, for the learners of one mesh, by name.
    """

    config: RLConfig
    models: Models
    base: Params  # what the policy's adapters are added to; empty without adapters
    homes: Mapping[str, Mesh]  # of "policy", "critic", "cost_critic": those that the run has
    programs: Mapping[Mesh, Any]
    # Is called with what each update computes, before anything waits for it.
    meanwhile: Callable[[Any], None] = lambda pending: None
    ready: Callable[[], None] = lambda: None  # waits until the programs are compiled

    @property
    def program(self) -> Any:
        """The program of the policy's mesh."""
        return self.programs[self.homes["policy"]]

    def __call__(
        self,
        step: int,
        state: LearnerState,
        rollouts: Rollouts,
        batch: Minibatch,
        order: Order,
        clock: Clock,
    ) -> tuple[LearnerState, dict[str, float]]:
        """Returns the state after the updates of step `step` (from 1), and their mean metrics.

        Consumes the old state; times `update`. In the first `critic_warmup_steps` steps only the
        critics learn. `order` says which sequences each update reads, see `batches.order`.
        """
        packer = self.models.packer
        train_policy = step > self.config.algorithm.critic_warmup_steps
        found: list[dict[str, Any]] = []
        with clock("update") as watch:
            self.ready()
            # Before any update: the policy's devices make the copies for others, and would make
            # them only after the updates before.
            spread, fields = self.spread(batch), _wide_fields(rollouts)
            if (gallery := self.models.gallery) is not None:
                fields |= gallery.of_rollouts(rollouts)
            for packed, update_key in minibatches(packer, rollouts, order):
                if fields:
                    packed = wide.carried(packed, self.homes["policy"], **fields)
                if gallery is not None and gallery.learns:
                    packed = gallery.showing(packed, rollouts)
                state, metrics = self.update(
                    state, spread, packed, update_key, train_policy=train_policy
                )
                of_balance = statistics.of_balance(rollouts.lengths, packer.shares(packed))
                if found:
                    self.meanwhile(found[-1])
                found.append({**watch(metrics), **of_balance})
            self.meanwhile(found[-1])
            means = statistics.mean(found)
            if jax.process_count() > 1:
                hosts.agree(f"step {step}", {"the learner state": state})
        return state, means

    def flops(self, lengths: Int[np.ndarray, " B"]) -> float:
        """Returns the operations of a step's updates; the policy's too while only critics learn."""
        policy, value = self.models.policy.shape, self.models.value.shape
        work = (len(self.homes) - 1) * flops.training(value, lengths, num_labels=1)
        work += flops.training(policy, lengths, frozen=bool(self.base))
        return work * self.config.trainer.epochs

    def learners(self, state: LearnerState, mesh: Mesh) -> dict[str, Trainable]:
        """Returns the learners of a mesh, as its program takes them."""
        return {name: getattr(state, name) for name, home in self.homes.items() if home == mesh}

    def spread(self, batch: Minibatch) -> Mapping[Mesh, Minibatch]:
        """Returns all sequences of a step on each mesh that has learners."""
        return {mesh: pools.whole(batch, mesh) for mesh in self.programs}

    def update(
        self,
        state: LearnerState,
        batch: Mapping[Mesh, Minibatch],
        packed: PackedBatch,
        key: jax.Array,
        *,
        train_policy: bool = True,
    ) -> tuple[LearnerState, Metrics]:
        """Returns the state after one update, which consumes the old one, and its metrics.

        `batch` is as `spread` returns it, `packed` the sequences of it that make this minibatch.
        """
        metrics: dict[str, Any] = {}
        on_host = "optimizer" in self.config.mesh.on_host
        # Each call only dispatches: programs of different devices run at the same time.
        for mesh, program in self.programs.items():
            mine: dict[str, Any] = self.learners(state, mesh)
            base = self.base if "policy" in mine else {}
            here = packed if "policy" in mine else wide.without(packed)
            if on_host:
                mine = _moved_optimizers(pools.working, mine)
            with jax.set_mesh(mesh):
                of_step = pools.given((batch[mesh], here, key), mesh)
                mine, found = program(mine, base, *of_step, train_policy=train_policy)
            if on_host:
                mine = _moved_optimizers(pools.resting, mine)
            state = dataclasses.replace(state, **mine)
            metrics |= found
        return state, {**metrics, "perf/padding_share": padding_share(packed)}


def _wide_fields(rollouts: Rollouts) -> dict[str, np.ndarray]:
    """Returns what packed rows carry of a step's sequences beside their tokens."""
    routes, lessons = rollouts.routes, rollouts.lessons
    fields = {} if routes is None else {"routes": routes}
    if lessons is not None:
        fields |= {"listed": lessons.tokens, "listed_log_probs": lessons.log_probs}
    return fields


def _moved_optimizers(move: Callable[[Any], Any], learners: Mapping[str, Trainable]):
    moved = lambda role: dataclasses.replace(role, opt_state=move(role.opt_state))  # noqa: E731
    return {name: moved(role) for name, role in learners.items()}


def updater(
    config: RLConfig,
    models: Models,
    base: Params,
    state: LearnerState,
    meanwhile: Callable[[Any], None] = lambda pending: None,
) -> Updater:
    """Returns the updates of a run, compiled once; of `state` only shapes and shardings are read.

    `base` is what the policy's adapters are added to; empty without adapters. `meanwhile` is called
    with what each update computes, before anything waits for it.
    """
    algorithm = config.algorithm
    compute_dtype = config.model.compute_dtype
    ask = functools.partial(
        token_statistics,
        models.policy,
        temperature=config.rollout.temperature or 1.0,
        chunk=config.model.vocab_chunk,
    )
    distills = bool(config.distillation.teachers)
    lists = distills and config.distillation.loss == "forward_kl"
    on_policy = is_on_policy(config)
    entropy: heads.Entropy = "value" if on_policy else "none"
    if algorithm.entropy_coef:
        entropy = "gradient"
    max_kl = config.alerts.kl.limit if config.alerts.kl.action == "skip" else math.inf
    scale = algorithm.loss_scale or float(config.rollout.max_response_tokens)

    def policy_update(role: Trainable, base: Params, batch: Minibatch, packed: PackedBatch, key):
        num_sequences, width = batch.tokens.shape
        denominators = minibatch_denominators(batch.loss_mask, scale)
        if distills:
            lesson = distillation.Lesson.of(packed, batch)
            taught = minibatch_denominators(lesson.mask)
            batch = batch if on_policy else distillation.advised(config, batch, lesson)
        reader = Reader(
            models.policy,
            batch.tokens,
            lambda microbatch: routing.told(config.router, microbatch, batch.response_mask),
            eyes.of(config, models.policy),
        )
        # What clip_cov and kl_cov choose from the whole minibatch.
        chosen = jnp.zeros((num_sequences, width), bool)
        if algorithm.policy_loss in selection.SELECTIONS:

            def before(microbatch: Microbatch):
                params = lora.joined(base, role.params)
                told = reader.told(microbatch)
                found, _ = ask(params, batch.tokens, microbatch, entropy="none", routing=told)
                return microbatch.unpacked(found.log_probs, batch.lengths, width)

            passed = reader.passed(lora.joined(base, role.params), packed)
            values = packing.by_sequence(passed, before, num_sequences, width)
            chosen = selection.select(algorithm, values, batch, key)

        def loss(params: Params, microbatch: Microbatch):
            whole, told = lora.joined(base, params), reader.told(microbatch)
            listed = microbatch.listed if lists else None
            found, routed = ask(
                whole, batch.tokens, microbatch, entropy=entropy, routing=told, listed=listed
            )
            unpack = functools.partial(microbatch.unpacked, lengths=batch.lengths, width=width)
            log_probs = unpack(found.log_probs)
            rows = jax.tree.map(microbatch.take, batch)
            now = jax.lax.stop_gradient(log_probs)
            if on_policy:
                rows = dataclasses.replace(rows, old_log_probs=now)
            if distills:
                here = jax.tree.map(microbatch.take, lesson)
                rows = distillation.advised(config, rows, here) if on_policy else rows
            selected = microbatch.take(chosen)
            value, metrics = losses.policy_objective(
                algorithm, log_probs, unpack(found.entropies), rows, selected, denominators
            )
            if distills:
                of_listed = distillation.of_listed(config, microbatch, found)
                of_listed = jax.tree.map(unpack, of_listed)
                divergence, of_teachers = distillation.objective(
                    config, log_probs, here, of_listed, denominators, taught
                )
                value, metrics = value + divergence, {**metrics, **of_teachers}
            seen = microbatch.put(jnp.zeros_like(batch.old_log_probs), now)
            extra, of_routers = routing.penalty(config.router, routed, batch.response_mask)
            return value + extra, {**metrics, **of_routers, "log_probs": seen}

        of_batch = packed, reader, loss, compute_dtype, "actor", max_kl
        whole = functools.partial(lora.joined, base)
        role, found = take_update(
            role, config.trainer.optimizer, config.num_updates, *of_batch, whole
        )
        # An entropy that was not computed is left out, not zero.
        unseen = {"log_probs", *(["actor/entropy"] if entropy == "none" else [])}
        role, metrics = after_routers(config.router, models.policy.shape, role, found, "actor")
        metrics = {name: value for name, value in metrics.items() if name not in unseen}
        if on_policy:
            metrics |= corrections.engine_gap(
                found["log_probs"], batch.rollout_log_probs, batch.response_mask
            )
        return role, metrics

    def critic_update(
        role: Trainable, batch: Minibatch, packed: PackedBatch, old, returns, prefix: str
    ):
        denominators = minibatch_denominators(batch.loss_mask, scale)

        def told(microbatch: Microbatch):
            whole = routing.told(config.router, microbatch, batch.response_mask)
            return dataclasses.replace(whole, given=None)  # the routes are the policy's

        reader = Reader(models.value, batch.tokens, told)

        def loss(params: Params, microbatch: Microbatch):
            of_rows = batch.tokens, microbatch, told(microbatch)
            values, routed = token_values(models.value, params, *of_rows)
            values = microbatch.unpacked(values, batch.lengths, batch.tokens.shape[1])
            before, wanted, mask = map(microbatch.take, (old, returns, batch.loss_mask))
            value, metrics = losses.value_loss(
                algorithm, values, before, wanted, mask, denominators, prefix
            )
            extra, _ = routing.penalty(config.router, routed, batch.response_mask)
            return value + extra, metrics

        of_batch = packed, reader, loss, compute_dtype, prefix
        return take_update(role, config.critic.optimizer, config.num_updates, *of_batch)

    def update(
        learners: dict[str, Trainable],
        base: Params,
        batch: Minibatch,
        packed: PackedBatch,
        key: jax.Array,
        *,
        train_policy: bool,
    ):
        here = packed.chosen[:, None]
        batch = dataclasses.replace(
            batch, loss_mask=batch.loss_mask & here, response_mask=batch.response_mask & here
        )
        if algorithm.mask_truncated:  # such responses count in the losses of routers neither
            kept = batch.loss_mask.any(1, keepdims=True)
            batch = dataclasses.replace(batch, response_mask=batch.response_mask & kept)
        of_critics = {
            "critic": (batch.values, batch.returns),
            "cost_critic": (batch.cost_values, batch.cost_returns),
        }
        after, metrics = dict(learners), dict[str, Array]()
        for name, targets in of_critics.items():
            if name in learners:
                after[name], found = critic_update(learners[name], batch, packed, *targets, name)
                metrics |= found
        if train_policy and "policy" in learners:
            after["policy"], found = policy_update(learners["policy"], base, batch, packed, key)
            metrics |= found
        return after, metrics

    critics = {"critic": state.critic, "cost_critic": state.cost_critic}
    homes = {"policy": models.meshes["policy"]}
    homes |= {name: models.meshes["critic"] for name, role in critics.items() if role.params}
    made = Updater(config, models, base, homes, {}, meanwhile)

    def on(mesh: Mesh):
        return jax.jit(
            update,
            static_argnames="train_policy",
            donate_argnums=0,
            out_shardings=(
                jax.tree.map(lambda a: pools.in_use(a.sharding), made.learners(state, mesh)),
                mesh_lib.replicated(mesh),
            ),
        )

    programs = {mesh: on(mesh) for mesh in dict.fromkeys(homes.values())}
    return dataclasses.replace(made, programs=programs)
