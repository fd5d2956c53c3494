"""Predictions of the models for sampled tokens: log-probs, values, scores of whole sequences."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import RLConfig
from jaxrl_llm.learner import router_replay
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.vision import trainable_encoder
from jaxrl_llm.learner.vision.trainable_encoder import TrainableVisionEncoder
from jaxrl_llm.learner.weights import FrozenModels, LearnerState, RewardModel
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models import heads, lora
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.moe.router import RouterInputs, RouterOutputs
from jaxrl_llm.models.packed_inputs import PackedInputs
from jaxrl_llm.models.pipeline import schedule
from jaxrl_llm.models.target_positions import AllTargets, SelectedTargets, TargetPositions
from jaxrl_llm.models.top_k_log_probs import top_k_log_probs
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.packing import packed_batch, token_fields
from jaxrl_llm.packing.packed_batch import Microbatch, PackedBatch
from jaxrl_llm.sharding import device_pools, kv_store_broadcast
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Predictions, Rollouts

ScoringPrograms = tuple[Any, Any]  # as `scoring_programs` returns them


@dataclasses.dataclass(frozen=True)
class ForwardSpec:
    """A network with the inputs of its forward pass over the sequences of a step."""

    network: Network
    tokens: Int[Array, "B T"]
    # Router inputs of a microbatch; None: no routes are given, all its tokens count.
    router_inputs: Callable[[Microbatch], RouterInputs | None] = lambda microbatch: None
    vision_encoder: TrainableVisionEncoder | None = (
        None  # encodes the images of batches; None: their features are known
    )

    @property
    def stages(self) -> int:
        """The network's pipeline stages."""
        return self.network.shape.stages

    def with_stage_outputs(self, params: Params, packed: PackedBatch) -> PackedBatch:
        """A batch with encoded images, and with the stage outputs if there are several stages."""
        if self.vision_encoder is not None:
            packed = self.vision_encoder.with_image_features(params, packed)
        if self.stages == 1:
            return packed
        staged = packed.to_stages(self.stages)
        outputs = self.stage_outputs(params, staged, packed.count)
        microbatches = dataclasses.replace(staged.microbatches, stage_outputs=outputs)
        return dataclasses.replace(staged, microbatches=microbatches)

    def stage_outputs(
        self, params: Params, staged: PackedBatch, count: Int[Array, ""]
    ) -> schedule.StageOutputs:
        """The stage outputs of microbatches [turns, stages, ...], of which `count` hold tokens."""

        def stage_inputs(microbatch: Microbatch):
            return microbatch.to_rows(self.tokens), self._model_inputs(microbatch)

        tokens, reading = jax.vmap(mesh_lib.vmap_over_stages(stage_inputs))(staged.microbatches)
        return schedule.run_stages(
            self.network, params, tokens, reading, count, staged.image_features
        )

    def run(self, params: Params, microbatch: Microbatch) -> "ForwardOutputs":
        """The forward pass over a microbatch of `with_stage_outputs`."""
        network, tokens = self.network, microbatch.to_rows(self.tokens)
        inputs = self._model_inputs(microbatch)
        if self.stages > 1:
            hidden, routed = schedule.run_after_stages(
                network, params, microbatch.stage_outputs, inputs
            )
        else:
            hidden, routed = network.forward(params, tokens, *inputs)
        weight = network.head_weight(params)
        return ForwardOutputs(network, tokens, hidden, weight, routed, microbatch)

    def _model_inputs(self, microbatch: Microbatch) -> PackedInputs:
        """The inputs of a forward pass beside the tokens."""
        sights = None
        if microbatch.mrope_positions.shape[-1]:
            sights = ImageInputs(
                microbatch.mrope_positions,
                microbatch.image_index[..., 0],
                microbatch.image_features,
            )
        return PackedInputs(
            microbatch.positions,
            microbatch.segment_ids,
            microbatch.prefix_ids,
            microbatch.key_blocks,
            self.router_inputs(microbatch) or RouterInputs(microbatch.segment_ids != 0),
            sights,
        )


