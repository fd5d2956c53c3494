"""Numbers of a step, by hand on two short sequences."""

import dataclasses
import math
import types as python_types

import jax
import numpy as np
import pytest

from jaxrl_llm import types
from jaxrl_llm.config import AlgorithmConfig, DataConfig, RLConfig, RolloutConfig
from jaxrl_llm.metrics import statistics
from jaxrl_llm.rollout.engine.requests import EngineStatistics


def prompt(tokens, source, index):
    return types.Prompt(
        tokens=tokens,
        text="?",
        data_source=source,
        ground_truth="1",
        extra_info={},
        index=index,
    )


def step():
    """Prompts of 1 and 2 tokens, responses of 3 and 2; one token of the second rejected."""
    rollouts = types.Rollouts(
        tokens=np.ones((2, 5), np.int32),
        response_mask=np.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 0]], bool),
        rollout_log_probs=np.zeros((2, 5), np.float32),
        versions=np.zeros((2, 5), np.int32),
        lengths=np.array([4, 4]),
        group_ids=np.array([0, 1]),
        stopped=np.array([False, True]),
        prompts=(prompt((5,), "sums", 0), prompt((5, 6), "words", 1)),
        responses=("abc", "de"),
    )
    rewards = types.Rewards(
        scores=np.array([1.0, -3.0], np.float32),
        terms={"answer": np.array([1.0, 0.0]), "style": np.array([0.0, -6.0])},
        weights={"answer": np.array([1.0, 1.0]), "style": np.array([0.0, 0.5])},
        costs=np.array([2.0, 4.0], np.float32),
        baselines=np.zeros(2),
        details=({}, {}),
        num_failures=1,
    )
    zeros = np.zeros((2, 5), np.float32)
    predictions = types.Predictions(
        old_log_probs=zeros,
        ref_log_probs=zeros,
        entropies=zeros,
        sum_squared_probs=zeros,
        values=np.array([[9, 1, 2, 3, 9], [9, 9, 4, 9, 9]], np.float32),
        cost_values=zeros,
    )
    estimates = types.Estimates(
        advantages=np.array([[7, 1, 1, 1, 7], [7, 7, -5, 7, 7]], np.float32),
        returns=np.array([[9, 2, 2, 4, 9], [9, 9, 4, 9, 9]], np.float32),
        cost_returns=zeros,
        loss_mask=np.array([[0, 1, 1, 1, 0], [0, 0, 1, 0, 0]], bool),
        correction_weights=np.ones((2, 5), np.float32),
        shaped_rewards=np.array([[0, 0, 0, 0.5, 0], [0, 0, -1, -3, 0]], np.float32),
    )
    return rollouts, rewards, predictions, estimates


def config(**algorithm):
    return RLConfig(
        algorithm=AlgorithmConfig(**algorithm),
        rollout=RolloutConfig(max_response_tokens=3),
        data=DataConfig(max_prompt_tokens=2),
    )


def test_numbers_of_a_step_by_hand():
    found = {
        **statistics.reward_metrics(step()[1], step()[0].group_ids),
        **statistics.rollout_metrics(config(safe=True), *step(), critic=True),
    }
    assert found.pop("critic/score/spread") == 4.0
    expected = {
        "critic/score": (-1.0, 1.0, -3.0),
        "critic/rewards": (-1.75, 0.5, -4.0),
        "critic/advantages": (-0.5, 1.0, -5.0),  # (1 + 1 + 1 - 5) / 4: only where the mask is
        "critic/returns": (3.0, 4.0, 2.0),
        "critic/values": (2.5, 4.0, 1.0),
        "critic/cost": (3.0, 4.0, 2.0),
        "response_length": (2.5, 3.0, 2.0),
        "prompt_length": (1.5, 2.0, 1.0),
    }
    for name, numbers in expected.items():
        assert tuple(found.pop(f"{name}/{kind}") for kind in ("mean", "max", "min")) == numbers
    # Residuals 1, 0, 1, 0 have variance 1/3, returns 2, 2, 4, 4 have 4/3.
    assert found.pop("critic/vf_explained_var") == pytest.approx(1 - (1 / 3) / (4 / 3 + 1e-5))
    assert found == {
        "critic/score/sums/mean": 1.0,
        "critic/score/words/mean": -3.0,
        "reward/answer/mean": 0.5,
        "reward/style/mean": -6.0,  # only the row it applies to
        "reward/num_failures": 1.0,
        "response_length/p10": 2.0,
        "response_length/p50": 2.0,
        "response_length/p90": 3.0,
        "response_length/p99": 3.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/clip_ratio": 0.5,
        "training/groups/uniform_share": 0.0,
    }


def test_without_a_critic_there_are_no_values_and_without_tokens_no_advantages():
    rollouts, rewards, predictions, estimates = step()
    empty = types.Estimates(**{**vars(estimates), "loss_mask": np.zeros_like(estimates.loss_mask)})
    found = statistics.rollout_metrics(
        config(), rollouts, rewards, predictions, empty, critic=False
    )
    assert not [name for name in found if "value" in name or "advantage" in name or "vf" in name]
    assert "critic/cost/mean" not in found


