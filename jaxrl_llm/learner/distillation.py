"""On-policy distillation: teachers' log-probs of sampled tokens, and the losses on them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.aggregation import (
    Denominators,
    LossAndMetrics,
    aggregate,
    token_mean,
)
from jaxrl_llm.algorithms.distillation import (
    forward_kl,
    jensen_shannon,
    reverse_kl_rewards,
)
from jaxrl_llm.algorithms.kl import estimated_kl
from jaxrl_llm.algorithms.masked import zero_outside
from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.learner import predict
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.weights import FrozenModels, TeacherModel
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models.heads import TokenStatistics
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.packing import packed_batch, token_fields
from jaxrl_llm.packing.packed_batch import Microbatch, PackedBatch
from jaxrl_llm.types import Minibatch, Rollouts, TeacherLogProbs

Metrics = dict[str, Float[Array, ""]]


def check_teachers(config: RLConfig, models: Models) -> None:
    """Raises ConfigError for a teacher whose vocabulary differs from the policy's."""
    policy_vocab, problems = models.tokenizer.get_vocab(), []
    for name, teacher in config.distillation.teachers.items():
        tokenizer, shape = load_tokenizer(teacher.path), checkpoint.read_architecture(teacher.path)
        checkpoint.check_vocabulary(shape, tokenizer)
        teacher_vocab = tokenizer.get_vocab()
        if teacher_vocab == policy_vocab:
            continue
        differing = set(policy_vocab.items()) ^ set(teacher_vocab.items())
        token, number = min(differing, key=lambda item: item[1])
        owner = "policy" if policy_vocab.get(token) == number else "teacher"
        problems.append(
            f"config.distillation.teachers.{name}.path: {teacher.path} has another vocabulary:"
            f" {len(teacher_vocab)} tokens, the policy has {len(policy_vocab)}, and {token!r} is"
            f" token {number} of the {owner} alone; use a teacher with the policy's tokenizer"
        )
    settings, num_tokens = config.distillation, len(policy_vocab)
    if settings.teachers and settings.num_listed > num_tokens:
        problems.append(
            f"config.distillation.top_k: {settings.top_k}, but there are {num_tokens} tokens; use"
            " less"
        )
    if problems:
        raise ConfigError(problems)


def token_field_widths(config: RLConfig) -> dict[str, int]:
    """Widths of the per-token fields of teacher log-probs; see `packing/token_fields.py`."""
    settings = config.distillation
    if not settings.teachers:
        return {}
    return dict.fromkeys(("teacher_tokens", "teacher_log_probs"), settings.num_listed)


def scoring_program(config: RLConfig, models: Models, teacher: TeacherModel) -> Any:
    """The jitted `(params, tokens, to_rows) -> (tokens, log_probs)` of a teacher.

    Both are [M, R, W, k], as `types.TeacherLogProbs`, at the scored tokens of packed rows.
    """
    settings, network = config.distillation, teacher.network
    head_settings: Any = {
        "temperature": config.rollout.temperature or 1.0,
        "chunk": config.model.vocab_chunk,
    }
    shared_vocab = min(network.shape.vocab_size, models.policy.shape.vocab_size)

    @jax.jit
    def of_teacher(params, tokens, packed: PackedBatch):
        forward = predict.ForwardSpec(network, tokens)

        def score(microbatch: Microbatch):
            outputs = forward.run(params, microbatch)
            if settings.compares_lists:
                return (), outputs.token_top_k(settings.top_k, limit=shared_vocab, **head_settings)
            statistics = outputs.token_statistics(entropy="none", **head_settings)
            return (), (outputs.tokens[..., None], statistics.log_probs[..., None])

        packed = forward.with_stage_outputs(params, packed)
        return packed_batch.map_to_sequences_and_rows(packed, score, *tokens.shape)[1]

    return of_teacher


def teacher_scorer(
    config: RLConfig, models: Models, frozen: FrozenModels
) -> Callable[[Rollouts, Clock], Rollouts]:
    """The function that adds the teachers' lessons to rollouts; it times `teacher`.

    Each teacher reads the whole step if a row is its own, as reward models do. A run without
    teachers leaves rollouts as they are.
    """
    settings, mesh = config.distillation, models.meshes["reward"]
    programs = {
        name: scoring_program(config, models, teacher) for name, teacher in frozen.teachers.items()
    }

    def teach(rollouts: Rollouts, clock: Clock) -> Rollouts:
        if not programs:
            return rollouts
        packed = models.packer.pack_rollouts(rollouts)
        sources = [rollouts.prompts[group].data_source for group in rollouts.group_ids]
        teacher_names = np.array([settings.teacher_for(source) for source in sources])
        shape = *rollouts.tokens.shape, settings.num_listed
        tokens, log_probs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for name, program in programs.items():
            teacher = frozen.teachers[name]
            own = rollouts.response_mask & (teacher_names == name)[:, None]
            own &= rollouts.tokens < teacher.network.shape.vocab_size
            if not own.any():
                continue
            with jax.set_mesh(mesh), clock("teacher") as watch:
                packed_scores = watch(program(teacher.params, rollouts.tokens, packed))
            scores = [
                token_fields.fields_by_sequence(
                    packed, each, rollouts.lengths, rollouts.tokens.shape[1]
                )
                for each in packed_scores
            ]
            tokens, log_probs = (
                np.where(own[..., None], new, old)
                for new, old in zip(scores, (tokens, log_probs), strict=True)
            )
        return dataclasses.replace(rollouts, teacher_log_probs=TeacherLogProbs(tokens, log_probs))

    return teach