class ForwardOutputs(NamedTuple):
    """The result of a forward pass over packed rows, and the outputs of the network's head."""

    network: Network
    tokens: Int[Array, "R W"]
    hidden: Float[Array, "R W D"]
    head_weight: Float[Array, "_ D"]
    routed: RouterOutputs | None  # None without experts
    microbatch: Microbatch

    @property
    def _targets(self) -> TargetPositions:
        """The positions of the tokens to score: all, or the columns that the microbatch lists."""
        rows = self.microbatch
        if rows.scores_everything:
            return AllTargets(rows.segment_ids)
        width = rows.segment_ids.shape[1]
        return SelectedTargets(rows.scored_columns, rows.previous_columns, width)

    def token_statistics(self, **settings: Any) -> heads.TokenStatistics:
        """Log-probs and entropies of tokens in packed rows [R, W]; zero at unscored tokens.

        They are of the distribution over the support of each token, where the microbatch has one.
        `settings` are those of `heads.token_statistics`.
        """
        support = self.microbatch.support
        return heads.token_statistics(
            self.hidden,
            self.head_weight,
            self.tokens,
            self._targets,
            cap=self.network.shape.logit_cap,
            suppressed=self.network.suppressed_tokens,
            support=support if support.shape[-1] else None,
            **settings,
        )

    def token_top_k(
        self, count: int, **settings: Any
    ) -> tuple[Int[Array, "R W k"], Float[Array, "R W k"]]:
        """The `count` likeliest tokens at each scored token of packed rows, and their log-probs.

        Both are zero at unscored tokens; `settings` are those of `top_k_log_probs`.
        """
        settings |= {
            "cap": self.network.shape.logit_cap,
            "suppressed": self.network.suppressed_tokens,
        }
        return top_k_log_probs(self.hidden, self.head_weight, self._targets, count, **settings)

    def token_values(self) -> Float[Array, "R W"]:
        """The value just before each token of packed rows; zero at unscored tokens."""
        return heads.token_values(self.hidden, self.head_weight, self._targets)

    def sequence_scores(self, lengths: Int[Array, " B"]) -> Float[Array, " b"]:
        """The score at the last token of each sequence of the microbatch."""
        rows = self.microbatch
        last = rows.starts + jnp.maximum(rows.take(lengths), 1) - 1
        last_hidden = self.hidden[rows.rows, last][:, None]
        return heads.sequence_scores(last_hidden, self.head_weight, jnp.zeros_like(last))


def scores_policy(config: RLConfig) -> bool:
    """Whether the policy runs over a step before its updates."""
    interpolates = config.algorithm.old_log_probs == "interpolate"
    return not is_on_policy(config) and not interpolates


def is_on_policy(config: RLConfig) -> bool:
    """Whether a step is one update that needs no log-probs of the policy before it.

    The ratio to the old policy is then 1: the update takes its own log-probs, without a gradient,
    for the old ones, which saves a pass. False if samples may be of older weights, or if anything
    before the update reads the policy's predictions: an algorithm
    (`requirements.Requirements.old_log_probs`), or an alert that may skip the update.
    """
    algorithm, trainer = config.algorithm, config.trainer
    one_update = trainer.epochs == 1 and config.minibatch_size == config.sequences_per_step
    alerts = config.alerts.entropy.action, config.alerts.log_prob_difference.action
    reads_old = (
        requirements.requirements(algorithm).old_log_probs or algorithm.old_log_probs != "recompute"
    )
    fresh = not config.max_staleness
    return fresh and one_update and not reads_old and "skip" not in alerts


