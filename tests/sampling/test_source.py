"""Waves of samples by hand: rows chosen, waves joined, groups dropped and filled up."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from jaxrl_llm.config import AlgorithmConfig, RLConfig, RLTrainerConfig, RolloutConfig
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.rollout.engine.requests import EngineStatistics, SamplingParams
from jaxrl_llm.sampling import source
from jaxrl_llm.sampling.source import SamplingError, ScoredRollouts, SyncSource
from jaxrl_llm.types import Prompt, PromptBatch, Rewards, Rollouts, Weights


def prompt(index):
    return Prompt((index, 1), f"prompt {index}", "test", None, {}, index)


def rollouts_of(prompts, n, width=6):
    """Sequences of a prompt's index, a 1, then as many responses tokens as the sample's number."""
    count = len(prompts) * n
    samples = np.tile(np.arange(n), len(prompts))
    group_ids = np.repeat(np.arange(len(prompts)), n).astype(np.int32)
    columns = np.arange(width)
    lengths = (3 + samples).astype(np.int32)
    mask = (columns >= 2) & (columns < lengths[:, None])
    tokens = np.where(mask, 50 + samples[:, None], 0)
    tokens[:, 0] = np.array([p.index for p in prompts])[group_ids]
    tokens[:, 1] = 1
    return Rollouts(
        tokens=tokens.astype(np.int32),
        response_mask=mask,
        rollout_log_probs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, 1 + samples[:, None], 0).astype(np.int32),
        lengths=lengths,
        group_ids=group_ids,
        stopped=np.arange(count) % 2 == 0,
        prompts=tuple(prompts),
        responses=tuple(f"{tokens[i, 0]}.{samples[i]}" for i in range(count)),
    )


def rewards_of(scores, failures=0):
    scores = np.asarray(scores, np.float64)
    return Rewards(
        scores=scores,
        terms={"a": scores * 2, "b": scores * 0},
        weights={"a": np.full_like(scores, 0.5), "b": scores * 0 + 1},
        costs=-scores,
        baselines=np.zeros_like(scores),
        details=tuple({"score": float(s)} for s in scores),
        num_failures=failures,
    )


def assert_consistent(rollouts, rewards):
    """What `rollouts_of` and a score of its rows must satisfy after any selection."""
    count = len(rollouts.lengths)
    for field in ("tokens", "response_mask", "rollout_log_probs", "group_ids", "stopped"):
        assert len(getattr(rollouts, field)) == count
    # The sample's number is in its tokens and in their versions.
    drawn = np.where(rollouts.response_mask, rollouts.tokens - 49, 0)
    np.testing.assert_array_equal(rollouts.versions, drawn)
    for row in range(count):
        index = rollouts.prompts[rollouts.group_ids[row]].index
        assert rollouts.tokens[row, 0] == index
        assert rollouts.responses[row].startswith(f"{index}.")
        assert rewards.details[row]["score"] == rewards.terms["a"][row] / 2 == -rewards.costs[row]
    assert rollouts.group_ids.dtype == np.int32
    assert set(rollouts.group_ids) == set(range(len(rollouts.prompts)))


def test_select_keeps_rows_and_their_prompts():
    rollouts = rollouts_of([prompt(i) for i in (7, 8, 9)], 2)
    rewards = rewards_of([1, 2, 3, 4, 5, 6], failures=3)
    some, scores = source.take_rows(rollouts, rewards, np.array([0, 4, 5]))
    assert_consistent(some, scores)
    assert some.responses == ("7.0", "9.0", "9.1")
    assert [p.index for p in some.prompts] == [7, 9]
    np.testing.assert_array_equal(some.group_ids, [0, 1, 1])
    np.testing.assert_array_equal(some.lengths, [3, 3, 4])
    np.testing.assert_array_equal(some.stopped, [True, True, False])
    np.testing.assert_array_equal(scores.scores, [1, 5, 6])
    np.testing.assert_array_equal(scores.weights["a"], [0.5, 0.5, 0.5])
    assert scores.num_failures == 3
    none, nothing = source.take_rows(rollouts, rewards, np.array([], int))
    assert none.prompts == () == none.responses
    assert len(nothing.scores) == 0


def test_sampling_waves_are_concatenated():
    """Rows stand below each other; what is counted, by rewards or by the engine, is added up."""
    nothing = source.take_rows(
        rollouts_of([prompt(3)], 2), rewards_of([9, 9], 2), np.array([], int)
    )
    did = EngineStatistics(
        prefill_tokens=2,
        prefill_positions=4,
        prefill_s=0.5,
        prefix_cache_queries=4,
        prefix_cache_hits=2,
        recomputed_tokens=1,
        num_preemptions=1,
        peak_pages=5,
        decode_tokens=3,
        decode_steps=2,
        slot_steps=3,
        draft_tokens=6,
        busy_capacity=8,
        busy_slot_steps=2,
        decode_s=0.25,
    )
    waves = [
        ScoredRollouts(rollouts_of([prompt(7)], 2, width=4), rewards_of([1, 2], 1), did),
        ScoredRollouts(*nothing, did),
        ScoredRollouts(
            rollouts_of([prompt(8), prompt(9)], 2, width=6), rewards_of([3, 4, 5, 6]), did
        ),
    ]
    samples = source.concatenate_waves(waves)
    joined, rewards = samples.rollouts, samples.rewards
    assert_consistent(joined, rewards)
    assert joined.tokens.shape == (6, 6)
    np.testing.assert_array_equal(joined.tokens[1], [7, 1, 51, 51, 0, 0])
    np.testing.assert_array_equal(joined.response_mask.sum(1), [1, 2, 1, 2, 1, 2])
    np.testing.assert_array_equal(joined.group_ids, [0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(rewards.scores, [1, 2, 3, 4, 5, 6])
    assert rewards.num_failures == 3
    once, thrice = dataclasses.asdict(did), dataclasses.asdict(samples.engine_statistics)
    assert thrice.pop("peak_pages") == once.pop("peak_pages") == 5  # at one time
    assert thrice == {name: 3 * value for name, value in once.items()} and all(once.values())
    assert samples.engine_statistics.metrics()["rollout/decode_tokens_per_s"] == 12.0
    assert samples.engine_statistics.metrics()["rollout/slot_occupancy"] == 0.25
    assert source.concatenate_waves(waves[:1]) is waves[0]


def test_the_greedy_sample_becomes_the_baseline():
    rollouts = rollouts_of([prompt(4), prompt(5)], 3)
    left, rewards = source.split_baseline(rollouts, rewards_of([1, 2, 3, 4, 5, 6]))
    assert_consistent(left, rewards)
    assert left.responses == ("4.0", "4.1", "5.0", "5.1")
    np.testing.assert_array_equal(rewards.scores, [1, 2, 4, 5])
    np.testing.assert_array_equal(rewards.baselines, [3, 3, 6, 6])


class FakeRun:
    """Prompts 0, 1, 2, ..., a rollout of numbers, and a score of the caller's."""

    def __init__(self, monkeypatch, score, **algorithm):
        config = RLConfig(
            algorithm=AlgorithmConfig(**{"samples_per_prompt": 2} | algorithm),
            trainer=RLTrainerConfig(prompts_per_step=4),
            rollout=RolloutConfig(max_response_tokens=4, top_k=9, temperature=0.8),
        )
        models = types.SimpleNamespace(eos_tokens=(2,), tokenizer=None)
        sampler = types.SimpleNamespace(rollout=self.rollout, models=models, world=None)
        self.source = SyncSource(config, sampler, self, self.score)
        self.score_of = score
        self.next = 0
        self.taken, self.learned, self.keys, self.samples = [], [], [], []

    def next_batch(self, count):
        first, self.next = self.next, self.next + count
        self.taken.append(count)
        return PromptBatch(tuple(prompt(i) for i in range(first, self.next)))

    def learn(self, prompts, scores):
        self.learned.append(
            [(p.index, list(found)) for p, found in zip(prompts, scores, strict=True)]
        )

    def rollout(self, weights, prompts, samples, key, ended=None):
        assert weights.version == 7
        self.keys.append(jax.random.key_data(key).tolist())
        self.samples.append(tuple(samples))
        return rollouts_of(prompts.prompts, len(samples)), EngineStatistics(decode_tokens=5)

    def score(self, rollouts):
        scores = [self.score_of(*map(int, text.split("."))) for text in rollouts.responses]
        return rewards_of(scores)

    def collect(self):
        clock = Clock()
        samples = self.source.next_batch(Weights({}, 7), jax.random.key(0), clock)
        assert set(clock.seconds()) == {"timing_s/gen", "timing_s/reward", "timing_s/step"}
        assert samples.engine_statistics.decode_tokens == 5 * len(self.taken)
        return samples.rollouts, samples.rewards