class MaskedTeacherLogProbs(NamedTuple):
    """A teacher's log-probs of the sampled tokens of sequences."""

    mask: Bool[Array, "B T"]  # the teacher has read this token, which bears loss
    log_probs: Float[Array, "B T"]  # of the token; of lists the teacher's likeliest

    @classmethod
    def from_packed(cls, packed: PackedBatch, batch: Minibatch) -> "MaskedTeacherLogProbs":
        """The log-probs of a minibatch, from the fields of its packed rows."""

        def unpacked(microbatch: Microbatch):
            first = microbatch.teacher_tokens[..., 0] >= 0, microbatch.teacher_log_probs[..., 0]
            return tuple(
                microbatch.to_sequences(x, batch.lengths, batch.tokens.shape[1]) for x in first
            )

        mask, log_probs = packed_batch.map_to_sequences(packed, unpacked, *batch.tokens.shape)
        mask = (mask != 0) & batch.loss_mask
        return cls(mask, jnp.where(mask, log_probs, 0.0))


def with_distillation_reward(
    config: RLConfig, rows: Minibatch, lesson: MaskedTeacherLogProbs
) -> Minibatch:
    """Sequences with the reverse KL added to their advantages, if that is the loss.

    `advantages += coef * reverse_kl_rewards`, after the estimator and its normalization. The KL is
    of `old_log_probs`, those of the policy that sampled.
    """
    if config.distillation.loss != "reverse_kl":
        return rows
    kl_rewards = reverse_kl_rewards(lesson.log_probs, rows.old_log_probs)
    kl_rewards = jnp.where(lesson.mask, config.distillation.coef * kl_rewards, 0.0)
    return dataclasses.replace(rows, advantages=rows.advantages + kl_rewards)


def top_k_divergence(
    config: RLConfig, microbatch: Microbatch, statistics: TokenStatistics
) -> dict[str, Float[Array, "R W"]]:
    """The divergence and probability masses over a teacher's top k tokens, by metric name."""
    settings = config.distillation
    if not settings.compares_lists:
        return {}
    is_taught = microbatch.teacher_tokens[..., 0] >= 0
    teacher, student = (
        jnp.where(is_taught[..., None], x, 0.0)
        for x in (microbatch.teacher_log_probs, statistics.listed_log_probs)
    )
    divergence = (
        jensen_shannon(teacher, student, settings.jsd_beta)
        if settings.loss == "jsd"
        else forward_kl(teacher, student)
    )
    return {
        settings.loss: jnp.where(is_taught, divergence, 0.0),
        "teacher_mass": jnp.exp(teacher).sum(-1),
        "student_mass": -jnp.expm1(student[..., -1]),
    }


def distillation_loss(
    config: RLConfig,
    log_probs: Float[Array, "B T"],
    lesson: MaskedTeacherLogProbs,
    top_k_terms: dict[str, Float[Array, "B T"]],
    denominators: Denominators,
    teacher_denominators: Denominators,
) -> LossAndMetrics:
    """A microbatch's share of `coef` times the divergence as a loss, and metrics.

    The loss is 0 for "reverse_kl", which is in the advantages. `top_k_terms` is the result of
    `top_k_divergence`, by sequence. `denominators` are those of the policy loss,
    `teacher_denominators` count the tokens that teachers have read.
    """
    settings, mask = config.distillation, lesson.mask
    metrics = {
        f"distillation/{name}": token_mean(x, mask, teacher_denominators)
        for name, x in top_k_terms.items()
    }
    loss: Any = jnp.zeros(())
    if settings.compares_lists:
        loss = aggregate(config.algorithm, top_k_terms[settings.loss], mask, denominators)
    else:
        student, teacher = zero_outside(mask, log_probs, lesson.log_probs)
        metrics["distillation/teacher_log_prob"] = token_mean(teacher, mask, teacher_denominators)
        metrics["distillation/reverse_kl"] = token_mean(
            student - teacher, mask, teacher_denominators
        )
        if settings.loss == "k3":
            divergence = estimated_kl("k3", student, teacher)
            metrics["distillation/k3"] = token_mean(divergence, mask, teacher_denominators)
            loss = aggregate(config.algorithm, divergence, mask, denominators)
    return settings.coef * loss, jax.lax.stop_gradient(metrics)