def scoring_programs(config: RLConfig, models: Models) -> ScoringPrograms:
    """The jitted forward passes of policy and critic over all tokens of a step.

    `of_policy(base_params, params, tokens, lengths, to_rows, *, entropy, records)` gives log-probs,
    entropies and sums of squared probabilities, `of_critic(params, tokens, lengths, to_rows)`
    values, [B, T] each. `base_params` has the frozen parameters under the adapters `params`; `{}`
    without adapters. Routers follow the routes of `to_rows`, if it has any. With `records` the
    experts that packed tokens visited are the second of two results, [M, R, W, routes].
    """
    vision_encoder = trainable_encoder.make_vision_encoder(config, models.policy)

    # Profiles show a program by its function's name; `viewer/timeline.py` finds scoring by `of_`.
    @functools.partial(jax.jit, static_argnames=("entropy", "records"))
    def of_policy(
        base,
        params,
        tokens,
        lengths,
        packed: PackedBatch,
        *,
        entropy: heads.EntropyMode,
        records: bool = False,
    ):
        all_params = lora.combine_params(base, params)

        def router_inputs(microbatch: Microbatch) -> RouterInputs | None:
            has_routes = bool(microbatch.routes.shape[-1])
            return (
                RouterInputs(microbatch.segment_ids != 0, microbatch.routes) if has_routes else None
            )

        forward = ForwardSpec(models.policy, tokens, router_inputs, vision_encoder)

        def score(microbatch: Microbatch):
            outputs = forward.run(all_params, microbatch)
            statistics = outputs.token_statistics(
                temperature=config.rollout.temperature or 1.0,
                chunk=config.model.vocab_chunk,
                entropy=entropy,
            )
            per_token = statistics[:3]
            unpacked = (
                microbatch.to_sequences(each, lengths, tokens.shape[1]) for each in per_token
            )
            routes: Any = ()
            if records:
                assert outputs.routed is not None
                routes = models.policy.flatten_routes(outputs.routed.chosen)
            return tuple(unpacked), routes

        packed = forward.with_stage_outputs(all_params, packed)
        scores, packed_routes = packed_batch.map_to_sequences_and_rows(packed, score, *tokens.shape)
        return (scores, packed_routes) if records else scores

    @jax.jit
    def of_critic(params, tokens, lengths, packed: PackedBatch):
        forward = ForwardSpec(models.value, tokens)

        def score(microbatch: Microbatch):
            values = forward.run(params, microbatch).token_values()
            return microbatch.to_sequences(values, lengths, tokens.shape[1])

        packed = forward.with_stage_outputs(params, packed)
        return packed_batch.map_to_sequences(packed, score, *tokens.shape)

    return of_policy, of_critic


def scoring_lowerings(
    models: Models, programs: ScoringPrograms, base: Params, state: LearnerState, reference: Params
) -> dict[str, Callable[..., jax.stages.Lowered]]:
    """Functions that lower the `scoring_programs` of every model that has parameters, by name.

    Each takes tokens [B, T], lengths [B] and the packed batch of a step, or their shapes; of
    parameters only shapes and shardings are read. Programs with routes or images are not among
    them.
    """
    of_policy, of_critic = programs

    def lower(role: str, program: Any, params: Sequence[Params], choices: Any, *batch: Any):
        with jax.set_mesh(models.meshes[role]):
            return program.lower(*params, *batch, **choices)

    policy, critic = state.policy.params, state.critic.params
    policy_choices = {"entropy": "value", "records": False}
    arguments: dict[str, tuple[str, Any, Sequence[Params], Mapping[str, Any]]] = {
        "log-probs": ("policy", of_policy, (base, policy), policy_choices),
        "reference": ("reference", of_policy, ({}, reference), {"entropy": "none"}),
        "values": ("critic", of_critic, (critic,), {}),
    }
    return {
        name: functools.partial(lower, *each) for name, each in arguments.items() if each[2][-1]
    }


