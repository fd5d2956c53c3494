"""Losses of preference optimization and their tables: on pairs, and on answers with a label.

A loss names what it reads, which `preference_objectives` sets to 0 outside its mask, and returns a
number for each pair or answer. A ratio is the sum over an answer's tokens of the policy's log-prob
minus the reference's; `log_probs` are the policy's sums alone. Parameters with a default are
hyperparameters of their loss, which `config.loss_args` sets; `beta` and `label_smoothing` are
fields of the config. Sources are TRL 1.16.0 and the papers; docs/jobs.md has the formulas.
"""

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.kl import clip_log_ratios
from jaxrl_llm.algorithms.masked import Scalar
from jaxrl_llm.config.validation import Coefficient, Range

PerAnswer = Float[Array, " answers"]
# Losses of each pair, or also what chosen and rejected answer earn (else beta times their ratios).
PairLosses = PerAnswer | tuple[PerAnswer, PerAnswer, PerAnswer]

Flag = Annotated[int, Range("[0, 1]", "0: off")]


def _smoothed(margins: PerAnswer, label_smoothing: float) -> PerAnswer:
    right, wrong = jax.nn.log_sigmoid(margins), jax.nn.log_sigmoid(-margins)
    return -(1.0 - label_smoothing) * right - label_smoothing * wrong


def sigmoid(
    chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float, label_smoothing: float
) -> PerAnswer:
    """Returns DPO's loss, with label smoothing that of conservative DPO.

        -(1 - s) log sigmoid(margin) - s log sigmoid(-margin),   margin = beta (chosen - rejected)

    Rafailov et al., DPO, arXiv:2305.18290, Eq. 7, and its section on conservative DPO.
    Deviation: TRL ignores label smoothing here.

    >>> one = jnp.ones(1)
    >>> print(f"{sigmoid(one, -one, 0.5, 0.0)[0]:.4f}")
    0.3133
    """
    return _smoothed(beta * (chosen_ratios - rejected_ratios), label_smoothing)


def robust(
    chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float, label_smoothing: float
) -> PerAnswer:
    """Returns DPO's loss, unbiased if a share `label_smoothing` of the pairs is the wrong way.

        (-(1 - s) log sigmoid(margin) + s log sigmoid(-margin)) / (1 - 2 s)

    Chowdhury et al., Provably Robust DPO, arXiv:2403.00409.

    >>> one = jnp.ones(1)
    >>> print(f"{robust(one, -one, 0.5, 0.25)[0]:.4f}")
    -0.1867
    """
    margins = beta * (chosen_ratios - rejected_ratios)
    right, wrong = jax.nn.log_sigmoid(margins), jax.nn.log_sigmoid(-margins)
    smoothing = label_smoothing
    return (-(1.0 - smoothing) * right + smoothing * wrong) / (1.0 - 2.0 * smoothing)


def ipo(
    chosen_ratios: PerAnswer,
    rejected_ratios: PerAnswer,
    chosen_tokens: PerAnswer,
    rejected_tokens: PerAnswer,
    beta: float,
) -> PerAnswer:
    """Returns the squared distance of the margin from `1 / (2 beta)`.

        (chosen ratio / its tokens - rejected ratio / its tokens - 1 / (2 beta))**2

    Azar et al., IPO, arXiv:2310.12036, Eq. 17. Deviation, as in TRL: ratios are means over the
    tokens, so that long answers weigh no more.

    >>> one = jnp.ones(1)
    >>> print(ipo(one, -one, one, 2 * one, 0.5))
    [0.25]
    """
    margins = chosen_ratios / chosen_tokens - rejected_ratios / rejected_tokens
    return jnp.square(margins - 0.5 / beta)


def hinge(chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float) -> PerAnswer:
    """Returns `max(0, 1 - margin)`. Zhao et al., SLiC-HF, arXiv:2305.10425.

    >>> one = jnp.ones(1)
    >>> print(hinge(one, 0 * one, 0.25))
    [0.75]
    """
    return jax.nn.relu(1.0 - beta * (chosen_ratios - rejected_ratios))


