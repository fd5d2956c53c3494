"""On-policy distillation: what teachers say of sampled tokens, and what the policy learns of it."""

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
from jaxrl_llm.algorithms.distillation import forward_kl, reverse_kl_rewards
from jaxrl_llm.algorithms.kl import estimated_kl
from jaxrl_llm.algorithms.masked import zero_outside
from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.data import packing
from jaxrl_llm.data.packing import Microbatch, PackedBatch
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.learner import predict, wide
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.weights import Frozen, Teacher
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.heads import Statistics
from jaxrl_llm.types import Lessons, Minibatch, Rollouts

Metrics = dict[str, Float[Array, ""]]


def check(config: RLConfig, models: Models) -> None:
    """Raises ConfigError for a teacher with other tokens than the policy's."""
    ours, problems = models.tokenizer.get_vocab(), []
    for name, teacher in config.distillation.teachers.items():
        tokenizer, shape = load_tokenizer(teacher.path), huggingface.read_shape(teacher.path)
        huggingface.check_vocabulary(shape, tokenizer)
        theirs = tokenizer.get_vocab()
        if theirs == ours:
            continue
        differing = set(ours.items()) ^ set(theirs.items())
        token, number = min(differing, key=lambda item: item[1])
        whose = "policy" if ours.get(token) == number else "teacher"
        problems.append(
            f"config.distillation.teachers.{name}.path: {teacher.path} has another vocabulary:"
            f" {len(theirs)} tokens, the policy has {len(ours)}, and {token!r} is token {number} of"
            f" the {whose} alone; use a teacher with the policy's tokenizer"
        )
    settings, most = config.distillation, len(ours)
    if settings.teachers and settings.num_listed > most:
        problems.append(
            f"config.distillation.top_k: {settings.top_k}, but there are {most} tokens; use less"
        )
    if problems:
        raise ConfigError(problems)


def widths(config: RLConfig) -> dict[str, int]:
    """Returns the wide fields of a microbatch that lessons take, see `learner/wide.py`."""
    settings = config.distillation
    if not settings.teachers:
        return {}
    return dict.fromkeys(("listed", "listed_log_probs"), settings.num_listed)


def scoring_program(config: RLConfig, models: Models, teacher: Teacher) -> Any:
    """Returns the jitted `(params, tokens, packed) -> (tokens, log_probs)`.

    Both are [M, R, W, k], as `types.Lessons`, at the scored tokens of packed rows.
    """
    settings, network = config.distillation, teacher.network
    asked: Any = {
        "temperature": config.rollout.temperature or 1.0,
        "chunk": config.model.vocab_chunk,
    }
    known = min(network.shape.vocab_size, models.policy.shape.vocab_size)

    @jax.jit
    def of_teacher(params, tokens, packed: PackedBatch):
        def ask(microbatch: Microbatch):
            given = network, params, tokens, microbatch
            if settings.loss == "forward_kl":
                return (), predict.token_likeliest(*given, settings.top_k, limit=known, **asked)
            found, _ = predict.token_statistics(*given, entropy="none", **asked)
            return (), (microbatch.packed(tokens)[..., None], found.log_probs[..., None])

        packed = predict.Reader(network, tokens).passed(params, packed)
        return packing.both_ways(packed, ask, *tokens.shape)[1]

    return of_teacher