def predictor(
    config: RLConfig,
    models: Models,
    frozen: FrozenModels,
    programs: ScoringPrograms | None = None,
    wait_compiled: Callable[[], None] = lambda: None,
) -> Callable[[LearnerState, Rollouts, Clock], tuple[Predictions, Rollouts]]:
    """The function that runs every model over a step; it times `old_log_prob`, `ref` and `values`.

    It returns the rollouts too, with the routes that the update is to follow: those of the engine,
    or with `router.replay="scoring"` those of this pass. Without `scores_policy` the policy does
    not run; the engine's log-probs stand in its place. Models on different devices run at the same
    time: all are dispatched before any result is moved to the policy's devices.

    Args:
      programs: The `scoring_programs`, if they are made already.
      wait_compiled: Waits until they are compiled.
    """
    of_policy, of_critic = programs or scoring_programs(config, models)
    mesh, meshes, scores = models.mesh, models.meshes, scores_policy(config)
    one_mesh = len({meshes[role] for role in ("policy", "reference", "critic")}) == 1
    replay = config.router.replay

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
    def of_response(mask, predictions: Predictions) -> Predictions:
        return jax.tree.map(lambda a: jnp.where(mask, a, 0.0), predictions)

    def predict(state: LearnerState, rollouts: Rollouts, clock: Clock):
        router_replay.check_routes(config.router, rollouts)
        wait_compiled()
        packed = models.packer.pack_rollouts(rollouts)
        if models.image_feature_cache is not None:
            packed = token_fields.with_fields(
                packed, mesh, **models.image_feature_cache.rollout_token_fields(rollouts)
            )
            if models.image_feature_cache.is_trainable:
                packed = models.image_feature_cache.with_rollout_images(packed, rollouts)

        def with_support(mesh: Mesh) -> PackedBatch:
            if rollouts.support is None:
                return packed
            return token_fields.with_fields(packed, mesh, support=rollouts.support)

        batch = rollouts.tokens, rollouts.lengths
        zeros = jnp.zeros(rollouts.tokens.shape, jnp.float32)
        old, entropies, squares = jnp.asarray(rollouts.rollout_log_probs), zeros, zeros
        if scores:
            with jax.set_mesh(mesh), clock("old_log_prob") as watch:
                policy_packed = with_support(mesh)
                if replay == "rollout" and rollouts.routed_experts is not None:
                    policy_packed = token_fields.with_fields(
                        policy_packed, mesh, routes=rollouts.routed_experts
                    )
                records = replay == "scoring"
                policy_outputs: Any = watch(
                    of_policy(
                        frozen.base_params,
                        state.policy.params,
                        *batch,
                        policy_packed,
                        entropy="value",
                        records=records,
                    )
                )
            if records:
                policy_outputs, packed_routes = policy_outputs
                routes = token_fields.fields_by_sequence(
                    packed, packed_routes, rollouts.lengths, rollouts.tokens.shape[1]
                )
                rollouts = dataclasses.replace(rollouts, routed_experts=routes)
            log_probs, entropies, squares = policy_outputs
            old = log_probs if config.algorithm.old_log_probs == "recompute" else old
        reference = old
        if frozen.reference:
            with jax.set_mesh(meshes["reference"]), clock("ref") as watch:
                params = frozen.reference
                if "reference" in config.mesh.on_host:
                    params = device_pools.to_device_memory(params)
                reference_packed = with_support(meshes["reference"])
                reference, _, _ = watch(
                    of_policy({}, params, *batch, reference_packed, entropy="none")
                )
        values = [zeros, zeros]
        for i, critic in enumerate((state.critic, state.cost_critic)):
            if critic.params:
                with jax.set_mesh(meshes["critic"]), clock("values") as watch:
                    values[i] = watch(of_critic(critic.params, *batch, packed))
        predictions = Predictions(
            old_log_probs=old,
            ref_log_probs=reference,
            entropies=entropies,
            sum_squared_probs=squares,
            values=values[0],
            cost_values=values[1],
        )
        if not one_mesh:
            predictions = device_pools.move_to_pool(predictions, mesh_lib.replicated(mesh))
        with jax.set_mesh(mesh):
            predictions = device_pools.localize_inputs(predictions, mesh)
            return of_response(rollouts.response_mask, predictions), rollouts

    return predict


def model_scorers(
    models: Models, frozen: FrozenModels
) -> dict[str, Callable[[Rollouts], np.ndarray]]:
    """The functions that score whole sequences [B] with reward or cost models, by model name."""
    mesh = models.meshes["reward"]

    def scorer(reward_model: RewardModel):
        @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
        def of_sequences(tokens, lengths, packed: PackedBatch):
            forward = ForwardSpec(reward_model.network, tokens)

            def microbatch_scores(microbatch: Microbatch):
                return forward.run(reward_model.params, microbatch).sequence_scores(lengths)[
                    :, None
                ]

            packed = forward.with_stage_outputs(reward_model.params, packed)
            return packed_batch.map_to_sequences(packed, microbatch_scores, len(tokens), 1)[:, 0]

        def score(rollouts: Rollouts) -> np.ndarray:
            packed = models.packer.pack_rollouts(rollouts)
            with jax.set_mesh(mesh):
                return kv_store_broadcast.device_get(
                    of_sequences(rollouts.tokens, rollouts.lengths, packed)
                )

        return score

    return {name: scorer(model) for name, model in frozen.scorers.items()}
