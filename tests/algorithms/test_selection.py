import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.selection import (
    SELECTIONS,
    high_entropy_tokens,
    m2po_tokens,
    select,
)
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.types import Minibatch

MASK = jnp.arange(40) < jnp.array([[40], [25], [0], [33]])
DRAW = np.random.default_rng(0)
LOG_PROBS = jnp.asarray(-DRAW.exponential(1.0, MASK.shape), jnp.float32)
ADVANTAGES = jnp.asarray(DRAW.normal(size=MASK.shape), jnp.float32)
WIDE = {
    "clip_cov": {"low": -99.0, "high": 99.0, "share": 0.1},
    "kl_cov": {"share": 0.1},
}


def chosen(name, log_probs=LOG_PROBS, advantages=ADVANTAGES, mask=MASK, seed=0, **loss_args):
    fields = dict(loss_mask=mask, advantages=advantages, old_log_probs=log_probs)
    config = AlgorithmConfig(policy_loss=name, loss_args=WIDE.get(name, {}) | loss_args)
    return np.asarray(
        select(
            config,
            log_probs,
            dataclasses.replace(Minibatch.zeros(*log_probs.shape), **fields),
            jax.random.key(seed),
        )
    )


@pytest.mark.parametrize("name", WIDE)
def test_a_tenth_of_the_tokens_is_chosen(name):
    selection = chosen(name)
    assert selection.sum() == 9  # of 98
    assert not selection[~MASK].any()


@pytest.mark.parametrize("name", WIDE)
def test_at_least_one_token_is_chosen(name):
    assert chosen(name, share=1e-6).sum() == 1


@pytest.mark.parametrize("name", SELECTIONS)
def test_padding_and_garbage_change_nothing(name):
    def spoil(array):
        return jnp.pad(jnp.where(MASK, array, jnp.nan), ((0, 1), (0, 5)), constant_values=jnp.nan)

    padded = chosen(name, spoil(LOG_PROBS), spoil(ADVANTAGES), jnp.pad(MASK, ((0, 1), (0, 5))))
    np.testing.assert_array_equal(padded[:-1, :-5], chosen(name))
    assert not padded[-1].any()
    assert not padded[:, -5:].any()


def test_kl_cov_takes_the_largest_covariances():
    selection = chosen("kl_cov")
    valid = np.asarray(MASK)
    advantages, log_probs = np.asarray(ADVANTAGES)[valid], np.asarray(LOG_PROBS)[valid]
    covariances = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    assert set(np.argsort(covariances)[-9:]) == set(np.flatnonzero(selection[valid]))
    order = jnp.array([3, 1, 0, 2])
    permuted = chosen("kl_cov", LOG_PROBS[order], ADVANTAGES[order], MASK[order])
    np.testing.assert_array_equal(permuted, selection[order])


def test_clip_cov_draws_by_its_key_and_between_its_bounds():
    np.testing.assert_array_equal(chosen("clip_cov"), chosen("clip_cov"))
    assert (chosen("clip_cov") != chosen("clip_cov", seed=1)).any()
    few = chosen("clip_cov", low=1.0, high=2.0, share=1.0)
    valid = np.asarray(MASK)
    advantages, log_probs = np.asarray(ADVANTAGES), np.asarray(LOG_PROBS)
    covariances = (advantages - advantages[valid].mean()) * (log_probs - log_probs[valid].mean())
    np.testing.assert_array_equal(few, valid & (covariances > 1.0) & (covariances < 2.0))
    assert few.any()


def test_clip_cov_leaves_out_what_the_ratio_clip_stops():
    log_probs = jnp.array([[-1.0, -1.0]])
    fields = dict(
        loss_mask=jnp.ones((1, 2), bool),
        advantages=jnp.ones((1, 2)),
        old_log_probs=jnp.array([[-1.0, -2.0]]),  # ratio e at a positive advantage
    )
    loss_args = WIDE["clip_cov"] | {"share": 1.0}
    config = AlgorithmConfig(policy_loss="clip_cov", loss_args=loss_args)
    selection = select(
        config,
        log_probs,
        dataclasses.replace(Minibatch.zeros(*log_probs.shape), **fields),
        jax.random.key(0),
    )
    np.testing.assert_array_equal(selection, [[True, False]])


def test_other_losses_select_nothing():
    assert not chosen("vanilla").any()


RATIOS = jnp.asarray(DRAW.normal(0.0, 0.3, MASK.shape), jnp.float32)


def mean_square(selection=False, ratios=RATIOS):
    """That of the tokens that moved the way of their advantage, without the selection."""
    moved = np.asarray(MASK & (ratios * ADVANTAGES > 0)) & ~np.asarray(selection)
    return np.square(np.asarray(ratios))[moved].mean()


@pytest.mark.parametrize("budget", [0.0, 0.01, 0.04, 0.09, 1.0])
def test_m2po_takes_the_fewest_tokens_that_meet_its_budget(budget):
    selection = np.asarray(m2po_tokens(RATIOS, ADVANTAGES, MASK, budget))
    candidates = np.asarray(MASK & (RATIOS * ADVANTAGES > 0))
    assert not (selection & ~candidates).any()
    assert selection.any() == (mean_square() > budget)
    squares = np.square(np.asarray(RATIOS))
    if selection.any():
        assert squares[candidates & ~selection].max(initial=0) < squares[selection].min()
        one_less = selection & (squares > squares[selection].min())
        assert mean_square(one_less) > budget
    if budget:
        assert mean_square(selection) <= budget
    else:
        np.testing.assert_array_equal(selection, candidates)
    order = jnp.array([3, 1, 0, 2])
    permuted = m2po_tokens(RATIOS[order], ADVANTAGES[order], MASK[order], budget)
    np.testing.assert_array_equal(permuted, selection[order])


def test_m2po_treats_equal_tokens_alike():
    ones = jnp.ones((1, 4))
    selection = m2po_tokens(jnp.array([[0.5, 0.1, 0.5, 0.1]]), ones, ones > 0, 0.1)
    np.testing.assert_array_equal(selection, [[True, False, True, False]])


@pytest.mark.parametrize("share", [0.02, 0.2, 0.9, 1.0])
def test_high_entropies_are_a_share_of_all(share):
    entropies = jnp.asarray(DRAW.exponential(1.0, MASK.shape), jnp.float32)
    chosen = np.asarray(high_entropy_tokens(entropies, MASK, share))
    assert not chosen[~MASK].any()
    assert abs(chosen.sum() - share * 98) <= 1
    others = np.asarray(MASK) & ~chosen
    assert np.asarray(entropies)[others].max(initial=0) <= np.asarray(entropies)[chosen].min()
    garbage = jnp.where(MASK, entropies, jnp.nan)
    np.testing.assert_array_equal(high_entropy_tokens(garbage, MASK, share), chosen)
    assert not high_entropy_tokens(entropies, jnp.zeros_like(MASK), share).any()
