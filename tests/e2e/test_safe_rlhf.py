"""Safe-RLHF on a choice that is worth as much as it costs, and without its multiplier."""

import jax
import numpy as np
import pytest
import recipe_settings

from jaxrl_llm.trainer import rl

LIMIT, KL_COEF = 0.4, 0.5
# A response is one token; a lower-case letter is what is wanted, and what costs.
CHOICE = """
def lower(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.islower())
"""


def logit(p):
    return np.log(p / (1.0 - p))


@pytest.mark.slow
def test_the_cost_ends_at_its_limit_and_the_multiplier_settles(tmp_path, one_device):
    """The optimum is known in closed form.

    Reward and cost of a letter are both 1. With p the share of letters, and `r` that of the
    reference, the policy maximizes (1 - m) / (1 + m) p - kl_coef KL(p || r): without a
    multiplier m nearly all responses are letters. At the optimum

        (1 - m) / (1 + m) = kl_coef (logit(p) - logit(r)),   p = cost_limit

    A random model gives each of the 104 tokens, 26 of them letters, about the same chance.
    """
    (tmp_path / "choice.py").write_text(CHOICE)
    choice = {"function": f"{tmp_path / 'choice.py'}:lower"}
    changes = {
        "warm_start": {"num_steps": 0},
        "rollout": {"max_response_tokens": 1},
        "rewards": {"functions": {"answer": choice}, "cost_functions": {"harm": choice}},
        "algorithm": {"cost_limit": LIMIT, "kl_coef": KL_COEF, "multiplier_lr": 0.5},
        "trainer": {"num_steps": 150, "prompts_per_step": 128},
        "metrics": {"rollouts_every": 0},
    }
    rl.train(recipe_settings.config("safe_rlhf", changes), tmp_path / "run")

    found = recipe_settings.metrics(tmp_path / "run").values()
    costs = np.array([data["critic/cost/mean"] for data in found])
    multipliers = np.array([data["safe/multiplier"] for data in found])
    # 50 steps of 128 responses have a standard error of 0.006.
    assert costs[-50:].mean() == pytest.approx(LIMIT, rel=0.1)
    pull = KL_COEF * (logit(LIMIT) - logit(26 / 104))
    expected = (1.0 - pull) / (1.0 + pull)
    # The share of letters of this one random model is not exactly 26 / 104.
    assert multipliers[-50:].mean() == pytest.approx(expected, abs=0.1)
    # The noise of 128 costs moves it by 0.01 a step; it came from 1.
    assert multipliers[-50:].std() < 0.03
    assert abs(multipliers[-25:].mean() - multipliers[-50:-25].mean()) < 0.03


@pytest.mark.slow
def test_without_its_multiplier_it_is_ppo_to_the_bit(train):
    same = {"gae_lambda": 0.95, "kl_coef": 0.01}
    steps = {"num_steps": 3}
    ppo, of_ppo = train("ppo", {"algorithm": same, "trainer": steps}, "ppo")
    settings = {"algorithm": {**same, "multiplier_init": 0.0}, "trainer": steps}
    safe, of_safe = train("safe_rlhf", settings, "safe")
    for ours, theirs in zip(*map(jax.tree.leaves, (safe.policy, ppo.policy)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    found = recipe_settings.metrics(of_safe)
    assert all(data["safe/multiplier"] == 0.0 for data in found.values())
    assert found[3]["safe/cost"] > 0.0 and found[3]["cost_critic/grad_norm"] > 0.0
    for step, data in recipe_settings.metrics(of_ppo).items():
        assert data.items() <= found[step].items()


@pytest.mark.slow
def test_reward_and_cost_may_be_models(train):
    """Each is trained on pairs of its own; wrong sums cost more."""
    models = {"models": {"good": {}}, "cost_models": {"harm": {}}}
    changes = {
        "rewards": {**models, "functions": {}, "cost_functions": {}},
        "preference": {"num_steps": 20, "batch_size": 16},
        "algorithm": {"cost_limit": 0.0},
        "trainer": {"num_steps": 2},
    }
    state, workdir = train("safe_rlhf", changes)
    for data in recipe_settings.metrics(workdir).values():
        assert abs(data["critic/cost/mean"] + data["critic/score/mean"]) > 1e-5, "two models"
        assert data["critic/cost/max"] > data["critic/cost/min"]
    assert np.isfinite(state.log_multiplier) and state.log_multiplier != 0.0
