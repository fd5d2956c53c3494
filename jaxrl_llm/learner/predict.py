"""What the models predict for sampled tokens: log-probs, values, scores of whole sequences."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.learner import microbatches
from jaxrl_llm.learner.microbatches import Microbatch, PackedBatch
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.weights import Frozen, LearnerState
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models import heads, lora
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools, resting
from jaxrl_llm.types import Predictions, Rollouts


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
    """Returns log-probs, entropies and sums of squared probabilities; zero at unscored tokens."""
    packed = microbatch.packed(tokens)
    hidden = _hidden(network, params, packed, microbatch)
    weight = network.head_weight(params)
    settings: Any = {"temperature": temperature, "chunk": chunk, "entropy": entropy}
    if microbatch.scores_everything:
        return heads.token_statistics(hidden, weight, packed, microbatch.segment_ids, **settings)
    scored, before = microbatch.scored, microbatch.before
    return heads.chosen_statistics(hidden, weight, packed, scored, before, **settings)


def _hidden(
    network: Network, params: Params, packed: Array, microbatch: Microbatch
) -> Float[Array, "R W D"]:
    return network.hidden(
        params,
        packed,
        microbatch.positions,
        microbatch.segment_ids,
        prefix_ids=microbatch.prefix_ids,
        key_blocks=microbatch.key_blocks,
    )


def token_values(
    network: Network, params: Params, tokens: Array, microbatch: Microbatch
) -> Float[Array, "R W"]:
    """Returns the value just before each token of packed rows; zero at unscored tokens."""
    hidden = _hidden(network, params, microbatch.packed(tokens), microbatch)
    weight = network.head_weight(params)
    if microbatch.scores_everything:
        return heads.token_values(hidden, weight, microbatch.segment_ids)
    return heads.chosen_values(hidden, weight, microbatch.scored, microbatch.before)


def sequence_scores(
    network: Network, params: Params, tokens: Array, lengths: Array, microbatch: Microbatch
) -> Float[Array, " b"]:
    """Returns the score at the last token of each sequence of the microbatch."""
    hidden = _hidden(network, params, microbatch.packed(tokens), microbatch)
    last = microbatch.starts + jnp.maximum(microbatch.take(lengths), 1) - 1
    at_end = hidden[microbatch.rows, last][:, None]
    return heads.sequence_scores(at_end, network.head_weight(params), jnp.zeros_like(last))


def is_on_policy(config: RLConfig) -> bool:
    """Returns whether a step is one update that needs no log-probs of the policy before it.

    The ratio to the old policy is then 1: the update takes its own log-probs, without a gradient,
    for the old ones, which saves a pass. Not where anything before the update reads what the policy
    predicts (`needs.Needs.old_log_probs`), as alerts that may skip the update do.
    """
    algorithm, trainer = config.algorithm, config.trainer
    one_update = trainer.epochs == 1 and config.minibatch_size == config.sequences_per_step
    alerts = config.alerts.entropy.action, config.alerts.log_prob_difference.action
    reads_old = needs.of(algorithm).old_log_probs or algorithm.old_log_probs == "rollout"
    return one_update and not reads_old and "skip" not in alerts


def scoring_programs(config: RLConfig, models: Models):
    """Returns the jitted programs that ask a policy and a critic about all tokens of a step.

    `of_policy(base, params, tokens, lengths, packed, *, entropy)` gives log-probs, entropies and
    sums of squared probabilities, `of_critic(params, tokens, lengths, packed)` values, [B, T] each.
    `base` is what the adapters `params` are added to; `{}` without adapters.
    """

    @functools.partial(jax.jit, static_argnames="entropy")
    def of_policy(base, params, tokens, lengths, packed: PackedBatch, *, entropy: heads.Entropy):
        num_sequences, width = tokens.shape
        whole = lora.joined(base, params)

        def ask(microbatch: Microbatch):
            found = token_statistics(
                models.policy,
                whole,
                tokens,
                microbatch,
                temperature=config.rollout.temperature or 1.0,
                chunk=config.model.vocab_chunk,
                entropy=entropy,
            )
            return tuple(microbatch.unpacked(each, lengths, width) for each in found)

        return microbatches.by_sequence(packed, ask, num_sequences, width)

    @jax.jit
    def of_critic(params, tokens, lengths, packed: PackedBatch):
        num_sequences, width = tokens.shape

        def ask(microbatch: Microbatch):
            values = token_values(models.value, params, tokens, microbatch)
            return microbatch.unpacked(values, lengths, width)

        return microbatches.by_sequence(packed, ask, num_sequences, width)

    return of_policy, of_critic


def predictor(
    config: RLConfig, models: Models, frozen: Frozen
) -> Callable[[LearnerState, Rollouts, Clock], Predictions]:
    """Returns `predict(state, rollouts, clock) -> Predictions`, each model asked in one pass.

    With `is_on_policy` the policy is not asked; the engine's log-probs stand in its place and
    nothing reads them. Models on different devices run at the same time: all are asked before any
    answer is moved to the policy's devices. Times `old_log_prob`, `ref` and `values`.
    """
    recompute = config.algorithm.old_log_probs == "recompute"
    on_policy = is_on_policy(config)
    of_policy, of_critic = scoring_programs(config, models)
    mesh, meshes, replicated = models.mesh, models.meshes, mesh_lib.replicated(models.mesh)
    one_mesh = len({meshes[role] for role in ("policy", "reference", "critic")}) == 1
    on_host = "reference" in config.mesh.on_host

    def predict(state: LearnerState, rollouts: Rollouts, clock: Clock) -> Predictions:
        packed = models.packer.pack_rollouts(rollouts)
        tokens, lengths = rollouts.tokens, rollouts.lengths
        mask = rollouts.response_mask
        zeros = jnp.zeros(tokens.shape, jnp.float32)
        old, entropies, squares = jnp.asarray(rollouts.rollout_log_probs), zeros, zeros
        if not on_policy:
            with jax.set_mesh(mesh), clock("old_log_prob") as watch:
                policy = frozen.base, state.policy.params
                found, entropies, squares = watch(
                    of_policy(*policy, tokens, lengths, packed, entropy="value")
                )
            old = found if recompute else old
        reference = old
        if frozen.reference:
            with jax.set_mesh(meshes["reference"]), clock("ref") as watch:
                params = resting.working(frozen.reference) if on_host else frozen.reference
                reference, _, _ = watch(
                    of_policy({}, params, tokens, lengths, packed, entropy="none")
                )
        values = [zeros, zeros]
        for i, critic in enumerate((state.critic, state.cost_critic)):
            if critic.params:
                with jax.set_mesh(meshes["critic"]), clock("values") as watch:
                    values[i] = watch(of_critic(critic.params, tokens, lengths, packed))
        answers = Predictions(
            old_log_probs=old,
            ref_log_probs=reference,
            entropies=entropies,
            sum_squared_probs=squares,
            values=values[0],
            cost_values=values[1],
        )
        if not one_mesh:
            answers = pools.move(answers, replicated)
        with jax.set_mesh(mesh):
            return jax.tree.map(lambda values: jnp.where(mask, values, 0.0), answers)

    return predict


def model_scorers(models: Models, frozen: Frozen) -> dict[str, Callable[[Rollouts], np.ndarray]]:
    """Returns by name the functions that score whole sequences, [B], with reward or cost models."""

    def scorer(name: str):
        network, params = frozen.scorers[name].network, frozen.scorers[name].params
        mesh = models.meshes["reward"]

        @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
        def of_sequences(tokens, lengths, packed: PackedBatch):
            num_sequences, _ = tokens.shape

            def ask(microbatch: Microbatch):
                return sequence_scores(network, params, tokens, lengths, microbatch)[:, None]

            return microbatches.by_sequence(packed, ask, num_sequences, 1)[:, 0]

        def score(rollouts: Rollouts) -> np.ndarray:
            packed = models.packer.pack_rollouts(rollouts)
            with jax.set_mesh(mesh):
                return np.asarray(of_sequences(rollouts.tokens, rollouts.lengths, packed))

        return score

    return {name: scorer(name) for name in frozen.scorers}
