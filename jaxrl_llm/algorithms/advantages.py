"""Advantage estimators, their table, and the dispatch to the configured one.

`rewards` are for emitting each token, `values` the predicted returns just before it. All results
are zero outside `response_mask`; tokens outside it are skipped, not discounted.

Some compare whole responses with the other responses to the same prompt. They return advantages
alone, equal to the returns, for each token or for each row, whose tokens all get it. `scores` are
rewards summed over the response. Rows that are not `members` have no response token: they are
padding and belong to no group. A group of one has nothing to compare with: its baseline is 0 and
its scale 1, so its advantage is the score.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.lookup import FunctionError, call_by_name, resolve
from jaxrl_llm.algorithms.masked import GroupIds, Mask, PerRow, PerToken, RowMask, whiten
from jaxrl_llm.algorithms.online_preferences import nash_md, online_dpo, xpo
from jaxrl_llm.algorithms.token_baselines import AdvantagesAndReturns, optimal_token_baseline
from jaxrl_llm.config import AlgorithmConfig

EPSILON = 1e-6  # added to a group's standard deviation


def generalized_advantage_estimation(
    rewards: PerToken, values: PerToken, response_mask: Mask, *, gamma: float, gae_lambda: float
) -> AdvantagesAndReturns:
    r"""Returns advantages and value targets of one trajectory per row.

    Over the response tokens of a row, with `t+1` the next response token:

        delta_t = r_t + gamma * V_{t+1} - V_t                     (Eq. 12)
        A_t     = delta_t + gamma * gae_lambda * A_{t+1}          (Eq. 11)

    `V` is zero after the last response token: the response ended, it was not cut. Advantages
    are not normalized; returns are `advantages + values`. Schulman et al., arXiv:1506.02438;
    equations as numbered in PPO, arXiv:1707.06347.

    >>> advantages, returns = generalized_advantage_estimation(
    ...     rewards=jnp.array([[0.0, 0.0, 1.0]]), values=jnp.array([[0.9, 0.5, 0.5]]),
    ...     response_mask=jnp.array([[False, True, True]]), gamma=1.0, gae_lambda=1.0)
    >>> print(advantages)
    [[0.  0.5 0.5]]
    """

    def step(carry, inputs):
        next_value, next_advantage = carry
        reward, value, mask = inputs
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * gae_lambda * next_advantage
        carry = (jnp.where(mask, value, next_value), jnp.where(mask, advantage, next_advantage))
        return carry, jnp.where(mask, advantage, 0.0)

    zeros = jnp.zeros_like(rewards, shape=rewards.shape[:1])
    _, advantages = jax.lax.scan(
        step, (zeros, zeros), (rewards.T, values.T, response_mask.T), reverse=True
    )
    advantages = advantages.T
    return advantages, jnp.where(response_mask, advantages + values, 0.0)


def gae(
    rewards: PerToken, values: PerToken, response_mask: Mask, gamma: float, gae_lambda: float
) -> AdvantagesAndReturns:
    """Returns `generalized_advantage_estimation`, its advantages whitened over the batch.

    Deviation: verl leaves values outside the mask.

    >>> advantages, returns = gae(
    ...     rewards=jnp.array([[1.0], [0.0]]), values=jnp.zeros((2, 1)),
    ...     response_mask=jnp.ones((2, 1), bool), gamma=1.0, gae_lambda=1.0)
    >>> print(advantages.ravel().round(4), returns.ravel())
    [ 0.7071 -0.7071] [1. 0.]
    """
    advantages, returns = generalized_advantage_estimation(
        rewards, values, response_mask, gamma=gamma, gae_lambda=gae_lambda
    )
    return whiten(advantages, response_mask), returns


def reinforce_plus_plus(
    rewards: PerToken, response_mask: Mask, gamma: float
) -> AdvantagesAndReturns:
    """Returns the discounted reward to go, whitened over all tokens of the batch, and unwhitened.

    Hu et al., REINFORCE++, arXiv:2501.03262.

    >>> advantages, returns = reinforce_plus_plus(
    ...     jnp.array([[0.0, 0.0, 1.0]]), jnp.array([[True, False, True]]), gamma=0.5)
    >>> print(returns, advantages.round(4))
    [[0.5 0.  1. ]] [[-0.7071  0.      0.7071]]
    """
    _, returns = generalized_advantage_estimation(
        rewards, jnp.zeros_like(rewards), response_mask, gamma=gamma, gae_lambda=1.0
    )
    return whiten(returns, response_mask), returns


def remax(rewards: PerToken, response_mask: Mask, baselines: PerRow) -> AdvantagesAndReturns:
    """Returns the reward to go minus the score of the prompt's greedy response, and as it is.

    Li et al., ReMax, arXiv:2310.10505. Deviation: verl leaves values on tool tokens.

    >>> advantages, _ = remax(
    ...     jnp.array([[0.0, 1.0]]), jnp.ones((1, 2), bool), baselines=jnp.array([0.25]))
    >>> print(advantages)
    [[0.75 0.75]]
    """
    returns = masked.returns_to_go(rewards, response_mask)
    return jnp.where(response_mask, returns - baselines[:, None], 0.0), returns


def _centered(scores: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    centered = masked.group_centered(scores, group_ids, members)
    return jnp.where(masked.group_size(group_ids, members) > 1.0, centered, scores)


def _whiten_rows(row_advantages: PerRow, response_mask: Mask) -> PerToken:
    return whiten(jnp.where(response_mask, row_advantages[:, None], 0.0), response_mask)


def grpo(scores: PerRow, group_ids: GroupIds, members: RowMask, group_std: bool = True) -> PerRow:
    """Returns the score's distance from its group's mean, in standard deviations.

        (score - mean) / (std + 1e-6)        std with Bessel's correction

    A group of one: `score / (1 + 1e-6)`.
    Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2.

    >>> print(grpo(jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.ones(2, bool)).round(4))
    [ 0.7071 -0.7071]
    """
    centered = _centered(scores, group_ids, members)
    if not group_std:
        return centered
    return centered / (masked.group_deviation(scores, group_ids, members) + EPSILON)


def maxrl(scores: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns the score's distance from its group's mean, divided by the mean.

        (score - mean) / (mean + 1e-6)

    With scores 0 and 1 this is the gradient of the log of the success rate, as far as G samples
    tell it: prompts that are rarely solved weigh more. A mean of 0 or less gives 0.
    Tajwar et al., Maximum Likelihood RL, arXiv:2602.02710. Deviation: the authors' code divides
    the score of a group of one by 1e-6, here it stays the score.

    >>> scores, groups = jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.zeros(4, int)
    >>> print(maxrl(scores, groups, jnp.ones(4, bool)).round(4))
    [ 3. -1. -1. -1.]
    """
    means = masked.group_mean(scores, group_ids, members)
    centered = masked.group_centered(scores, group_ids, members)
    positive = means > 0.0
    scaled = jnp.where(positive, centered / (jnp.where(positive, means, 1.0) + EPSILON), 0.0)
    return jnp.where(masked.group_size(group_ids, members) > 1.0, scaled, scores)