def test_numbers_do_not_depend_on_padding_or_row_order():
    rollouts, rewards, predictions, estimates = step()
    found = statistics.rollout_metrics(
        config(), rollouts, rewards, predictions, estimates, critic=True
    )

    def pad(tree):
        """Two more padding tokens that hold garbage, and the rows the other way round."""
        return {
            name: np.concatenate([array, np.full_like(array[:, :2], fill)], 1)[::-1]
            for name, array in vars(tree).items()
            for fill in [False if array.dtype == bool else 77]
        }

    other = statistics.rollout_metrics(
        config(),
        types.Rollouts(
            **{
                **vars(rollouts),
                "group_ids": rollouts.group_ids[::-1],
                "lengths": rollouts.lengths[::-1],
            }
        ),
        types.Rewards(
            **{
                **vars(rewards),
                "scores": rewards.scores[::-1],
                "terms": {k: v[::-1] for k, v in rewards.terms.items()},
                "weights": {k: v[::-1] for k, v in rewards.weights.items()},
            }
        ),
        types.Predictions(**pad(predictions)),
        types.Estimates(
            **{
                **pad(estimates),
                "shaped_rewards": np.pad(estimates.shaped_rewards, ((0, 0), (0, 2)))[::-1],
            }
        ),
        critic=True,
    )
    assert other == pytest.approx(found)


def test_mean_over_updates_counts_only_those_that_have_a_number():
    groups = [{"a": np.float32(1.0), "b": jax.numpy.float32(4.0)}, {"a": np.float32(2.0)}]
    assert statistics.mean_metrics(groups) == {"a": 1.5, "b": 4.0}
    assert statistics.mean_metrics([]) == {}


def test_engine_speed_by_hand():
    done = EngineStatistics(
        prefill_tokens=8,
        prefill_s=0.5,
        decode_tokens=6,
        decode_s=2.0,
        busy_slot_steps=3,
        busy_capacity=4,
        slot_steps=4,
        draft_tokens=8,
        prefix_cache_queries=10,
        prefix_cache_hits=6,
    )
    assert done.metrics() == {
        "rollout/prefill_tokens_per_s": 16.0,
        "rollout/decode_tokens_per_s": 3.0,
        "rollout/reread_tokens": 0.0,
        "rollout/put_back": 0.0,
        "rollout/prefix_cache_hit_rate": 0.6,
        "rollout/slot_occupancy": 0.75,
        "rollout/tokens_per_forward": 1.5,
        "rollout/draft_acceptance": 0.25,
    }
    assert (done + done).metrics() == done.metrics()
    assert set(EngineStatistics().metrics().values()) == {0.0, 1.0}


def test_scores_and_failed_calls_by_hand():
    rollouts, rewards, *_ = step()
    groups = rollouts.group_ids
    assert statistics.reward_metrics(rewards, groups) == {
        "critic/score/mean": -1.0,
        "critic/score/max": 1.0,
        "critic/score/min": -3.0,
        "critic/score/spread": 4.0,
        "reward/num_failures": 1.0,
        "training/groups/uniform_share": 0.0,
    }
    called = dataclasses.replace(rewards, num_calls=4)
    assert statistics.reward_metrics(called, groups)["reward/failure_share"] == 0.25
    # One score is not spread; its steps must not count as those whose rewards are all alike.
    one = {name: getattr(rewards, name)[:1] for name in ("scores", "costs", "baselines", "details")}
    alone = dataclasses.replace(rewards, terms={}, weights={}, **one)
    assert "critic/score/spread" not in statistics.reward_metrics(alone, groups[:1])


def test_speed_by_hand():
    seconds = {"timing_s/gen": 2.0, "timing_s/update": 1.0, "timing_s/step": 4.0}

    def speed(seconds, flops, peak=math.nan, critic=False):
        work = dict(flops=flops, peak_flops=peak, critic=critic)
        return statistics.throughput_metrics(step()[0], seconds, 2, **work)

    assert speed(seconds, 6e12) == {
        "perf/total_num_tokens": 8.0,
        "perf/time_per_step": 4.0,
        "perf/throughput": 1.0,
        "timing_per_token_ms/gen": 400.0,  # 2 s for 5 response tokens
        "timing_per_token_ms/update": 125.0,
        "perf/tflops/update": 3.0,
    }
    assert speed(seconds, 989e12, 8 * 989e12)["perf/mfu/update"] == 1 / 8
    assert speed(seconds, 989e12, 8 * 989e12)["perf/mfu/actor"] == 1 / 8
    assert "perf/mfu/actor" not in speed(seconds, 1.0, 1.0, critic=True)
    assert speed({"timing_s/step": 4.0}, 6e12)["perf/tflops/update"] == 0.0  # no update was taken


def test_balance_keeps_the_sum_of_tokens():
    lengths = np.array([10, 8, 3, 2, 1])
    found = statistics.balance_metrics(lengths, [[0, 3], [1, 2, 4]])
    assert found == {
        "global_seqlen/min": 3.0,
        "global_seqlen/max": 21.0,
        "global_seqlen/minmax_diff": 18.0,
        "global_seqlen/balanced_min": 12.0,
        "global_seqlen/balanced_max": 12.0,
        "global_seqlen/mean": 12.0,
    }


def device(kind, stats=None):
    return python_types.SimpleNamespace(
        device_kind=kind, process_index=0, memory_stats=lambda: stats
    )


def test_memory_is_that_of_the_fullest_device():
    gib = 2**30
    stats = [{"peak_bytes_in_use": n * gib, "bytes_limit": 80 * gib} for n in (3, 7)]
    found = statistics.memory_metrics([device("H100", s) for s in stats])
    assert found["perf/max_memory_allocated_gb"] == 7.0
    assert found["perf/max_memory_reserved_gb"] == 80.0
    assert 0.01 < found["perf/cpu_memory_used_gb"] <= found["perf/max_cpu_memory_used_gb"] + 0.05
    assert "perf/max_memory_allocated_gb" not in statistics.memory_metrics([device("cpu")])