def sigmoid_norm(
    chosen_ratios: PerAnswer,
    rejected_ratios: PerAnswer,
    chosen_tokens: PerAnswer,
    rejected_tokens: PerAnswer,
    beta: float,
) -> PerAnswer:
    """Returns DPO's loss of ratios per token. Lambert et al., Tülu 3, arXiv:2411.15124, Sec. 5.

    >>> one = jnp.ones(1)
    >>> print(f"{sigmoid_norm(one, -one, one, 2 * one, 2.0)[0]:.4f}")
    0.0486
    """
    margins = chosen_ratios / chosen_tokens - rejected_ratios / rejected_tokens
    return -jax.nn.log_sigmoid(beta * margins)


def exo_pair(
    chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float, label_smoothing: float
) -> PerAnswer:
    """Returns the reverse KL of the policy's preference to the smoothed one; needs smoothing.

        p log(p / (1 - s)) + (1 - p) log((1 - p) / s),   p = sigmoid(margin)

    Ji et al., EXO, arXiv:2402.00856, Eq. 16.

    >>> print(f"{exo_pair(jnp.zeros(1), jnp.zeros(1), 0.1, 0.25)[0]:.4f}")
    0.1438
    """
    margins = beta * (chosen_ratios - rejected_ratios)
    right = jax.nn.sigmoid(margins) * (jax.nn.log_sigmoid(margins) - jnp.log1p(-label_smoothing))
    wrong = jax.nn.sigmoid(-margins) * (jax.nn.log_sigmoid(-margins) - jnp.log(label_smoothing))
    return right + wrong


def nca_pair(chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float) -> PerAnswer:
    """Returns the noise-contrastive loss, which keeps the likelihood of good answers.

        -log sigmoid(c) - (log sigmoid(-c) + log sigmoid(-r)) / 2,   c, r = beta ratio

    Chen et al., NCA, arXiv:2402.05369.

    >>> print(f"{nca_pair(jnp.zeros(1), jnp.zeros(1), 0.1)[0]:.4f}")
    1.3863
    """
    chosen, rejected = beta * chosen_ratios, beta * rejected_ratios
    against = jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected)
    return -jax.nn.log_sigmoid(chosen) - 0.5 * against


def bco_pair(chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float) -> PerAnswer:
    """Returns the loss of a binary classifier: `-log sigmoid(c) - log sigmoid(-r)`.

    Jung et al., BCO, arXiv:2404.04656, without its reward shift; `bco` has it.

    >>> print(f"{bco_pair(jnp.zeros(1), jnp.zeros(1), 0.1)[0]:.4f}")
    1.3863
    """
    return -jax.nn.log_sigmoid(beta * chosen_ratios) - jax.nn.log_sigmoid(-beta * rejected_ratios)


def sppo_hard(chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float) -> PerAnswer:
    """Returns `(chosen ratio - 1 / (2 beta))**2 + (rejected ratio + 1 / (2 beta))**2`.

    Wu et al., SPPO, arXiv:2405.00675, Eq. 4.7, with win probabilities of 1 and 0.

    >>> print(sppo_hard(jnp.ones(1), jnp.zeros(1), 0.5))
    [1.]
    """
    return jnp.square(chosen_ratios - 0.5 / beta) + jnp.square(rejected_ratios + 0.5 / beta)


def aot(
    chosen_log_probs: PerAnswer,
    rejected_log_probs: PerAnswer,
    chosen_baselines: PerAnswer,
    beta: float,
    label_smoothing: float,
) -> PerAnswer:
    """Returns DPO's loss with the margins of policy and reference sorted over the batch.

    The k-th smallest `chosen - rejected` of the policy is compared with the k-th smallest of the
    reference, its baseline: the policy's margins shall dominate as a distribution.
    Melnyk et al., AOT, arXiv:2406.05882. Deviation: TRL sorts in each microbatch.

    >>> one = jnp.ones(1)
    >>> print(f"{aot(-one, -3 * one, one, 1.0, 0.0)[0]:.4f}")
    0.3133
    """
    margins = chosen_log_probs - rejected_log_probs - chosen_baselines
    return _smoothed(beta * margins, label_smoothing)