def lite_ppo(
    scores: PerRow, group_ids: GroupIds, members: RowMask, of_advantages: bool = False
) -> PerRow:
    """Returns the score minus its group's mean, in standard deviations of the batch's scores.

        (score - mean) / (std + 1e-6)        std of all scores, with Bessel's correction

    With `of_advantages` (`batch_std`) std is that of the centered scores, as in ScaleRL.
    Liu et al., Tricks or Traps (Lite PPO), arXiv:2508.08221; Khatri et al., arXiv:2510.13786.

    >>> scores, groups = jnp.array([1.0, 0.0, 5.0, 5.0]), jnp.array([0, 0, 1, 1])
    >>> print(lite_ppo(scores, groups, jnp.ones(4, bool)).round(1))
    [ 0.2 -0.2  0.   0. ]
    """
    centered = _centered(scores, group_ids, members)
    deviation = jnp.sqrt(masked.variance(centered if of_advantages else scores, members))
    return centered / (deviation + EPSILON)


def grpo_turns(
    rewards: PerToken, response_mask: Mask, group_ids: GroupIds, group_std: bool = True
) -> PerToken:
    """Returns GRPO's advantage of each turn: its rewards to go among those of its group's turns.

    A turn is a run of response tokens. `G_k` are the rewards from the turn's first token on; they
    are compared with those of the `k`-th turns of the group's other rows:

        (G_k - mean) / (std + 1e-6)        std with Bessel's correction

    With one turn this is `grpo`. A turn that no other row has: as a group of one. Rewards of single
    turns as in Zeng et al., arXiv:2505.11821, Sec. 3; there two turns, here any number.

    >>> mask = jnp.array([[True, False, True], [True, False, True]])
    >>> rewards, groups = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), jnp.array([0, 0])
    >>> print(grpo_turns(rewards, mask, groups).round(4))
    [[ 0.      0.     -0.7071]
     [ 0.      0.      0.7071]]
    """
    before = jnp.pad(response_mask[:, :-1], ((0, 0), (1, 0)))
    begins = response_mask & ~before
    turns = jnp.cumsum(begins, axis=1) - 1  # number of each token's turn
    to_go = masked.returns_to_go(rewards, response_mask)
    width = response_mask.shape[1]
    # Every turn is a row of its own, in a group of the same turns.
    own_group = (group_ids[:, None] * width + turns).ravel()
    _, compact = jnp.unique(own_group, return_inverse=True, size=own_group.size)
    each = grpo(to_go.ravel(), compact, begins.ravel(), group_std)
    at_begin = jnp.where(begins, each.reshape(begins.shape), 0.0)
    # The last beginning up to a token is that of its turn.
    latest = jax.lax.cummax(jnp.where(begins, jnp.arange(width), 0), axis=1)
    return jnp.where(response_mask, jnp.take_along_axis(at_begin, latest, axis=1), 0.0)


