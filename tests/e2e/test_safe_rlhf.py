"""Safe-RLHF on a choice that is worth as much as it costs, and without its multiplier."""

import json
import random
import shutil

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


def string(draw, num_letters, length=4):
    """Returns a text of letters and digits in any order."""
    letters = [draw.choice("abcdefgh") for _ in range(num_letters)]
    characters = letters + [draw.choice("12345678") for _ in range(length - num_letters)]
    draw.shuffle(characters)
    return "".join(characters)


def write_wishes(folder):
    """Writes answers to learn from, and pairs of two people who want the opposite.

    The one wants letters, for the other one every letter costs: the answer with more of them is
    preferred, or not, with the probability of Bradley and Terry for a score of one a letter.
    """
    draw = random.Random(0)
    files: dict[str, list[dict[str, str]]] = {"answers": [], "wanted": [], "cheap": []}
    for i in range(2048):
        prompt = f"{i % 10}+{i // 10 % 10}="
        answer = string(draw, draw.choice([0, 1, 1, 2]))
        files["answers"].append({"data_source": "texts", "prompt": prompt, "completion": answer})
        for name, sign in (("wanted", 1.0), ("cheap", -1.0)):
            counts = draw.sample(range(5), 2)
            good = draw.random() < 1 / (1 + np.exp(-sign * (counts[0] - counts[1])))
            chosen, rejected = counts if good else reversed(counts)
            pair = {"chosen": string(draw, chosen), "rejected": string(draw, rejected)}
            files[name].append({"prompt": prompt, **pair})
    paths = {name: folder / f"{name}.jsonl" for name in files}
    for name, rows in files.items():
        paths[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: (str(path),) for name, path in paths.items()}


@pytest.mark.slow
def test_reward_and_cost_models_that_disagree(tmp_path, one_device):
    """Answers, pairs for a reward and pairs for a cost: a run that trains all it needs.

    A score is the number of letters minus that of the pairs' answers in the mean, two of four, or
    about that. The limit of the cost is 0. So letters rise from one to two with the multiplier, and
    above three without it.
    """
    files = write_wishes(tmp_path)
    changes = {
        "data": {"task": "files", "train_files": files["answers"], "max_prompt_tokens": 8},
        "rollout": {"max_response_tokens": 6},
        "rewards": {
            "functions": {},
            "cost_functions": {},
            "models": {"good": {"pairs": files["wanted"]}},
            "cost_models": {"harm": {"pairs": files["cheap"]}},
        },
        "warm_start": {"num_steps": 150},
        "preference": {
            "num_steps": 120,
            "batch_size": 64,
            "optimizer": {"learning_rate": 2e-3, "schedule": "cosine", "weight_decay": 0.0},
        },
        "algorithm": {"cost_limit": 0.0, "kl_coef": 0.3, "multiplier_lr": 0.2},
        "trainer": {"num_steps": 120, "prompts_per_step": 64},
    }
    rl.train(recipe_settings.config("safe_rlhf", changes), tmp_path / "safe")
    shutil.copytree(tmp_path / "safe" / "warm_start", tmp_path / "ppo" / "warm_start")
    shutil.copytree(tmp_path / "safe" / "reward_models", tmp_path / "ppo" / "reward_models")
    free = recipe_settings.merged(changes, {"algorithm": {"multiplier_init": 0.0}})
    rl.train(recipe_settings.config("safe_rlhf", free), tmp_path / "ppo")

    def letters(name, steps):
        texts = [
            row["output"] for step in steps for row in recipe_settings.dump(tmp_path / name, step)
        ]
        return np.mean([sum(c.islower() for c in text.replace("<eos>", "")) for text in texts])

    def costs(name, last):
        found = list(recipe_settings.metrics(tmp_path / name).values())[-last:]
        return np.mean([data["critic/cost/mean"] for data in found])

    last = range(101, 121)
    print(
        {
            name: (letters(name, [1]), letters(name, last), costs(name, 20))
            for name in ("safe", "ppo")
        }
    )
    assert letters("safe", [1]) < 1.5
    # 20 steps of 64 answers have a standard error of 0.03; the multiplier still swings a little.
    assert letters("ppo", last) > 3.0 and costs("ppo", 20) > 0.6
    assert 1.8 < letters("safe", last) < 2.8 and abs(costs("safe", 20)) < 0.25
