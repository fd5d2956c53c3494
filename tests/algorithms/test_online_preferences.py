"""Online DPO, XPO and Nash-MD: gradients of the losses that the papers write down."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import estimate
from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.losses import policy_objective
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.config.recipes import RECIPES
from jaxrl_llm.types import Minibatch

P, G, T = 3, 4, 5


def arrays(seed):
    rng = np.random.default_rng(seed)
    log_probs, ref = (jnp.asarray(-rng.exponential(size=(P * G, T)), jnp.float32) for _ in range(2))
    mask = np.arange(T) < rng.integers(1, T + 1, P * G)[:, None]
    scores = rng.permutation(P * G).astype(np.float32)
    return log_probs, ref, jnp.asarray(mask), scores


def gradient(config, log_probs, ref, mask, scores, group_ids):
    """The policy's gradient in the first update of a step."""
    rewards = jnp.zeros_like(log_probs).at[:, 0].set(scores)
    advantages, returns = estimate(
        config, rewards=rewards, response_mask=mask, old_log_probs=log_probs, ref_log_probs=ref,
        group_ids=group_ids,
    )  # fmt: skip
    fields = vars(Minibatch.zeros(*mask.shape)) | {
        "response_mask": mask, "loss_mask": mask, "old_log_probs": log_probs,
        "rollout_log_probs": log_probs, "ref_log_probs": ref, "advantages": advantages,
        "returns": returns, "correction_weights": jnp.ones_like(log_probs),
    }  # fmt: skip
    minibatch, counts = Minibatch(**fields), minibatch_denominators(mask)
    loss = lambda x: policy_objective(config, x, x * 0, minibatch, mask, counts)[0]  # noqa: E731
    return jax.grad(loss)(log_probs)


def by_groups(x, mask):
    return (x * mask).sum(-1).reshape(P, G)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_the_losses(seed):
    log_probs, ref, mask, scores = arrays(seed)
    groups = np.repeat(np.arange(P), G)
    ranked = scores.reshape(P, G)
    best, worst = ranked.argmax(1), ranked.argmin(1)

    def dpo(x, beta):
        margins = by_groups(x - ref, mask)
        picked = margins[jnp.arange(P), best] - margins[jnp.arange(P), worst]
        return -jax.nn.log_sigmoid(beta * picked).mean()

    def bonus(x):
        # Samples of the policy, weighted to those of the reference.
        weights = jax.nn.softmax(by_groups(ref - log_probs, mask), axis=1)
        return (weights * by_groups(x, mask)).sum(1).mean()

    def xpo(x):
        return dpo(x, 0.3) + 0.2 * bonus(x)

    def nash(x):
        weights = jnp.exp(-0.25 * by_groups(log_probs - ref, mask))
        wins = jax.nn.sigmoid(ranked[:, :, None] - ranked[:, None]) - 0.5
        others = weights[:, None] * (1 - jnp.eye(G))
        advantages = (wins * others).sum(2) / others.sum(2)
        kl = by_groups(0.5 * (x - ref) ** 2, mask).mean()
        return -(advantages * by_groups(x, mask)).mean() + 0.1 * kl

    for recipe, settings, loss in (
        ("online_dpo", {"dpo_beta": 0.5}, lambda x: dpo(x, 0.5)),
        ("xpo", {"dpo_beta": 0.3, "exploration_coef": 0.2}, xpo),
        ("nash_md", {"mixture_coef": 0.25}, nash),
    ):
        config = AlgorithmConfig(**{**RECIPES[recipe], "samples_per_prompt": G, **settings})
        found = gradient(config, log_probs, ref, mask, scores, groups)
        np.testing.assert_allclose(found, jax.grad(loss)(log_probs), rtol=2e-5, atol=1e-7)


def test_equal_scores_are_no_pair_and_share_their_weight():
    config = AlgorithmConfig(**RECIPES["online_dpo"])
    zeros, mask = jnp.zeros((7, 1)), jnp.ones((7, 1), bool)
    scores = jnp.array([[1.0], [1.0], [0.0], [2.0], [2.0], [5.0], [0.5]])
    groups = np.array([0, 0, 0, 1, 1, 2, 0])
    advantages, _ = estimate(
        config, rewards=scores, response_mask=mask, old_log_probs=zeros, ref_log_probs=zeros,
        group_ids=groups,
    )  # fmt: skip
    # Four responses, beta / 2 = 0.05: two share the best score, one has neither.
    np.testing.assert_allclose(advantages[:, 0], [0.1, 0.1, -0.2, 0, 0, 0, 0], atol=1e-7)