def aot_unpaired(
    chosen_ratios: PerAnswer,
    rejected_ratios: PerAnswer,
    chosen_baselines: PerAnswer,
    rejected_baselines: PerAnswer,
    beta: float,
    label_smoothing: float,
) -> PerAnswer:
    """Returns DPO's loss of the k-th smallest chosen and the k-th smallest rejected ratio.

    The baseline of an answer is the ratio of its partner, without a gradient. Each partner bears
    half of their loss and the whole of its own gradient, so microbatches sum to the batch.
    Source and deviation: those of `aot`.

    >>> one = jnp.ones(1)
    >>> print(f"{aot_unpaired(one, -one, -one, one, 0.5, 0.0)[0]:.4f}")
    0.3133
    """
    of_chosen = _smoothed(beta * (chosen_ratios - chosen_baselines), label_smoothing)
    of_rejected = _smoothed(beta * (rejected_baselines - rejected_ratios), label_smoothing)
    both = of_chosen + of_rejected
    return both - 0.5 * jax.lax.stop_gradient(both)


def apo_zero(chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float) -> PerAnswer:
    """Returns `1 - sigmoid(c) + sigmoid(r)`: chosen answers up, rejected ones down.

    For answers better than the policy's own. D'Oosterlinck et al., APO, arXiv:2408.06266, Eq. 7.

    >>> print(apo_zero(jnp.zeros(1), jnp.zeros(1), 0.1))
    [1.]
    """
    return jax.nn.sigmoid(-beta * chosen_ratios) + jax.nn.sigmoid(beta * rejected_ratios)


def apo_down(chosen_ratios: PerAnswer, rejected_ratios: PerAnswer, beta: float) -> PerAnswer:
    """Returns `sigmoid(c) + 1 - sigmoid(c - r)`: both down, rejected answers more.

    For answers worse than the policy's own. arXiv:2408.06266, Eq. 8.

    >>> print(apo_down(jnp.zeros(1), jnp.zeros(1), 0.1))
    [1.]
    """
    margins = beta * (chosen_ratios - rejected_ratios)
    return jax.nn.sigmoid(beta * chosen_ratios) + jax.nn.sigmoid(-margins)


def discopop(
    chosen_ratios: PerAnswer,
    rejected_ratios: PerAnswer,
    beta: float,
    tau: Annotated[float, Range("[0.001, 1000]")] = 0.05,
) -> PerAnswer:
    """Returns the loss that a language model found: logistic where the margin is negative.

        -(1 - g) log sigmoid(margin) + g exp(-margin),   g = sigmoid(margin / tau)

    Lu et al., DiscoPOP, arXiv:2406.08414, Eq. 5. The exponent is clipped to 20 in size.

    >>> print(f"{discopop(jnp.zeros(1), jnp.zeros(1), 0.1)[0]:.4f}")
    0.8466
    """
    margins = beta * (chosen_ratios - rejected_ratios)
    gate = jax.nn.sigmoid(margins / tau)
    exponential = jnp.exp(clip_log_ratios(-margins))
    return -(1.0 - gate) * jax.nn.log_sigmoid(margins) + gate * exponential


def sft(chosen_log_probs: PerAnswer, mean_chosen_tokens: Scalar | float) -> PerAnswer:
    """Returns the cross-entropy of the chosen answers, a mean over all their tokens.

    >>> print(sft(jnp.array([-1.0, -5.0]), 2.0).mean())
    1.5
    """
    return -chosen_log_probs / mean_chosen_tokens


