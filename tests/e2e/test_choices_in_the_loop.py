"""What the algorithms do beyond their formulas, seen from outside: in samples and dumps."""

import itertools
import json

import digits
import numpy as np
import pytest
import recipe_settings

from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.config.recipes import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    RECIPES,
)
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.sampling.source import SamplingError
from jaxrl_llm.trainer import rl


@pytest.fixture
def waves(monkeypatch):
    """The (requests, completions) of every session of the engine."""
    found = []
    session, submit = Engine.session, Engine.submit

    def begun(self, *settings):
        found.append(([], []))
        return session(self, *settings)

    def submitted(self, request):
        number = submit(self, request)
        found[-1][0].append(request)
        found[-1][1].append(self.completions(number))
        return number

    monkeypatch.setattr(Engine, "session", begun)
    monkeypatch.setattr(Engine, "submit", submitted)
    return found


def two_steps(**algorithm):
    return {"algorithm": algorithm, "trainer": {"num_steps": 2}}


@pytest.mark.slow
def test_remax_samples_its_baseline_in_the_same_wave(babble, waves):
    _, workdir = babble("remax", two_steps(kl_coef=0.0))
    found = recipe_settings.metrics(workdir)
    assert len(waves) == 2
    for step, (requests, completions) in enumerate(waves, start=1):
        rows = recipe_settings.dump(workdir, step)
        assert len(requests) == len(rows) == recipe_settings.SEQUENCES
        weighted = 0.0
        for request, (sampled, greedy), row in zip(requests, completions, rows, strict=True):
            assert [params.temperature for params in request.params] == [1.0, 0.0]
            assert row["num_tokens"] == len(sampled.tokens)
            text = character_tokenizer().decode(greedy.tokens, skip_special_tokens=True)
            baseline = digits.score("", text, "", {})
            weighted += (row["score"] - baseline) * row["num_tokens"]
        # Every token of a response has the advantage score - baseline.
        mean = weighted / sum(row["num_tokens"] for row in rows)
        assert len({row["score"] for row in rows}) > 1
        assert found[step]["critic/advantages/mean"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.slow
def test_dapo_replaces_uniform_groups_and_penalizes_length(babble, waves):
    _, workdir = babble("dapo", two_steps(overlong_buffer_tokens=8, overlong_penalty=0.5))
    assert len(waves) > 2  # some groups were uniform, and others sampled in their place
    found = recipe_settings.metrics(workdir)
    sampled = 8 * sum(len(requests) for requests, _ in waves)
    dropped = [found[step]["training/filter_groups/evicted_samples"] for step in (1, 2)]
    assert sampled - sum(dropped) == 2 * recipe_settings.SEQUENCES
    for step in (1, 2):
        rows = recipe_settings.dump(workdir, step)
        assert len(rows) == recipe_settings.SEQUENCES
        for start in range(0, len(rows), 8):
            group = rows[start : start + 8]
            assert len({row["input"] for row in group}) == 1
            assert {row["terms"]["answer"] for row in group} == {0.0, 1.0}
        for row in rows:
            # 12 tokens are allowed, the last 8 of them at a price.
            penalty = -0.5 * max(0, row["num_tokens"] - 4) / 8
            assert row["terms"]["overlong"] == pytest.approx(penalty)
            assert row["score"] == pytest.approx(row["terms"]["answer"] + penalty)
        mean = np.mean([row["terms"]["overlong"] for row in rows])
        assert found[step]["reward/overlong/mean"] == pytest.approx(mean)
        assert found[step]["critic/score/mean"] == pytest.approx(
            np.mean([r["score"] for r in rows])
        )


def test_dynamic_sampling_gives_up_at_its_limit(babble, waves):
    always_zero = {"functions": {"answer": {"function": "length"}}}
    changes = two_steps(max_sampling_waves=3) | {"rewards": always_zero}
    with pytest.raises(SamplingError, match="24 prompts in 3 waves gave 0 of the 8 groups"):
        babble("dapo", changes)
    assert len(waves) == 3


SPLITS = ("train", "eval")
REWARDS = """
def small(data_source, solution_str, ground_truth, extra_info):
    return sum(c.islower() for c in solution_str)

def large(data_source, solution_str, ground_truth, extra_info):
    return 1000.0 * sum(c.islower() for c in solution_str)

def digits(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(c.isdigit() for c in solution_str), "seen": len(solution_str)}
"""


@pytest.fixture
def from_files(tmp_path, one_device):
    """Returns `run(name, advantage, functions)` on prompts of two data sources."""
    (tmp_path / "count.py").write_text(REWARDS)
    rows = [
        {
            "data_source": ("sums", "words")[index % 2],
            "prompt": [{"role": "user", "content": f"{index}="}],
            "ability": "any",
            "reward_model": {"style": "rule", "ground_truth": str(index)},
            "extra_info": {"index": index},
        }
        for index in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"task": "files", **{f"{s}_files": [str(tmp_path / "rows.jsonl")] for s in SPLITS}}

    def run(name, advantage, functions):
        functions = {
            term: {**settings, "function": f"{tmp_path / 'count.py'}:{settings['function']}"}
            for term, settings in functions.items()
        }
        changes = {
            "data": files,
            "warm_start": {"num_steps": 0},
            "algorithm": {"advantage": advantage, "group_std": advantage == "gdpo"},
            "trainer": {"num_steps": 1},
            "rewards": {"functions": functions},
        }
        rl.train(recipe_settings.config("dr_grpo", changes), tmp_path / name)
        return recipe_settings.metrics(tmp_path / name)[1], recipe_settings.dump(tmp_path / name, 1)

    return run


@pytest.mark.slow
def test_rewards_are_weighted_by_data_source(from_files):
    found, rows = from_files(
        "weighted",
        "grpo",
        {
            "answer": {"function": "small", "data_source": "words"},
            "digits": {"function": "digits", "weight": 2.0, "data_source": "sums"},
            "both": {"function": "digits", "weight": -0.5},
        },
    )
    weights = {
        "sums": {"answer": 0.0, "digits": 2.0, "both": -0.5},
        "words": {"answer": 1.0, "digits": 0.0, "both": -0.5},
    }
    by_source = {"sums": [], "words": []}
    for row in rows:
        expected = sum(
            weights[row["data_source"]][name] * row["terms"][name] for name in row["terms"]
        )
        assert row["score"] == pytest.approx(expected)
        by_source[row["data_source"]].append(row["score"])
    for source, scores in by_source.items():
        assert found[f"critic/score/{source}/mean"] == pytest.approx(np.mean(scores), abs=1e-6)
    of_words = [row["terms"]["answer"] for row in rows if row["data_source"] == "words"]
    assert found["reward/answer/mean"] == pytest.approx(np.mean(of_words))
    assert np.std(by_source["sums"]) > 0 < np.std(by_source["words"])


@pytest.mark.slow
def test_gdpo_normalizes_each_reward(from_files):
    """A reward a thousand times as large changes nothing; in GRPO it drowns the other one."""
    found = {
        (advantage, size): from_files(
            f"{advantage}_{size}",
            advantage,
            {"answer": {"function": size}, "digits": {"function": "digits", "weight": 2.0}},
        )[0]
        for advantage, size in itertools.product(("gdpo", "grpo"), ("small", "large"))
    }
    for name in ("critic/advantages/max", "critic/advantages/min", "actor/grad_norm"):
        ours, theirs = found["gdpo", "small"][name], found["gdpo", "large"][name]
        # 1e-6 is added to a standard deviation of about 0.5.
        assert theirs == pytest.approx(ours, rel=1e-4), name
        assert found["grpo", "large"][name] != pytest.approx(
            found["grpo", "small"][name], rel=1e-2
        ), name


@pytest.mark.slow
@pytest.mark.parametrize("level, mode", [("token", "truncate"), ("sequence", "mask")])
def test_correction_and_rejection_act_in_the_loop(level, mode, train):
    """An engine in bfloat16 samples from another policy than the one in float32."""
    changes = two_steps(
        correction=level,
        correction_mode=mode,
        correction_low=0.5,
        correction_high=1.01,
        correction_normalize=True,
        rejections=["token_k1", "seq_mean_k3"],
        rejection_lows=[0.99, 0.0],
        rejection_highs=[1.01, 0.01],
    )
    _, workdir = train("grpo", changes | {"rollout": {"dtype": "bfloat16"}})
    for data in recipe_settings.metrics(workdir).values():
        assert data["training/rollout_probs_diff_max"] > 1e-3
        assert 0.0 < data["rollout_corr/rollout_rs_masked_fraction"] < 1.0
        assert data["rollout_corr/rollout_is_batch_norm_factor"] != 1.0
        assert ("rollout_corr/rollout_is_oob_ratio" in data) == (mode == "mask")
        assert np.isfinite(data["actor/grad_norm"]) and data["actor/grad_norm"] > 0.0


# Of the recipes, each of which has a test of its own.
TRIED = {
    choice
    for config in (AlgorithmConfig(**recipe) for recipe in RECIPES.values())
    for choice in (config.advantage, config.policy_loss)
}


@pytest.mark.parametrize(
    "i",
    [
        pytest.param(
            i,
            id=f"{advantage}-{loss}",
            marks=pytest.mark.nightly if {advantage, loss} <= TRIED else pytest.mark.slow,
        )
        for i, (advantage, loss) in enumerate(
            zip(ADVANTAGES, itertools.cycle(POLICY_LOSSES), strict=False)
        )
    ],
)
def test_every_choice_takes_a_step(i, train):
    """Estimators and losses meet in `advantages` alone, so a pair of each is enough."""
    choices = {
        "advantage": ADVANTAGES[i],
        "policy_loss": POLICY_LOSSES[i % len(POLICY_LOSSES)],
        "aggregation": AGGREGATIONS[i % len(AGGREGATIONS)],
        "kl_in": "loss",
        "kl_estimator": KL_ESTIMATORS[i % len(KL_ESTIMATORS)],
        "entropy_coef": 0.01,
    }
    _, workdir = train("grpo", {"algorithm": choices, "trainer": {"num_steps": 1}})
    (data,) = recipe_settings.metrics(workdir).values()
    assert all(np.isfinite(value) for value in data.values() if value is not None)
    assert data["actor/grad_norm"] > 0.0
    assert data["actor/skipped_updates"] == 0.0


@pytest.mark.slow
def test_truncated_responses_are_masked_by_what_the_dump_says(babble):
    _, workdir = babble("grpo", two_steps(mask_truncated=True))
    found = recipe_settings.metrics(workdir)
    for step in (1, 2):
        stopped = np.array([row["stopped"] for row in recipe_settings.dump(workdir, step)])
        assert 0 < stopped.mean() < 1
        assert found[step]["training/masked_truncated_share"] == 1 - stopped.mean()
        # The limit cut exactly the responses of full length that no end token ended.
        assert found[step]["response_length/clip_ratio"] >= 1 - stopped.mean()
