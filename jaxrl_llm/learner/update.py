"""The optimizer updates of a step: gradients over microbatches, then the optimizer.

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
from jaxrl_llm.learner import distillation, optimizer, router_replay
from jaxrl_llm.learner import gradients as gradients_lib
from jaxrl_llm.learner.batches import UpdateOrder, minibatches, padding_share, proximal_shares
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.predict import ForwardSpec, is_on_policy, scores_policy
from jaxrl_llm.learner.vision import trainable_encoder
from jaxrl_llm.learner.weights import LearnerState, Trainable
from jaxrl_llm.metrics import statistics
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models import flops, heads, lora
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.packing import packed_batch
from jaxrl_llm.packing import token_fields as token_fields_lib
from jaxrl_llm.packing.packed_batch import Microbatch, PackedBatch
from jaxrl_llm.sharding import device_pools, multihost
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Minibatch, Rollouts

Metrics = Mapping[str, Float[Array, ""]]


def optimizer_step(
    role: Trainable,
    config: OptimizerConfig,
    num_updates: int,
    packed: PackedBatch,
    forward: ForwardSpec,
    loss: gradients_lib.MicrobatchLoss,
    compute_dtype: str,
    prefix: str,
    max_kl: float = math.inf,
    merge_params: Callable[[Params], Params] = lambda params: params,
) -> tuple[Trainable, Metrics]:
    """The role after one optimizer update on a batch, and the metrics of the update.

    The program skips the update, and counts it in `PREFIX/skipped_updates`, if its loss or
    gradient, or a parameter or moment after it, is not finite, or its `actor/ppo_kl` is above
    `max_kl`. Gradients have the dtype of their backward pass; sums over microbatches are float32.

    Args:
      role: The trained model. Its parameters and optimizer state are replaced.
      num_updates: Updates of the whole run, for the learning rate schedule.
      forward: The network with the inputs that pipeline stages and the vision tower need.
      loss: The loss of one microbatch, by its parameters.
      prefix: Of the metrics' names.
      merge_params: Adds the frozen parameters to the trained ones.
    """

    point = optimizer.gradient_point(config, role.params, role.opt_state)
    (loss_value, metrics), gradients = gradients_lib.loss_and_gradients(
        forward, merge_params, point, packed, loss, compute_dtype
    )
    is_allowed = jnp.isfinite(loss_value) & ~(metrics.get("actor/ppo_kl", jnp.zeros(())) > max_kl)
    tower_rate = 0.0 if forward.vision_encoder is None else forward.vision_encoder.learning_rate
    params, opt_state, norm, skipped = optimizer.apply_if_finite(
        optimizer.make_optimizer(config, num_updates, tower_rate),
        gradients,
        role.opt_state,
        role.params,
        is_allowed,
        check_results=optimizer.may_overflow(config, num_updates, tower_rate),
    )
    role = Trainable(params, opt_state, role.num_updates + ~skipped)
    return role, {
        **metrics,
        **optimizer.module_norms(gradients, f"{prefix}/grad_norm"),
        f"{prefix}/loss": loss_value,
        f"{prefix}/grad_norm": norm,
        f"{prefix}/skipped_updates": skipped.astype(jnp.float32),
    }


def with_router_update(
    router: RouterLossConfig,
    shape: Architecture,
    role: Trainable,
    update_metrics: Mapping[str, Any],
    prefix: str,
) -> tuple[Trainable, Metrics]:
    """The role after `optimizer_step` with its selection biases moved, and metrics of the routers.

    Both are computed from the sums "routers" of the loss (`router_replay.router_loss`), if it has
    any.
    """
    metrics = {name: value for name, value in update_metrics.items() if name != "routers"}
    router_sums: Any = update_metrics.get("routers")
    if not router_sums:
        return role, metrics
    skipped = update_metrics[f"{prefix}/skipped_updates"] > 0
    params = router_replay.with_balanced_biases(
        router, shape, role.params, router_sums[0].load, skipped
    )
    role = dataclasses.replace(role, params=params)
    return role, {**metrics, **router_replay.router_metrics(router, router_sums)}


@dataclasses.dataclass(frozen=True)
class Updater:
    """The updates of a step, for every learner of a run.

    A program is `(learners, base_params, batch, packed, key, *, train_policy) -> (learners,
    router_metrics)`, jitted, for the learners of one mesh, by name.
    """

    config: RLConfig
    models: Models
    base_params: Params  # the frozen parameters under the policy's adapters; empty without adapters
    # mesh of each learner of the run: "policy", "critic", "cost_critic"
    meshes_by_role: Mapping[str, Mesh]
    programs: Mapping[Mesh, Any]
    # Called with the pending results of each update, before anything waits for them.
    on_wait: Callable[[Any], None] = lambda pending: None
    wait_compiled: Callable[[], None] = lambda: None  # waits until the programs are compiled

    @property
    def program(self) -> Any:
        """The program of the policy's mesh."""
        return self.programs[self.meshes_by_role["policy"]]

    def __call__(
        self,
        step: int,
        state: LearnerState,
        rollouts: Rollouts,
        batch: Minibatch,
        order: UpdateOrder,
        clock: Clock,
    ) -> tuple[LearnerState, dict[str, float]]:
        """The state after the updates of step `step` (from 1), and their mean metrics.

        Consumes the old state; times `update`. In the first `critic_warmup_steps` steps only the
        critics learn. `order` has the sequences of each update, see `batches.update_order`.
        """
        packer = self.models.packer
        train_policy = step > self.config.algorithm.critic_warmup_steps
        update_metrics: list[dict[str, Any]] = []
        with clock("update") as watch:
            self.wait_compiled()
            if self.config.algorithm.old_log_probs == "interpolate":
                shares = jnp.asarray(proximal_shares(rollouts, step - 1))
                batch = dataclasses.replace(batch, proximal_shares=shares)
            # The copies for other meshes are dispatched before any update. Later, the policy's
            # devices would make them only after the updates queued before, and critics would wait.
            batch_by_mesh, token_fields = self.replicate_batch(batch), _token_fields(rollouts)
            if (gallery := self.models.image_feature_cache) is not None:
                token_fields |= gallery.rollout_token_fields(rollouts)
            for packed, update_key in minibatches(packer, rollouts, order):
                if token_fields:
                    packed = token_fields_lib.with_fields(
                        packed, self.meshes_by_role["policy"], **token_fields
                    )
                if gallery is not None and gallery.is_trainable:
                    packed = gallery.with_rollout_images(packed, rollouts)
                state, metrics = self.update(
                    state, batch_by_mesh, packed, update_key, train_policy=train_policy
                )
                balance = statistics.balance_metrics(
                    rollouts.lengths, packer.sequences_by_device(packed)
                )
                # One update behind: the next one is dispatched already and keeps devices busy.
                if update_metrics:
                    self.on_wait(update_metrics[-1])
                update_metrics.append({**watch(metrics), **balance})
            self.on_wait(update_metrics[-1])
            means = statistics.mean_metrics(update_metrics)
            if jax.process_count() > 1:
                multihost.assert_equal(f"step {step}", {"the learner state": state})
        return state, means

    def flops(self, lengths: Int[np.ndarray, " B"]) -> float:
        """FLOPs of a step's updates; the policy's are counted while only critics learn, too."""
        policy_shape, value_shape = self.models.policy.shape, self.models.value.shape
        num_critics = len(self.meshes_by_role) - 1
        total = num_critics * flops.training(value_shape, lengths, num_labels=1)
        total += flops.training(policy_shape, lengths, frozen=bool(self.base_params))
        return total * self.config.trainer.epochs

    def learners(self, state: LearnerState, mesh: Mesh) -> dict[str, Trainable]:
        """The learners of a mesh by name, as its program takes them."""
        return {
            name: getattr(state, name) for name, home in self.meshes_by_role.items() if home == mesh
        }

    def replicate_batch(self, batch: Minibatch) -> Mapping[Mesh, Minibatch]:
        """All sequences of a step, replicated on each mesh that has learners."""
        return {mesh: device_pools.replicate_on_pool(batch, mesh) for mesh in self.programs}

    def update(
        self,
        state: LearnerState,
        batch: Mapping[Mesh, Minibatch],
        packed: PackedBatch,
        key: jax.Array,
        *,
        train_policy: bool = True,
    ) -> tuple[LearnerState, Metrics]:
        """The state after one update, which consumes the old one, and its metrics.

        `batch` is the result of `replicate_batch`; `packed` has those of its sequences that make
        this minibatch.
        """
        metrics: dict[str, Any] = {}
        on_host = "optimizer" in self.config.mesh.on_host
        # Each call only dispatches: programs of different devices run at the same time.
        for mesh, program in self.programs.items():
            learners: dict[str, Any] = self.learners(state, mesh)
            base = self.base_params if "policy" in learners else {}
            mesh_packed = (
                packed if "policy" in learners else token_fields_lib.without_fields(packed)
            )
            if on_host:
                learners = _with_moved_optimizers(device_pools.to_device_memory, learners)
            with jax.set_mesh(mesh):
                step_inputs = device_pools.localize_inputs((batch[mesh], mesh_packed, key), mesh)
                learners, mesh_metrics = program(
                    learners, base, *step_inputs, train_policy=train_policy
                )
            if on_host:
                learners = _with_moved_optimizers(device_pools.to_host_memory, learners)
            state = dataclasses.replace(state, **learners)
            metrics |= mesh_metrics
        return state, {**metrics, "perf/padding_share": padding_share(packed)}


