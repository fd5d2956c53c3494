"""From the log-probs of answers to the loss of preference optimization, for any row of its tables.

Some losses compare an answer with a statistic of the whole batch, its baseline: a sorted partner, a
KL, a mean. Baselines have no gradient and are computed once a batch, before its microbatches, so
that the split into microbatches changes nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.aggregation import LossAndMetrics
from jaxrl_llm.algorithms.lookup import FunctionError, call_by_name, resolve
from jaxrl_llm.algorithms.masked import Scalar
from jaxrl_llm.algorithms.preference_losses import LABEL_LOSSES, PAIR_LOSSES, PerAnswer
from jaxrl_llm.config.algorithm import PreferenceLossConfig

AnswerMask = Bool[Array, " answers"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnswerSums:
    """Sums over the tokens of answers; those of the policy have a gradient."""

    ratios: PerAnswer  # log-prob minus the reference's; without a reference, the log-prob
    log_probs: PerAnswer
    tokens: PerAnswer
    text_log_probs: PerAnswer  # of prompt and answer
    text_tokens: PerAnswer  # of prompt and answer, but the first, which nothing predicts
    baselines: PerAnswer  # `BASELINES`; zero for other losses

    def within_mask(self, mask: AnswerMask) -> "AnswerSums":
        """These sums where `mask`, elsewhere those of an answer of one token of log-prob 0."""
        zeroed = AnswerSums(*masked.zero_outside(mask, *vars(self).values()))
        tokens = jnp.maximum(zeroed.tokens, 1.0)
        return dataclasses.replace(zeroed, tokens=tokens)

    def by_name(self, prefix: str) -> dict[str, PerAnswer]:
        """The sums as a loss names them."""
        return {f"{prefix}{name}": values for name, values in vars(self).items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnswerCounts:
    """Counts of the whole minibatch; of pairs, the desirable answers are the chosen ones."""

    rows: Scalar | float  # pairs or answers, at least 1
    desirable: Scalar | float
    desirable_tokens: Scalar | float  # of these answers
    desirable_text_tokens: Scalar | float  # of their prompts too


def _call(config: PreferenceLossConfig, table: Mapping[str, Any], available: dict[str, Any]) -> Any:
    where = f"config.dpo.loss={config.loss!r}"
    function = resolve(config.loss, table, "preference loss")
    available |= {
        "beta": config.beta,
        "label_smoothing": config.label_smoothing,
        "config": config,
    }
    return call_by_name(function, available, where, config.loss_args)


def pair_objective(
    config: PreferenceLossConfig,
    chosen: AnswerSums,
    rejected: AnswerSums,
    pair_mask: AnswerMask,
    counts: AnswerCounts,
) -> LossAndMetrics:
    """Returns the loss of `PAIR_LOSSES`, or of a user's function: the mean over pairs.

    Metrics are of the implied rewards, `beta` times a ratio, or those that the loss returns; a tie
    is no success. Raises what `lookup.resolve` and `lookup.call_by_name` raise, or FunctionError
    for another result.

    >>> one = jnp.ones(1)
    >>> sums = [AnswerSums(x, x, one, x, one, 0 * one) for x in (one, -one)]
    >>> loss, metrics = pair_objective(
    ...     PreferenceLossConfig(beta=0.5), *sums, one > 0, AnswerCounts(1.0, 1.0, 1.0, 1.0))
    >>> print(f"{loss:.4f}", metrics["rewards/margins"])
    0.3133 1.0
    """
    chosen, rejected = chosen.within_mask(pair_mask), rejected.within_mask(pair_mask)
    available = {
        **chosen.by_name("chosen_"),
        **rejected.by_name("rejected_"),
        "mean_chosen_tokens": jnp.maximum(counts.desirable_tokens, 1.0) / counts.rows,
        "mean_chosen_text_tokens": jnp.maximum(counts.desirable_text_tokens, 1.0) / counts.rows,
    }
    result = _call(config, PAIR_LOSSES, available)
    rewards = config.beta * chosen.ratios, config.beta * rejected.ratios
    each, *others = result if isinstance(result, tuple | list) else (result,)
    if len(others) not in (0, 2) or any(jnp.shape(x) != pair_mask.shape for x in (each, *others)):
        raise FunctionError(
            f"config.dpo.loss={config.loss!r}: must return one number for each of the"
            f" {pair_mask.shape[0]} pairs, or (losses, chosen rewards, rejected rewards)"
        )
    of_chosen, of_rejected = others or rewards
    margins = of_chosen - of_rejected

    def mean(values: PerAnswer) -> Scalar:
        return masked.sum(values, pair_mask) / counts.rows

    loss = mean(each)
    metrics = {
        "dpo/loss": loss,
        "rewards/chosen": mean(of_chosen),
        "rewards/rejected": mean(of_rejected),
        "rewards/margins": mean(margins),
        "rewards/accuracies": mean((margins > 0).astype(margins.dtype)),
        "logps/chosen": mean(chosen.log_probs),
        "logps/rejected": mean(rejected.log_probs),
    }
    return loss, jax.lax.stop_gradient(metrics)


def label_objective(
    config: PreferenceLossConfig,
    answers: AnswerSums,
    labels: AnswerMask,
    mask: AnswerMask,
    counts: AnswerCounts,
) -> LossAndMetrics:
    """Returns the loss of `LABEL_LOSSES`: the mean over answers.

    Metrics `chosen` are means over the batch's desirable answers, `rejected` over the others, 0 if
    there are none; `dpo/baseline` is the mean baseline. Raises as `pair_objective` does.

    >>> one = jnp.ones(2)
    >>> sums = AnswerSums(0 * one, -one, one, -one, one, 0 * one)
    >>> loss, _ = label_objective(
    ...     PreferenceLossConfig(loss="kto"), sums, jnp.array([True, False]), one > 0,
    ...     AnswerCounts(2.0, 1.0, 1.0, 1.0))
    >>> print(loss)
    0.5
    """
    answers = answers.within_mask(mask)
    each = _call(config, LABEL_LOSSES, {**answers.by_name(""), "labels": labels})
    loss = masked.sum(each, mask) / counts.rows
    kinds = {
        "chosen": (mask & labels, jnp.maximum(counts.desirable, 1.0)),
        "rejected": (mask & ~labels, jnp.maximum(counts.rows - counts.desirable, 1.0)),
    }
    metrics = {"dpo/loss": loss, "dpo/baseline": masked.sum(answers.baselines, mask) / counts.rows}
    for kind, (members, count) in kinds.items():
        metrics[f"rewards/{kind}"] = config.beta * masked.sum(answers.ratios, members) / count
        metrics[f"logps/{kind}"] = masked.sum(answers.log_probs, members) / count
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return loss, jax.lax.stop_gradient(metrics)


def sorted_margins(log_probs: PerAnswer, ref_log_probs: PerAnswer) -> PerAnswer:
    """Returns for `aot` the reference margin of equal rank, for both answers of each pair.

    Rows are chosen and rejected answers in turn.

    >>> print(sorted_margins(jnp.array([5.0, 0.0, 1.0, 0.0]), jnp.array([2.0, 0.0, 3.0, 0.0])))
    [3. 3. 2. 2.]
    """
    margins = log_probs[0::2] - log_probs[1::2]
    ref_margins = jnp.sort(ref_log_probs[0::2] - ref_log_probs[1::2])
    return jnp.repeat(ref_margins[_ranks(margins)], 2)


def sorted_partners(ratios: PerAnswer) -> PerAnswer:
    """Returns for `aot_unpaired` the ratio of equal rank among the answers of the other kind.

    >>> print(sorted_partners(jnp.array([5.0, 1.0, 3.0, 2.0])))
    [2. 3. 1. 5.]
    """
    chosen, rejected = ratios[0::2], ratios[1::2]
    partners = jnp.sort(rejected)[_ranks(chosen)], jnp.sort(chosen)[_ranks(rejected)]
    return jnp.stack(partners, axis=1).ravel()


def _ranks(values: PerAnswer) -> Array:
    order = jnp.argsort(values, stable=True)
    return jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))


def mean_kl(mismatched_ratios: PerAnswer) -> PerAnswer:
    """Returns for `kto` the KL of policy and reference, at least 0, for each row.

    It is estimated by the mean ratio of answers to the prompts of other rows: the policy did not
    sample the answers, and their own prompts would favor them. arXiv:2402.01306.

    >>> print(mean_kl(jnp.array([3.0, -1.0])))
    [1. 1.]
    """
    return jnp.full_like(mismatched_ratios, jnp.maximum(jnp.mean(mismatched_ratios), 0.0))


def reward_shift(ratios: PerAnswer, labels: AnswerMask) -> PerAnswer:
    """Returns for `bco` the middle between the mean ratios of both kinds of answers, for each row.

    Without answers of one kind it is the mean of the other. arXiv:2404.04656. Deviation: of the
    batch; there a moving average over batches.

    >>> print(reward_shift(jnp.array([4.0, 2.0, -1.0]), jnp.array([True, True, False])))
    [1. 1. 1.]
    """
    present = jnp.stack([jnp.any(labels), jnp.any(~labels)])
    means = jnp.stack([masked.mean(ratios, labels), masked.mean(ratios, ~labels)])
    return jnp.full_like(ratios, masked.mean(means, present))


# The baselines of the losses that have them, from the answers of the whole batch, by names of
# `ratios`, `log_probs`, `ref_log_probs`, `labels`; `mismatched_ratios` are those of the same
# answers to the prompts of other rows.
BASELINES: dict[str, Callable[..., Float[Array, " answers"]]] = {
    "aot": sorted_margins,
    "aot_unpaired": sorted_partners,
    "kto": mean_kl,
    "bco": reward_shift,
}


def baselines(
    config: PreferenceLossConfig, available: Mapping[str, PerAnswer | AnswerMask]
) -> Float[Array, " answers"]:
    """Returns the baselines of a loss of `BASELINES`, from the answers of the whole batch.

    >>> print(baselines(PreferenceLossConfig(loss="kto"), {"mismatched_ratios": jnp.ones(2)}))
    [1. 1.]
    """
    where = f"config.dpo.loss={config.loss!r}"
    return call_by_name(BASELINES[config.loss], available, where)