def test_one_wave_without_dynamic_sampling(monkeypatch):
    run = FakeRun(monkeypatch, lambda index, sample: 1.0)
    rollouts, rewards = run.collect()
    assert_consistent(rollouts, rewards)
    assert run.taken == [4]
    params = SamplingParams(4, 0.8, top_k=9, stop_tokens=(2,))
    assert run.samples == [(params, params)]
    np.testing.assert_array_equal(rewards.scores, np.ones(8))


def test_uniform_groups_are_dropped_and_others_sampled(monkeypatch):
    # Prompts whose number is divisible by three have rewards that differ.
    run = FakeRun(
        monkeypatch, lambda i, s: float(s) if i % 3 == 0 else float(i), dynamic_sampling=True
    )
    rollouts, rewards = run.collect()
    # 0 1 2 3: two of four; 4 5: none; 6 7: one; 8: none; 9: the last.
    assert run.taken == [4, 2, 2, 1, 1]
    assert_consistent(rollouts, rewards)
    assert [p.index for p in rollouts.prompts] == [0, 3, 6, 9]
    np.testing.assert_array_equal(rollouts.group_ids, [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(rewards.scores, [0, 1] * 4)
    # What was dropped is known too.
    assert run.learned[0] == [(0, [0, 1]), (1, [1, 1]), (2, [2, 2]), (3, [0, 1])]
    assert [index for wave in run.learned for index, _ in wave] == list(range(10))
    assert len({tuple(key) for key in run.keys}) == 5, "every wave draws with a key of its own"


def test_too_few_groups_is_an_error(monkeypatch):
    run = FakeRun(
        monkeypatch, lambda i, s: float(i == 1 and s), dynamic_sampling=True, max_sampling_waves=3
    )
    with pytest.raises(
        SamplingError,
        match=r"config.algorithm.max_sampling_waves: 10 prompts in 3 waves gave 1 of the 4 groups"
        r" whose rewards differ; .* raise the number of waves or samples_per_prompt, or set"
        r" dynamic_sampling=False",
    ):
        run.collect()


def test_the_last_wave_may_fill_the_step(monkeypatch):
    run = FakeRun(
        monkeypatch, lambda i, s: float(i >= 4 and s), dynamic_sampling=True, max_sampling_waves=2
    )
    rollouts, _ = run.collect()
    assert [p.index for p in rollouts.prompts] == [4, 5, 6, 7]


def test_remax_asks_for_one_greedy_sample(monkeypatch):
    run = FakeRun(monkeypatch, lambda i, s: float(10 * i + s), advantage="remax")
    rollouts, rewards = run.collect()
    assert_consistent(rollouts, rewards)
    sampled = SamplingParams(4, 0.8, top_k=9, stop_tokens=(2,))
    greedy = dataclasses.replace(sampled, temperature=0.0, top_k=0)
    assert run.samples == [(sampled, sampled, greedy)]
    np.testing.assert_array_equal(rewards.scores, [0, 1, 10, 11, 20, 21, 30, 31])
    np.testing.assert_array_equal(rewards.baselines, [2, 2, 12, 12, 22, 22, 32, 32])
    assert run.learned[0][1] == (1, [10, 11])  # without the greedy answer


def test_long_answers_are_worth_less(monkeypatch):
    # The limit is 4 tokens, the buffer 3: an answer of one costs nothing, of two a third.
    run = FakeRun(monkeypatch, lambda i, s: 1.0, overlong_buffer_tokens=3)
    _, rewards = run.collect()
    np.testing.assert_allclose(rewards.scores, [1, 1 - 1 / 3] * 4, rtol=1e-6)
    np.testing.assert_allclose(rewards.terms["overlong"], [0, -1 / 3] * 4, rtol=1e-6)
    np.testing.assert_array_equal(rewards.weights["overlong"], np.ones(8))
    np.testing.assert_array_equal(rewards.terms["a"], np.full(8, 2.0))


def left_out(scores, rows):
    found = np.zeros(len(scores), bool)
    found[list(rows)] = True
    failures = tuple("no idea" if failed else "" for failed in found)
    return dataclasses.replace(rewards_of(scores), excluded=found, failures=failures)


def test_a_row_that_lost_all_others_of_its_group_is_left_out_too():
    """Its group advantage would be its score, without a baseline."""
    rollouts = rollouts_of([prompt(i) for i in (7, 8, 9)], 2)
    rewards = left_out([1, 2, 3, 4, 5, 6], [0, 4, 5])
    grouped = RLConfig(algorithm=AlgorithmConfig(advantage="grpo"))
    found = source.without_lone_rows(grouped, rollouts, rewards)
    np.testing.assert_array_equal(found.excluded, [True, True, False, False, True, True])
    alone = RLConfig(algorithm=AlgorithmConfig(advantage="gae"))
    found = source.without_lone_rows(alone, rollouts, rewards)
    np.testing.assert_array_equal(found.excluded, rewards.excluded)


def test_without_the_greedy_score_a_group_has_no_baseline():
    rollouts = rollouts_of([prompt(i) for i in (7, 8)], 3)
    _, found = source.split_baseline(rollouts, left_out([1, 2, 3, 4, 5, 6], [0, 5]))
    np.testing.assert_array_equal(found.excluded, [True, False, True, True])
    assert found.failures == ("no idea", "", "", "")


def test_selection_keeps_what_is_left_out():
    rollouts = rollouts_of([prompt(i) for i in (7, 8)], 2)
    some, rewards = source.take_rows(rollouts, left_out([1, 2, 3, 4], [3]), np.array([0, 3]))
    samples = source.concatenate_waves([ScoredRollouts(some, rewards, EngineStatistics())] * 2)
    np.testing.assert_array_equal(samples.rewards.excluded, [False, True, False, True])
    assert samples.rewards.failures == ("", "no idea", "", "no idea")