def _token_fields(rollouts: Rollouts) -> dict[str, np.ndarray]:
    """The per-token fields [B, T, _] that packed rows have beside tokens, by name."""
    routes, lessons = rollouts.routed_experts, rollouts.teacher_log_probs
    fields = {} if routes is None else {"routes": routes}
    if rollouts.support is not None:
        fields |= {"support": rollouts.support}
    if lessons is not None:
        fields |= {"teacher_tokens": lessons.tokens, "teacher_log_probs": lessons.log_probs}
    return fields


def _with_moved_optimizers(move: Callable[[Any], Any], learners: Mapping[str, Trainable]):
    moved = lambda role: dataclasses.replace(role, opt_state=move(role.opt_state))  # noqa: E731
    return {name: moved(role) for name, role in learners.items()}


def make_updater(
    config: RLConfig,
    models: Models,
    base: Params,
    state: LearnerState,
    on_wait: Callable[[Any], None] = lambda pending: None,
) -> Updater:
    """The updates of a run, with one jitted program per mesh.

    Only shapes and shardings of `state` are read.

    Args:
      base: The frozen parameters under the policy's adapters; empty without adapters.
      on_wait: Called with the pending results of each update, before anything waits for them.
    """
    algorithm = config.algorithm
    compute_dtype = config.model.compute_dtype
    head_settings: Any = {
        "temperature": config.rollout.temperature or 1.0,
        "chunk": config.model.vocab_chunk,
    }
    distills = bool(config.distillation.teachers)
    uses_top_k = distills and config.distillation.compares_lists
    on_policy, scores = is_on_policy(config), scores_policy(config)
    entropy: heads.EntropyMode = "none" if scores else "value"
    if algorithm.entropy_coef:
        entropy = "gradient"
    max_kl = config.alerts.kl.limit if config.alerts.kl.action == "skip" else math.inf
    scale = algorithm.loss_scale or float(config.rollout.max_response_tokens)

    def policy_update(role: Trainable, base: Params, batch: Minibatch, packed: PackedBatch, key):
        num_sequences, width = batch.tokens.shape
        denominators = minibatch_denominators(batch.loss_mask, scale)
        observations = losses.observation_mask(batch.response_mask, batch.lengths)
        observation_counts = minibatch_denominators(observations, scale)
        if distills:
            teacher = distillation.MaskedTeacherLogProbs.from_packed(packed, batch)
            teacher_denominators = minibatch_denominators(teacher.mask)
            batch = (
                batch
                if on_policy
                else distillation.with_distillation_reward(config, batch, teacher)
            )
        forward = ForwardSpec(
            models.policy,
            batch.tokens,
            lambda microbatch: router_replay.router_inputs(
                config.router, microbatch, batch.response_mask
            ),
            trainable_encoder.make_vision_encoder(config, models.policy),
        )
        # The tokens that clip_cov and kl_cov select over the whole minibatch.
        selection_mask = jnp.zeros((num_sequences, width), bool)
        if algorithm.policy_loss in selection.SELECTIONS:

            def microbatch_log_probs(microbatch: Microbatch):
                outputs = forward.run(lora.combine_params(base, role.params), microbatch)
                token_stats = outputs.token_statistics(entropy="none", **head_settings)
                return microbatch.to_sequences(token_stats.log_probs, batch.lengths, width)

            staged = forward.with_stage_outputs(lora.combine_params(base, role.params), packed)
            log_probs_before = packed_batch.map_to_sequences(
                staged, microbatch_log_probs, num_sequences, width
            )
            selection_mask = selection.select(algorithm, log_probs_before, batch, key)

        def loss(params: Params, microbatch: Microbatch):
            outputs = forward.run(lora.combine_params(base, params), microbatch)
            listed = microbatch.teacher_tokens if uses_top_k else None
            token_stats = outputs.token_statistics(entropy=entropy, listed=listed, **head_settings)
            unpack = functools.partial(microbatch.to_sequences, lengths=batch.lengths, width=width)
            log_probs = unpack(token_stats.log_probs)
            rows = jax.tree.map(microbatch.take, batch)
            detached = jax.lax.stop_gradient(log_probs)
            # In a step of one update the old policy is this one: its log-probs are the old ones,
            # without a gradient, and a pass over the step is saved (`predict.is_on_policy`).
            if on_policy:
                rows = dataclasses.replace(rows, old_log_probs=detached)
            elif algorithm.old_log_probs == "interpolate":
                old = corrections.interpolated_log_probs(
                    rows.rollout_log_probs, log_probs, rows.proximal_shares
                )
                correction_weights = corrections.interpolated_weights(
                    algorithm, old, rows.rollout_log_probs, rows.response_mask
                )
                rows = dataclasses.replace(
                    rows, old_log_probs=old, correction_weights=correction_weights
                )
            if distills:
                teacher_rows = jax.tree.map(microbatch.take, teacher)
                rows = (
                    distillation.with_distillation_reward(config, rows, teacher_rows)
                    if on_policy
                    else rows
                )
            selected = microbatch.take(selection_mask)
            loss_value, metrics = losses.policy_objective(
                algorithm, log_probs, unpack(token_stats.entropies), rows, selected, denominators
            )
            if distills:
                top_k_terms = distillation.top_k_divergence(config, microbatch, token_stats)
                top_k_terms = jax.tree.map(unpack, top_k_terms)
                divergence, teacher_metrics = distillation.distillation_loss(
                    config,
                    log_probs,
                    teacher_rows,
                    top_k_terms,
                    denominators,
                    teacher_denominators,
                )
                loss_value, metrics = loss_value + divergence, {**metrics, **teacher_metrics}
            if algorithm.observation_coef:
                observation_loss, observation_metrics = losses.observation_loss(
                    algorithm, log_probs, microbatch.take(observations), observation_counts
                )
                loss_value += observation_loss
                metrics = {**metrics, **observation_metrics}
            step_log_probs = microbatch.put(jnp.zeros_like(batch.old_log_probs), detached)
            router_loss, router_sums = router_replay.router_loss(
                config.router, outputs.routed, batch.response_mask
            )
            metrics = {**metrics, **router_sums, "log_probs": step_log_probs}
            return loss_value + router_loss, metrics

        role, update_metrics = optimizer_step(
            role,
            config.trainer.optimizer,
            config.num_updates,
            packed,
            forward,
            loss,
            compute_dtype,
            prefix="actor",
            max_kl=max_kl,
            merge_params=functools.partial(lora.combine_params, base),
        )
        # An entropy that was not computed is left out, not zero.
        dropped_names = {"log_probs", *(["actor/entropy"] if entropy == "none" else [])}
        role, metrics = with_router_update(
            config.router, models.policy.shape, role, update_metrics, "actor"
        )
        metrics = {name: value for name, value in metrics.items() if name not in dropped_names}
        if not scores:
            metrics |= corrections.engine_gap(
                update_metrics["log_probs"], batch.rollout_log_probs, batch.response_mask
            )
        return role, metrics

    def critic_update(
        role: Trainable, batch: Minibatch, packed: PackedBatch, old, returns, prefix: str
    ):
        denominators = minibatch_denominators(batch.loss_mask, scale)

        def critic_router_inputs(microbatch: Microbatch):
            policy_inputs = router_replay.router_inputs(
                config.router, microbatch, batch.response_mask
            )
            return dataclasses.replace(policy_inputs, replayed=None)  # the routes are the policy's

        forward = ForwardSpec(models.value, batch.tokens, critic_router_inputs)

        def loss(params: Params, microbatch: Microbatch):
            outputs = forward.run(params, microbatch)
            width = batch.tokens.shape[1]
            values = microbatch.to_sequences(outputs.token_values(), batch.lengths, width)
            old_values, targets, mask = map(microbatch.take, (old, returns, batch.loss_mask))
            loss_value, metrics = losses.value_loss(
                algorithm, values, old_values, targets, mask, denominators, prefix
            )
            router_loss, _ = router_replay.router_loss(
                config.router, outputs.routed, batch.response_mask
            )
            return loss_value + router_loss, metrics

        return optimizer_step(
            role,
            config.critic.optimizer,
            config.num_updates,
            packed,
            forward,
            loss,
            compute_dtype,
            prefix,
        )

    def update(
        learners: dict[str, Trainable],
        base: Params,
        batch: Minibatch,
        packed: PackedBatch,
        key: jax.Array,
        *,
        train_policy: bool,
    ):
        in_minibatch = packed.is_member[:, None]
        batch = dataclasses.replace(
            batch,
            loss_mask=batch.loss_mask & in_minibatch,
            response_mask=batch.response_mask & in_minibatch,
        )
        if algorithm.mask_truncated:  # the losses of routers leave such responses out too
            has_loss = batch.loss_mask.any(1, keepdims=True)
            batch = dataclasses.replace(batch, response_mask=batch.response_mask & has_loss)
        critic_targets = {
            "critic": (batch.values, batch.returns),
            "cost_critic": (batch.cost_values, batch.cost_returns),
        }
        updated, metrics = dict(learners), dict[str, Array]()
        for name, (old, returns) in critic_targets.items():
            if name in learners:
                updated[name], role_metrics = critic_update(
                    learners[name], batch, packed, old, returns, name
                )
                metrics |= role_metrics
        if train_policy and "policy" in learners:
            updated["policy"], role_metrics = policy_update(
                learners["policy"], base, batch, packed, key
            )
            metrics |= role_metrics
        return updated, metrics

    critics = {"critic": state.critic, "cost_critic": state.cost_critic}
    homes = {"policy": models.meshes["policy"]}
    homes |= {name: models.meshes["critic"] for name, role in critics.items() if role.params}
    without_programs = Updater(config, models, base, homes, {}, on_wait)

    def jit_update(mesh: Mesh):
        learners = without_programs.learners(state, mesh)
        return jax.jit(
            update,
            static_argnames="train_policy",
            donate_argnums=0,
            out_shardings=(
                jax.tree.map(lambda a: device_pools.device_sharding(a.sharding), learners),
                mesh_lib.replicated(mesh),
            ),
        )

    programs = {mesh: jit_update(mesh) for mesh in dict.fromkeys(homes.values())}
    return dataclasses.replace(without_programs, programs=programs)