def grpo_passk(
    scores: PerRow, group_ids: GroupIds, members: RowMask, group_std: bool = True
) -> PerRow:
    """Returns an advantage for the best response of each group only: best minus second best.

    Where two responses share the best score all of the group get 0: without one of them the best
    of k would be the same. In a group of one the second best is 0. arXiv:2503.19595.
    Deviation: verl refuses a group of one, here it keeps its score.

    >>> scores, groups = jnp.array([3.0, 1.0, 0.0]), jnp.array([0, 0, 0])
    >>> print(grpo_passk(scores, groups, jnp.ones(3, bool), group_std=False))
    [2. 0. 0.]
    """
    is_best = members & (scores == masked.group_max(scores, group_ids, members))
    num_best = masked.group_sum(is_best.astype(scores.dtype), group_ids, members)
    second = masked.group_max(scores, group_ids, members & ~is_best)
    lead = scores - jnp.where(jnp.isfinite(second), second, 0.0)
    if group_std:
        lead = lead / (masked.group_deviation(scores, group_ids, members) + EPSILON)
    return jnp.where(is_best & (num_best == 1.0), lead, 0.0)


def gdpo(
    term_rewards: Float[Array, "terms B"],
    term_weights: Float[Array, "terms B"],
    response_mask: Mask,
    group_ids: GroupIds,
    members: RowMask,
    group_std: bool = True,
) -> PerToken:
    """Returns the weighted sum of each reward term's own GRPO advantage, whitened over tokens.

    Each term is normalized alone, so a rare large term does not hide the others. `term_rewards`
    are unweighted, `term_weights` 0 where a term does not apply to the row. The sum of the terms,
    and a KL in the reward, play no part. Liu et al., GDPO, arXiv:2601.05242.
    Deviation: verl divides by the standard deviation always, here `group_std=False` is heeded.

    >>> term_rewards, one = jnp.array([[1.0, 0.0], [0.0, 100.0]]), jnp.ones((2, 1), bool)
    >>> advantages = gdpo(term_rewards, jnp.ones((2, 2)), one, jnp.array([0, 0]), one[:, 0])
    >>> print(abs(advantages.ravel()).round(1))
    [0. 0.]
    """
    row_advantages = sum(
        weights * grpo(scores, group_ids, members, group_std)
        for scores, weights in zip(term_rewards, term_weights, strict=True)
    )
    return _whiten_rows(row_advantages, response_mask)