def cpo(
    chosen_log_probs: PerAnswer,
    rejected_log_probs: PerAnswer,
    mean_chosen_tokens: Scalar | float,
    beta: float,
    label_smoothing: float,
    nll_coef: Coefficient = 1.0,
) -> PairLosses:
    """Returns DPO's loss without a reference, plus `nll_coef` times the loss of `sft`.

    Xu et al., CPO, arXiv:2401.08417, Eq. 3.

    >>> one = jnp.ones(1)
    >>> print(f"{cpo(-one, -3 * one, 2.0, 0.5, 0.0)[0][0]:.4f}")  # 0.3133 + 0.5
    0.8133
    """
    chosen, rejected = beta * chosen_log_probs, beta * rejected_log_probs
    nll = sft(chosen_log_probs, mean_chosen_tokens)
    return _smoothed(chosen - rejected, label_smoothing) + nll_coef * nll, chosen, rejected


def simpo(
    chosen_log_probs: PerAnswer,
    rejected_log_probs: PerAnswer,
    chosen_tokens: PerAnswer,
    rejected_tokens: PerAnswer,
    mean_chosen_tokens: Scalar | float,
    beta: float,
    label_smoothing: float,
    gamma: Coefficient = 0.5,
    alpha: Annotated[float, Range("[-10, 10]", "0: the log-prob")] = 0.0,
    nll_coef: Coefficient = 0.0,
) -> PairLosses:
    """Returns the loss on log-probs per token, without a reference, beyond a margin `gamma`.

        -log sigmoid(beta (r_chosen - r_rejected) - gamma),   r = log_probs / tokens

    `alpha` makes it AlphaPO, `r = (1 - p**-alpha) / alpha` with `p = exp(log_probs / tokens)`,
    exponents clipped to 20 in size; `nll_coef` adds the loss of `sft` (CPO-SimPO).
    Meng et al., SimPO, arXiv:2405.14734, Eq. 6, with beta 2 to 10; AlphaPO, arXiv:2501.03884.

    >>> one = jnp.ones(1)
    >>> print(f"{simpo(-one, -3 * one, one, one, 1.0, 0.5, 0.0, gamma=0.0)[0][0]:.4f}")
    0.3133
    """

    def rewards(log_probs: PerAnswer, tokens: PerAnswer) -> PerAnswer:
        means = log_probs / tokens
        return (1.0 - jnp.exp(clip_log_ratios(-alpha * means))) / alpha if alpha else means

    chosen = beta * rewards(chosen_log_probs, chosen_tokens)
    rejected = beta * rewards(rejected_log_probs, rejected_tokens)
    nll = sft(chosen_log_probs, mean_chosen_tokens)
    losses = _smoothed(chosen - rejected - gamma, label_smoothing)
    return losses + nll_coef * nll, chosen, rejected


def orpo(
    chosen_log_probs: PerAnswer,
    rejected_log_probs: PerAnswer,
    chosen_tokens: PerAnswer,
    rejected_tokens: PerAnswer,
    chosen_text_log_probs: PerAnswer,
    mean_chosen_tokens: Scalar | float,
    mean_chosen_text_tokens: Scalar | float,
    beta: float,
    nll_on_prompt: Flag = 0,
) -> PairLosses:
    """Returns the loss of `sft` plus `beta` times that of the odds ratio; it has no reference.

        nll - beta log sigmoid(log odds(p_chosen) - log odds(p_rejected))
        odds(p) = p / (1 - p),   p = exp(log_probs / tokens), at most 1 - 1e-6

    Hong et al., ORPO, arXiv:2403.07691, Eq. 6 and 7. With `nll_on_prompt` the cross-entropy is over
    prompt and answer, as in TRL; the paper's is over the answer.

    >>> one = jnp.ones(1)
    >>> print(f"{orpo(-one, -one, one, one, -one, 1.0, 1.0, 0.5)[0][0]:.4f}")  # 1 + 0.5 log 2
    1.3466
    """

    def log_odds(log_probs: PerAnswer, tokens: PerAnswer) -> tuple[PerAnswer, PerAnswer]:
        means = jnp.minimum(log_probs / tokens, -1e-6)  # else log(0), also in padding
        return means, means - jnp.log(-jnp.expm1(means))

    chosen, chosen_odds = log_odds(chosen_log_probs, chosen_tokens)
    rejected, rejected_odds = log_odds(rejected_log_probs, rejected_tokens)
    nll = sft(chosen_log_probs, mean_chosen_tokens)
    if nll_on_prompt:
        nll = sft(chosen_text_log_probs, mean_chosen_text_tokens)
    losses = nll - beta * jax.nn.log_sigmoid(chosen_odds - rejected_odds)
    return losses, beta * chosen, beta * rejected