def teaching(
    config: RLConfig, models: Models, frozen: Frozen
) -> Callable[[Rollouts, Clock], Rollouts]:
    """Returns what adds the teachers' lessons to rollouts; times `teacher`.

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
        whose = np.array([settings.teacher_of(source) for source in sources])
        shape = *rollouts.tokens.shape, settings.num_listed
        tokens, log_probs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for name, program in programs.items():
            teacher = frozen.teachers[name]
            own = rollouts.response_mask & (whose == name)[:, None]
            own &= rollouts.tokens < teacher.network.shape.vocab_size
            if not own.any():
                continue
            with jax.set_mesh(mesh), clock("teacher") as watch:
                found = watch(program(teacher.params, rollouts.tokens, packed))
            said = [
                wide.by_sequence(packed, each, rollouts.lengths, rollouts.tokens.shape[1])
                for each in found
            ]
            tokens, log_probs = (
                np.where(own[..., None], new, old)
                for new, old in zip(said, (tokens, log_probs), strict=True)
            )
        return dataclasses.replace(rollouts, lessons=Lessons(tokens, log_probs))

    return teach


class Lesson(NamedTuple):
    """What a teacher says of the sampled tokens of sequences."""

    mask: Bool[Array, "B T"]  # it has read this token, which bears loss
    log_probs: Float[Array, "B T"]  # of the token; with "forward_kl" of its own likeliest

    @classmethod
    def of(cls, packed: PackedBatch, batch: Minibatch) -> "Lesson":
        """Returns those of a minibatch; its packed rows carry what teachers say."""

        def unpacked(microbatch: Microbatch):
            first = microbatch.listed[..., 0] >= 0, microbatch.listed_log_probs[..., 0]
            return tuple(
                microbatch.unpacked(x, batch.lengths, batch.tokens.shape[1]) for x in first
            )

        mask, log_probs = packing.by_sequence(packed, unpacked, *batch.tokens.shape)
        mask = (mask != 0) & batch.loss_mask
        return cls(mask, jnp.where(mask, log_probs, 0.0))


def advised(config: RLConfig, rows: Minibatch, lesson: Lesson) -> Minibatch:
    """Returns sequences with the reverse KL in their advantages, if that is how they are taught.

    `advantages += coef * reverse_kl_rewards`, after the estimator and its normalization. It is of
    `old_log_probs`, those of the policy that sampled.
    """
    if config.distillation.loss != "reverse_kl":
        return rows
    earned = reverse_kl_rewards(lesson.log_probs, rows.old_log_probs)
    earned = jnp.where(lesson.mask, config.distillation.coef * earned, 0.0)
    return dataclasses.replace(rows, advantages=rows.advantages + earned)


def of_listed(
    config: RLConfig, microbatch: Microbatch, found: Statistics
) -> dict[str, Float[Array, "R W"]]:
    """Returns what follows of the tokens that a teacher lists, by the names of metrics."""
    if config.distillation.loss != "forward_kl":
        return {}
    taught = microbatch.listed[..., 0] >= 0
    theirs, ours = (
        jnp.where(taught[..., None], x, 0.0) for x in (microbatch.listed_log_probs, found.listed)
    )
    return {
        "forward_kl": jnp.where(taught, forward_kl(theirs, ours), 0.0),
        "teacher_mass": jnp.exp(theirs).sum(-1),
        "student_mass": -jnp.expm1(ours[..., -1]),
    }


def objective(
    config: RLConfig,
    log_probs: Float[Array, "B T"],
    lesson: Lesson,
    found: dict[str, Float[Array, "B T"]],
    denominators: Denominators,
    taught: Denominators,
) -> LossAndMetrics:
    """Returns a microbatch's share of `coef` times the divergence as a loss, and metrics.

    The loss is 0 for "reverse_kl", which is in the advantages. `found` is what `of_listed` returns,
    by sequence. `denominators` are those of the policy loss, `taught` count the tokens that
    teachers have read.
    """
    settings, mask = config.distillation, lesson.mask
    metrics = {f"distillation/{name}": token_mean(x, mask, taught) for name, x in found.items()}
    loss: Any = jnp.zeros(())
    if settings.loss == "forward_kl":
        loss = aggregate(config.algorithm, found["forward_kl"], mask, denominators)
    else:
        ours, theirs = zero_outside(mask, log_probs, lesson.log_probs)
        metrics["distillation/teacher_log_prob"] = token_mean(theirs, mask, taught)
        metrics["distillation/reverse_kl"] = token_mean(ours - theirs, mask, taught)
        if settings.loss == "k3":
            divergence = estimated_kl("k3", ours, theirs)
            metrics["distillation/k3"] = token_mean(divergence, mask, taught)
            loss = aggregate(config.algorithm, divergence, mask, denominators)
    return settings.coef * loss, jax.lax.stop_gradient(metrics)
