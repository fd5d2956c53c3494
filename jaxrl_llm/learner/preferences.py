"""Preference optimization: pairs of answers, or answers with a label, against a reference."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms import masked, preference_objectives
from jaxrl_llm.algorithms.aggregation import LossAndMetrics
from jaxrl_llm.algorithms.preference_objectives import BASELINES, AnswerCounts, AnswerSums
from jaxrl_llm.config.job import DPOConfig
from jaxrl_llm.data import datasets, streams
from jaxrl_llm.data.streams import Rows
from jaxrl_llm.data.tasks import Split
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.learner.objectives import (
    Objective,
    Row,
    SupervisedBatch,
    answer_log_probs,
    preference_pairs,
    split_pairs,
)
from jaxrl_llm.learner.predict import ForwardOutputs


def dpo(config: DPOConfig, models: Models) -> Objective:
    """Preference optimization by `config.dpo.loss`, with a frozen reference if the loss reads one.

    Rows are pairs, or for a loss on single answers one answer each.
    """
    reads_labels = config.dpo.reads_labels

    def labeled_rows(split: Split) -> Rows[Row]:
        examples = datasets.labeled_examples(
            config.data, models.tokenizer, split, config.seed, config.max_sequence_tokens
        )
        return streams.map_rows(examples, lambda example: (example,))

    return Objective(
        name="dpo",
        config=config,
        models=models,
        network=models.policy,
        mesh=models.mesh,
        rows=labeled_rows if reads_labels else functools.partial(preference_pairs, config, models),
        output_loss=functools.partial(label_loss if reads_labels else pair_loss, config),
        batch_weight=lambda batch: len(batch.tokens) / (1.0 if reads_labels else 2.0),
        needs_reference=config.reference_folder is not None,
        baselines=functools.partial(_baselines, config) if config.dpo.loss in BASELINES else None,
        mismatches=config.dpo.loss == "kto",
    )


def pair_loss(config: DPOConfig, outputs: ForwardOutputs, batch: SupervisedBatch) -> LossAndMetrics:
    """The share of a microbatch in the loss on pairs."""
    sums = _answer_sums(config, outputs, batch)
    sides = {name: split_pairs(outputs.microbatch, batch, x) for name, x in vars(sums).items()}
    in_microbatch = sides["ratios"][0]
    chosen, rejected = (
        AnswerSums(**{name: pair[side] for name, (_, pair) in sides.items()}) for side in (0, 1)
    )
    is_chosen = jnp.arange(len(batch.tokens)) % 2 == 0
    counts = _counts(batch, is_chosen, rows=len(batch.tokens) // 2)
    return preference_objectives.pair_objective(config.dpo, chosen, rejected, in_microbatch, counts)


def label_loss(
    config: DPOConfig, outputs: ForwardOutputs, batch: SupervisedBatch
) -> LossAndMetrics:
    """The share of a microbatch in the loss on single answers."""
    microbatch = outputs.microbatch
    sums = _answer_sums(config, outputs, batch)
    labels = microbatch.take(batch.desirable)
    is_row = microbatch.sequences < len(batch.tokens)
    counts = _counts(batch, batch.desirable, rows=len(batch.tokens))
    return preference_objectives.label_objective(config.dpo, sums, labels, is_row, counts)


def _answer_sums(config: DPOConfig, outputs: ForwardOutputs, batch: SupervisedBatch) -> AnswerSums:
    """The sums over the answers of a microbatch's sequences."""
    microbatch, (log_probs, _) = outputs.microbatch, answer_log_probs(config, outputs, batch)
    mask, reference = microbatch.take(batch.mask), microbatch.take(batch.ref_log_probs)
    text = _predicted(microbatch.take(batch.lengths), mask.shape[1])
    return AnswerSums(
        # Subtract per token, then sum: a difference of two sums would keep their rounding errors.
        ratios=masked.sum(log_probs - reference, mask, axis=1),
        log_probs=masked.sum(log_probs, mask, axis=1),
        tokens=mask.sum(1).astype(jnp.float32),
        text_log_probs=masked.sum(log_probs, text, axis=1),
        text_tokens=text.sum(1).astype(jnp.float32),
        baselines=microbatch.take(batch.baselines),
    )


def _predicted(lengths: Array, width: int) -> Array:
    """The tokens of each row that others precede."""
    positions = jnp.arange(width)
    return (positions > 0) & (positions < lengths[:, None])


def _counts(batch: SupervisedBatch, desirable: Array, rows: int) -> AnswerCounts:
    text = _predicted(batch.lengths, batch.tokens.shape[1])
    tokens, text_tokens = (
        jnp.sum(each, where=desirable[:, None]).astype(jnp.float32) for each in (batch.mask, text)
    )
    return AnswerCounts(
        rows=float(rows),
        desirable=jnp.sum(desirable).astype(jnp.float32),
        desirable_tokens=tokens,
        desirable_text_tokens=text_tokens,
    )


def _baselines(
    config: DPOConfig, log_probs: Float[Array, "B T"], batch: SupervisedBatch
) -> Float[Array, " B"]:
    ratios = masked.sum(log_probs - batch.ref_log_probs, batch.mask, axis=1)
    available = {
        "ratios": ratios,
        "mismatched_ratios": ratios,  # of a batch of mismatched rows
        "log_probs": masked.sum(log_probs, batch.mask, axis=1),
        "ref_log_probs": masked.sum(batch.ref_log_probs, batch.mask, axis=1),
        "labels": batch.desirable,
    }
    return preference_objectives.baselines(config.dpo, available)