def kto(
    ratios: PerAnswer,
    labels: Bool[Array, " answers"],
    baselines: PerAnswer,
    beta: float,
    desirable_weight: Coefficient = 1.0,
    undesirable_weight: Coefficient = 1.0,
) -> PerAnswer:
    """Returns the loss of prospect theory: what an answer gains over the batch's KL, saturating.

        weight (1 - sigmoid(± beta (ratio - kl))),   + if the answer is desirable

    The baseline `kl` is that of `mean_kl`. Ethayarajh et al., KTO, arXiv:2402.01306, Eq. 7.

    >>> print(kto(jnp.zeros(2), jnp.array([True, False]), jnp.zeros(2), 0.1))
    [0.5 0.5]
    """
    sign = jnp.where(labels, 1.0, -1.0)
    weights = jnp.where(labels, desirable_weight, undesirable_weight)
    return weights * jax.nn.sigmoid(-beta * sign * (ratios - baselines))


def apo_zero_unpaired(
    ratios: PerAnswer,
    labels: Bool[Array, " answers"],
    beta: float,
    desirable_weight: Coefficient = 1.0,
    undesirable_weight: Coefficient = 1.0,
) -> PerAnswer:
    """Returns the loss of `kto` without its KL. arXiv:2408.06266, Eq. 7, on single answers.

    >>> print(apo_zero_unpaired(jnp.zeros(1), jnp.ones(1, bool), 0.1))
    [0.5]
    """
    zero = jnp.zeros_like(ratios)
    return kto(ratios, labels, zero, beta, desirable_weight, undesirable_weight)


def bco(
    ratios: PerAnswer,
    labels: Bool[Array, " answers"],
    baselines: PerAnswer,
    beta: float,
    desirable_weight: Coefficient = 1.0,
    undesirable_weight: Coefficient = 1.0,
) -> PerAnswer:
    """Returns the loss of a binary classifier of desirable answers.

        -weight log sigmoid(± beta (ratio - shift)),   + if the answer is desirable

    The baseline is that of `reward_shift`. Jung et al., BCO, arXiv:2404.04656. Deviation: no
    density ratio corrects for prompts that only one kind of answer has.

    >>> print(f"{bco(jnp.zeros(1), jnp.ones(1, bool), jnp.zeros(1), 0.1)[0]:.4f}")
    0.6931
    """
    sign = jnp.where(labels, 1.0, -1.0)
    weights = jnp.where(labels, desirable_weight, undesirable_weight)
    return -weights * jax.nn.log_sigmoid(beta * sign * (ratios - baselines))


_PAIR_LOSSES = (
    *(sigmoid, robust, ipo, hinge, sigmoid_norm, exo_pair, nca_pair, bco_pair, sppo_hard, aot),
    *(aot_unpaired, apo_zero, apo_down, discopop, sft, cpo, simpo, orpo),
)
PAIR_LOSSES: dict[str, Callable[..., PairLosses]] = {f.__name__: f for f in _PAIR_LOSSES}
LABEL_LOSSES: dict[str, Callable[..., PerAnswer]] = {
    f.__name__: f for f in (kto, apo_zero_unpaired, bco)
}