def rloo(scores: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns the score minus the mean of the other scores of its group.

        score - (group_sum - score) / (G - 1)

    Ahmadian et al., arXiv:2402.14740, section 3.2.
    Deviation: verl's `rloo_vectorized` gives a group of one 0, its `rloo` the score.

    >>> print(rloo(jnp.array([3.0, 1.0, 2.0]), jnp.array([0, 0, 0]), jnp.ones(3, bool)))
    [ 1.5 -1.5  0. ]
    """
    size = masked.group_size(group_ids, members)
    others = jnp.where(size > 1.0, size / jnp.maximum(size - 1.0, 1.0), 1.0)
    return _centered(scores, group_ids, members) * others


def reinforce_plus_plus_baseline(
    scores: PerRow, group_ids: GroupIds, members: RowMask, response_mask: Mask
) -> PerToken:
    """Returns the score minus its group's mean, whitened over all tokens of the batch.

    The scale is the batch's: a group of nearly equal scores does not get large advantages.
    Hu et al., REINFORCE++, arXiv:2501.03262.

    >>> one = jnp.ones((2, 1), bool)
    >>> advantages = reinforce_plus_plus_baseline(
    ...     jnp.array([3.0, 1.0]), jnp.array([0, 0]), one[:, 0], one)
    >>> print(advantages.ravel().round(4))
    [ 0.7071 -0.7071]
    """
    return _whiten_rows(_centered(scores, group_ids, members), response_mask)


def opo(scores: PerRow, group_ids: GroupIds, members: RowMask, response_mask: Mask) -> PerRow:
    """Returns the score minus the length-weighted mean of its group's scores.

    If the squared norm of a response's gradient grows with its length, this baseline gives the
    least gradient variance. Hao et al., OPO, arXiv:2505.23585.

    >>> mask = jnp.array([[True, True, True], [True, False, False]])
    >>> print(opo(jnp.array([4.0, 0.0]), jnp.array([0, 0]), jnp.ones(2, bool), mask))
    [ 1. -3.]
    """
    lengths = jnp.sum(response_mask, axis=-1).astype(scores.dtype)
    total = jnp.maximum(masked.group_sum(lengths, group_ids, members), 1.0)
    # Around the group's mean, so that equal scores give exactly 0 and an offset costs no digits.
    centered = masked.group_centered(scores, group_ids, members)
    weighted = masked.group_sum(lengths * centered, group_ids, members) / total
    alone = masked.group_size(group_ids, members) <= 1.0
    return jnp.where(alone, scores, centered - weighted)


def gpg(scores: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns the score minus its group's mean, scaled up for the rows without score.

        alpha * (score - mean),   alpha = rows / max(rows with score != 0, 1)

    Chu et al., GPG, arXiv:2504.02546.

    >>> print(gpg(jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.ones(2, bool)))
    [ 1. -1.]
    """
    scored = jnp.maximum(jnp.sum(members & (scores != 0.0)), 1)
    alpha = jnp.sum(members) / scored
    return alpha * _centered(scores, group_ids, members)


ESTIMATORS: dict[str, Callable[..., AdvantagesAndReturns | Array]] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "grpo_turns": grpo_turns,
    "maxrl": maxrl,
    "lite_ppo": lite_ppo,
    "batch_std": functools.partial(lite_ppo, of_advantages=True),
    "gdpo": gdpo,
    "rloo": rloo,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "gpg": gpg,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": functools.partial(optimal_token_baseline, count_tools=False),
    "online_dpo": online_dpo,
    "xpo": xpo,
    "nash_md": nash_md,
    "remax": remax,
    "reinforce_plus_plus": reinforce_plus_plus,
}


def estimate(
    config: AlgorithmConfig, *, rewards: PerToken, response_mask: Mask, **available: Any
) -> AdvantagesAndReturns:
    """Calls the estimator `config.advantage` with the values named by its parameters.

    docs/custom_algorithm.md lists what a user's function may name, as far as it is `available`. It
    returns advantages and returns [B, T]; what is outside the mask is discarded. `rewards` include
    the KL penalty. `response_mask` is not the mask that rejection left: a rejected token has no
    gradient, but its reward still counts. Raises what `lookup.resolve` and `lookup.call_by_name`
    raise, or FunctionError for another result.

    >>> advantages, _ = estimate(
    ...     AlgorithmConfig(advantage="rloo"), response_mask=jnp.ones((2, 1), bool),
    ...     rewards=jnp.array([[1.0], [0.0]]), group_ids=jnp.array([0, 0]))
    >>> print(advantages.ravel())
    [ 1. -1.]
    """
    where = f"config.algorithm.advantage={config.advantage!r}"
    named = {
        "config": config,
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
        "group_std": config.group_std,
        "rewards": rewards,
        "response_mask": response_mask,
        "scores": masked.sum(rewards, response_mask, -1),
        "members": jnp.any(response_mask, axis=-1),
    }
    function = resolve(config.advantage, ESTIMATORS, "advantage estimator")
    result = call_by_name(function, named | available, where)
    if config.advantage in ESTIMATORS and not isinstance(result, tuple):
        advantages = result if result.ndim == 2 else result[:, None]
        advantages = jnp.where(response_mask, advantages, 0.0)
        return advantages, advantages
    shapes = [jnp.shape(array) for array in result] if isinstance(result, tuple | list) else []
    if shapes != [response_mask.shape, response_mask.shape]:
        got = f"arrays of shapes {shapes}" if shapes else type(result).__name__
        raise FunctionError(
            f"{where}: returned {got}; an estimator returns (advantages, returns), both of"
            f" response_mask's shape {response_mask.shape}"
        )
    advantages, returns = masked.zero_outside(response_mask, *map(jnp.asarray, result))
    return advantages, returns
