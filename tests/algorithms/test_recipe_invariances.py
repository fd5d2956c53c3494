"""Invariances of every recipe, every policy loss and every estimator, from scores to gradients.

Nothing may depend on the order of rows, on padding columns or rows, on values outside
the mask (NaN included), or on how a minibatch is cut into microbatches.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import estimate
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.corrections import correct
from jaxrl_llm.algorithms.losses import (
    observation_loss,
    observation_mask,
    policy_objective,
    value_loss,
)
from jaxrl_llm.algorithms.safe_rlhf import safe_advantages
from jaxrl_llm.algorithms.selection import high_entropy_tokens
from jaxrl_llm.algorithms.shaping import kl_shaped, uniform_groups
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.config.recipes import ADVANTAGES, AGGREGATIONS, POLICY_LOSSES, RECIPES
from jaxrl_llm.types import Minibatch

CONFIGS = {name: AlgorithmConfig(**row) for name, row in RECIPES.items()}
# What no recipe uses, in pairs.
CONFIGS |= {
    f"{advantage} {loss}": AlgorithmConfig(
        advantage=advantage, policy_loss=loss, aggregation=aggregation
    )
    for advantage, loss, aggregation in (
        ("grpo_passk", "clip_cov", "token-sum"),
        ("grpo_turns", "vanilla", "token-mean"),
        ("gdpo", "kl_cov", "token-mean"),
        ("reinforce_plus_plus_baseline", "dppo_tv", "seq-mean-token-sum"),
        ("optimal_token_baseline", "dppo_kl", "token-mean"),
        ("tir_optimal_token_baseline", "dro", "token-mean"),
    )
}
CONFIGS |= {
    "vespo corrected": AlgorithmConfig(policy_loss="vespo", correction="token"),
    "kpop": AlgorithmConfig(
        rejections=("token_binary_kl",), rejection_lows=(0.0,), rejection_highs=(0.02,)
    ),
    "off-policy gspo": AlgorithmConfig(
        policy_loss="gspo", off_policy_threshold=0.0, kl_in="loss", kl_unbiased=True
    ),
    "observations": AlgorithmConfig(observation_coef=0.3, aggregation="seq-mean-token-sum"),
    "corrected": AlgorithmConfig(
        correction="sequence",
        correction_normalize=True,
        rejections=("token_k1", "seq_max_k3"),
        rejection_lows=(0.6, 0.0),
        rejection_highs=(1.7, 0.2),
        entropy_coef=0.01,
        kl_in="loss",
    ),
}
everywhere = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
# float32, sums in another order; advantages are divided by small standard deviations.
CLOSE = dict(rtol=2e-5, atol=2e-6)
ROWS, WIDTH = 8, 9


@dataclasses.dataclass
class Batch:
    """What a step knows before the mathematics begins; arrays are [B] or [B, T] or [K, B]."""

    mask: np.ndarray
    group_ids: np.ndarray
    scores: np.ndarray
    costs: np.ndarray
    baselines: np.ndarray
    term_rewards: np.ndarray
    log_probs: np.ndarray
    old_log_probs: np.ndarray
    ref_log_probs: np.ndarray
    rollout_log_probs: np.ndarray
    entropies: np.ndarray
    sum_squared_probs: np.ndarray
    values: np.ndarray
    cost_values: np.ndarray
    selection: np.ndarray

    def rows(self, order):
        """Returns the rows `order` of every array."""
        pick = {name: value[order] for name, value in vars(self).items() if name != "term_rewards"}
        return Batch(**pick, term_rewards=self.term_rewards[:, order])

    def token_arrays(self):
        return {name: x for name, x in vars(self).items() if x.shape == self.mask.shape}


def random_batch(seed=0):
    draw = np.random.default_rng(seed)
    first = draw.integers(1, 3, ROWS)[:, None]
    length = draw.integers(1, WIDTH - 2, ROWS)[:, None]
    columns = np.arange(WIDTH)
    mask = (columns >= first) & (columns < first + length)
    mask[0, 3:5] = False  # a tool's answer
    mask[0, 6] = True
    old = -draw.exponential(1.0, mask.shape)

    def near(scale):
        return (old + scale * draw.normal(size=mask.shape)).astype(np.float32)

    def numbers(*shape):
        return draw.normal(size=shape).astype(np.float32)

    return Batch(
        mask=mask,
        group_ids=np.array([5, 2, 5, 2, 7, 5, 7, 2], np.int32),
        scores=numbers(ROWS),
        costs=numbers(ROWS),
        baselines=numbers(ROWS),
        term_rewards=numbers(2, ROWS),
        log_probs=near(0.3),
        old_log_probs=old.astype(np.float32),
        ref_log_probs=near(0.3),
        rollout_log_probs=near(0.2),
        entropies=np.abs(numbers(*mask.shape)),
        sum_squared_probs=draw.uniform(0.1, 0.9, mask.shape).astype(np.float32),
        values=numbers(*mask.shape),
        cost_values=numbers(*mask.shape),
        selection=mask & (draw.uniform(size=mask.shape) < 0.3),
    )


def estimates(config, batch):
    """Returns the minibatch that `batch` becomes, and the metrics of the correction."""
    rewards, current_kl = kl_shaped(
        config, config.kl_coef, batch.scores, batch.old_log_probs, batch.ref_log_probs, batch.mask
    )
    weights, loss_mask, metrics = correct(
        config, batch.old_log_probs, batch.rollout_log_probs, batch.mask
    )
    if config.safe:
        of_policy = batch.old_log_probs, batch.ref_log_probs, batch.mask
        costs, _ = kl_shaped(config, -config.kl_coef, batch.costs, *of_policy)
        advantages, returns, cost_returns = safe_advantages(
            config, 0.5, rewards, costs, batch.values, batch.cost_values, batch.mask
        )
    else:
        cost_returns = jnp.zeros_like(rewards)
        advantages, returns = estimate(
            config,
            response_mask=batch.mask,
            rewards=rewards,
            values=batch.values,
            group_ids=batch.group_ids,
            baselines=batch.baselines,
            old_log_probs=batch.old_log_probs,
            ref_log_probs=batch.ref_log_probs,
            sum_squared_probs=batch.sum_squared_probs,
            correction_weights=weights,
            term_rewards=batch.term_rewards,
            term_weights=np.ones_like(batch.term_rewards),
        )
    if config.mask_uniform_groups:
        members = batch.mask.any(-1)
        loss_mask &= ~uniform_groups(batch.scores, batch.group_ids, members)[:, None]
    if config.entropy_share < 1:
        chosen = high_entropy_tokens(batch.entropies, loss_mask, config.entropy_share)
        advantages = jnp.where(chosen, advantages, 0.0)
    minibatch = Minibatch(
        tokens=np.zeros(batch.mask.shape, np.int32),
        lengths=last_positions(batch.mask) + 1,
        response_mask=batch.mask,
        loss_mask=loss_mask,
        old_log_probs=batch.old_log_probs,
        ref_log_probs=batch.ref_log_probs,
        rollout_log_probs=batch.rollout_log_probs,
        advantages=advantages,
        returns=returns,
        values=batch.values,
        cost_returns=cost_returns,
        cost_values=batch.cost_values,
        correction_weights=weights,
        proximal_shares=np.zeros(batch.mask.shape, np.float32),
    )
    return minibatch, metrics | {"current_kl": current_kl}


def last_positions(mask):
    return np.where(mask.any(-1), mask.shape[1] - 1 - mask[:, ::-1].argmax(-1), -1)


def learn(config, batch, minibatch, denominators, observation_counts=None):
    """Returns the summed losses, their metrics, and gradients of log-probs, entropies, values."""
    observations = observation_mask(minibatch.response_mask, minibatch.lengths)
    counts = observation_counts or minibatch_denominators(observations, loss_scale=7.0)

    def losses(log_probs, entropies, values):
        policy, policy_metrics = policy_objective(
            config, log_probs, entropies, minibatch, batch.selection, denominators
        )
        critic, critic_metrics = value_loss(
            config,
            values,
            minibatch.values,
            minibatch.returns,
            minibatch.loss_mask,
            denominators,
        )
        observed, observation_metrics = observation_loss(config, log_probs, observations, counts)
        metrics = policy_metrics | critic_metrics
        if config.observation_coef:
            policy, metrics = policy + observed, metrics | observation_metrics
        return policy + critic, metrics

    (loss, metrics), gradients = jax.value_and_grad(losses, argnums=(0, 1, 2), has_aux=True)(
        jnp.asarray(batch.log_probs), jnp.asarray(batch.entropies), jnp.asarray(batch.values * 0.5)
    )
    return metrics | {"loss": loss}, gradients


def run(config, batch):
    """Returns scalars, and [B, T] arrays, of a whole step."""
    minibatch, metrics = estimates(config, batch)
    denominators = minibatch_denominators(minibatch.loss_mask, loss_scale=7.0)
    scalars, gradients = learn(config, batch, minibatch, denominators)
    arrays = dict(
        advantages=minibatch.advantages,
        returns=minibatch.returns,
        cost_returns=minibatch.cost_returns,
        weights=minibatch.correction_weights,
        loss_mask=minibatch.loss_mask * 1.0,
        policy_gradient=gradients[0],
        entropy_gradient=gradients[1],
        value_gradient=gradients[2],
    )
    return metrics | scalars, {name: np.asarray(array) for name, array in arrays.items()}


@functools.cache
def first_run(config):
    return run(config, random_batch())


def assert_equal_runs(ours, theirs, rearranged=lambda array: array):
    assert ours[0].keys() == theirs[0].keys()
    for name, scalar in ours[0].items():
        assert np.isfinite(scalar), name
        np.testing.assert_allclose(theirs[0][name], scalar, err_msg=name, **CLOSE)
    for name, array in ours[1].items():
        np.testing.assert_allclose(theirs[1][name], rearranged(array), err_msg=name, **CLOSE)


@everywhere
def test_the_order_of_rows_is_free(config):
    batch = random_batch()
    order = np.random.default_rng(1).permutation(ROWS)
    assert_equal_runs(first_run(config), run(config, batch.rows(order)), lambda x: x[order])


@everywhere
def test_padding_columns_and_rows_change_nothing(config):
    batch = random_batch()

    def pad(array):
        return np.pad(array, ((0, 2), (2, 3)))

    tokens = {name: pad(array) for name, array in batch.token_arrays().items()}
    rows = {
        name: np.pad(array, (0, 2), constant_values=5)  # a group that others belong to
        for name, array in vars(batch).items()
        if array.shape == (ROWS,)
    }
    terms = np.pad(batch.term_rewards, ((0, 0), (0, 2)), constant_values=5.0)
    padded = dataclasses.replace(batch, **tokens, **rows, term_rewards=terms)
    assert_equal_runs(first_run(config), run(config, padded), pad)


def read(config, batch):
    """Returns the tokens that bear a loss: responses, and what tools answer if that is learned."""
    observed = observation_mask(
        jnp.asarray(batch.mask), jnp.asarray(last_positions(batch.mask) + 1)
    )
    return batch.mask | np.asarray(observed) if config.observation_coef else batch.mask


@everywhere
def test_values_outside_the_mask_do_not_matter(config):
    batch = random_batch()
    garbage = np.resize([np.nan, np.inf, -1e30, -np.inf], batch.mask.shape)
    spoiled = dataclasses.replace(
        batch,
        **{
            name: np.where(read(config, batch), array, garbage).astype(np.float32)
            for name, array in batch.token_arrays().items()
            if array.dtype != bool
        },
    )
    theirs = run(config, spoiled)
    assert_equal_runs(first_run(config), theirs)
    for name, array in theirs[1].items():
        np.testing.assert_array_equal(array[~read(config, batch)], 0.0, err_msg=name)


@everywhere
def test_microbatches_sum_to_the_minibatch(config):
    batch = random_batch()
    minibatch, _ = estimates(config, batch)
    denominators = minibatch_denominators(minibatch.loss_mask, loss_scale=7.0)
    whole, whole_gradients = learn(config, batch, minibatch, denominators)
    observations = observation_mask(minibatch.response_mask, minibatch.lengths)
    counts = minibatch_denominators(observations, loss_scale=7.0)
    totals, gradients = dict.fromkeys(whole, 0.0), []
    for rows in np.split(np.arange(ROWS), [4]):
        microbatch = jax.tree.map(lambda array, rows=rows: array[rows], minibatch)
        metrics, parts = learn(config, batch.rows(rows), microbatch, denominators, counts)
        totals = {name: totals[name] + metrics[name] for name in whole}
        gradients.append(parts)
    for name in whole:
        np.testing.assert_allclose(totals[name], whole[name], rtol=1e-6, atol=1e-6, err_msg=name)
    for parts, array in zip(zip(*gradients, strict=True), whole_gradients, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), array, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["corrected", "safe_rlhf"])
def test_a_jitted_step_is_the_same(name):
    config, batch = CONFIGS[name], random_batch()
    minibatch, _ = estimates(config, batch)
    jitted_minibatch, _ = jax.jit(lambda: estimates(config, batch))()
    for ours, theirs in zip(*map(jax.tree.leaves, (minibatch, jitted_minibatch)), strict=True):
        np.testing.assert_allclose(theirs, ours, **CLOSE)
    denominators = minibatch_denominators(minibatch.loss_mask, loss_scale=7.0)
    plain, _ = learn(config, batch, minibatch, denominators)
    jitted = jax.jit(lambda m, d: learn(config, batch, m, d)[0])(minibatch, denominators)
    for key, value in plain.items():
        np.testing.assert_allclose(jitted[key], value, err_msg=key, **CLOSE)


@everywhere
def test_an_empty_batch_is_harmless(config):
    batch = random_batch()
    nothing = dataclasses.replace(
        batch, mask=np.zeros_like(batch.mask), selection=np.zeros_like(batch.mask)
    )
    scalars, arrays = run(config, nothing)
    for name, scalar in scalars.items():
        assert np.isfinite(scalar), name
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, 0.0, err_msg=name)


def test_every_name_is_exercised():
    for names, field in (
        (ADVANTAGES, "advantage"),
        (POLICY_LOSSES, "policy_loss"),
        (AGGREGATIONS, "aggregation"),
    ):
        assert {getattr(config, field) for config in CONFIGS.values()} == set(names)
