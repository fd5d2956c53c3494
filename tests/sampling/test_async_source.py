"""Samples ahead of their step, over random latencies: never too old, never lost, never twice."""

import dataclasses
import itertools
import json
import types

import jax
import numpy as np
import pytest

from jaxrl_llm.config import AlgorithmConfig, RLConfig, RLTrainerConfig, RolloutConfig
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.rollout import episode_runner
from jaxrl_llm.rollout.engine.requests import EngineStatistics, SamplingParams
from jaxrl_llm.sampling import async_source, episodes_in_flight
from jaxrl_llm.sampling.async_schedule import AsyncSchedule, ScheduleError
from jaxrl_llm.sampling.async_source import AsyncSource
from jaxrl_llm.sampling.source import SamplingError
from jaxrl_llm.types import Prompt, PromptBatch, Rewards, Weights

STEPS = 7


class Engine:
    """Stands for the real one; a sample gets a token a step and ends when chance says so."""

    def __init__(self):
        self.statistics, self.max_tokens = EngineStatistics(), 4096
        self.limits = types.SimpleNamespace(num_routes=0)

    def clone(self):
        return Engine()

    def reset(self):
        pass


class Latencies(episode_runner.EpisodeRunner):
    """A play whose samples take random numbers of chunks; it forgets the past as the real does."""

    random = np.random.default_rng(0)

    def start(self, prompt, number, keys):
        together = [
            episode_runner.EpisodeSequence(number + i, prompt.tokens, params, key)
            for i, (params, key) in enumerate(zip(self._samples, keys, strict=True))
        ]
        self.sequences |= {each.episode: [each] for each in together}
        self._submit(together)

    def step(self, weights, *, ahead=False):
        assert self._running, "the engine is asked for nothing"
        ended = []
        for place, (sequence, _) in list(self._running.items()):
            sequence.tokens.append(5)
            sequence.sampled.append(True)
            sequence.log_probs.append(-0.5)
            sequence.versions.append(weights.version)
            if self.random.random() < self.chance[sequence.episode % len(self.chance)]:
                del self._running[place]
                ended.append(sequence.episode)
        return ended

    def pause(self):
        self.pauses = getattr(self, "pauses", 0) + 1
        self._paused = {number: sequence for (number, _), (sequence, _) in self._running.items()}
        self._running = {}
        return []

    def _submit(self, together, continues=None):
        self._running |= {(each.episode, 0): (each, None) for each in together}

    def snapshot(self):
        going = {number for number, _ in self._running} | set(self._paused)
        return {n: (s, n not in going) for n, (s,) in self.sequences.items()}


class Stream:
    """Prompts 0, 1, 2, ..."""

    max_prompt_tokens = 2

    def __init__(self):
        self.drawn = 0

    def next_batch(self, count):
        numbers = range(self.drawn, self.drawn + count)
        self.drawn += count
        info = {"when": b"1", 2: (3,)}
        return PromptBatch(tuple(Prompt((n, 1), str(n), "test", None, info, n) for n in numbers), 2)

    def learn(self, prompts, scores):
        pass

    def metrics(self):
        return {}

    def get_state(self):
        return {"drawn": self.drawn}

    def set_state(self, state):
        self.drawn = state["drawn"]


class Run:
    """A run of a source: the loop without its arrays."""

    def __init__(
        self,
        monkeypatch,
        path,
        *,
        k,
        size=2,
        samples=2,
        apart=True,
        uniform=0.0,
        num_steps=STEPS,
        **trainer,
    ):
        monkeypatch.setattr(episodes_in_flight, "EpisodeRunner", Latencies)
        keys = lambda key, count: np.zeros((count, 2), np.uint32)  # noqa: E731
        monkeypatch.setattr(async_source.episodes, "sample_keys", keys)
        monkeypatch.setattr(
            async_source.source, "step_keys", lambda seed, step: (jax.random.key(0),) * 2
        )
        self.config = RLConfig(
            algorithm=AlgorithmConfig(
                samples_per_prompt=samples, dynamic_sampling=uniform > 0, max_sampling_waves=9
            ),
            rollout=RolloutConfig(max_response_tokens=2048),
            trainer=RLTrainerConfig(
                sampling="async",
                max_staleness=k,
                prompts_per_step=size,
                num_steps=num_steps,
                schedule_file=str(path) if trainer.get("schedule") == "replay" else "",
                **trainer,
            ),
        )
        self.path, self.apart, self.uniform, self.k = path, apart, uniform, k
        self.random = np.random.default_rng(1)
        self.learned: list[int] = []
        self.rejected: list[int] = []
        self.make()

    def make(self):
        models = types.SimpleNamespace(
            eos_tokens=(2,), tokenizer=types.SimpleNamespace(decode=lambda tokens, **_: "")
        )
        sampler = types.SimpleNamespace(
            engine=Engine(), models=models, has_own_devices=self.apart, world=None, grammar=None
        )
        trainer = self.config.trainer
        schedule = AsyncSchedule(trainer.schedule, self.path, trainer.num_steps)
        self.stream = Stream()
        self.source = AsyncSource(self.config, sampler, self.stream, self.score, schedule)

    def score(self, rollouts):
        n = self.config.algorithm.samples_per_prompt
        rejected = self.random.random(len(rollouts.prompts)) < self.uniform
        self.rejected += [p.index for p, no in zip(rollouts.prompts, rejected, strict=True) if no]
        scores = np.concatenate([np.arange(n) * (not no) for no in rejected]).astype(np.float32)
        return Rewards(scores, {}, {}, scores, scores, ({},) * len(scores), 0)

    def step(self, step):
        """Takes a step's samples and checks them; then the learner is at work for a while."""
        version = step - 1
        samples = self.source.next_batch(Weights({}, version), jax.random.key(0), Clock())
        rollouts = samples.rollouts
        drawn = rollouts.versions[rollouts.response_mask]
        assert len(rollouts.prompts) == self.config.trainer.prompts_per_step
        assert version - self.k <= drawn.min() and drawn.max() <= version
        for versions, mask in zip(rollouts.versions, rollouts.response_mask, strict=True):
            assert (np.diff(versions[mask]) >= 0).all()
            if self.config.trainer.new_weights == "drain":
                assert len(set(versions[mask])) == 1
        self.learned += [prompt.index for prompt in rollouts.prompts]
        pending = types.SimpleNamespace()
        polls = int(self.random.integers(0, 9))
        is_ready = itertools.chain([False] * polls, itertools.repeat(True))
        self.source_ready = lambda: next(is_ready)
        self.source.on_wait(pending)
        return self.source.metrics()

    def check_end(self):
        """Every prompt that was drawn was learned from once, or was rejected once."""
        assert sorted(self.learned + self.rejected) == list(range(self.stream.drawn))
        assert not self.source._groups and not self.source._finished


@pytest.fixture
def runs(monkeypatch, tmp_path):
    made = []

    def make(seed=0, chance=(0.9, 0.1, 0.3), path="schedule.jsonl", **settings):
        Latencies.random, Latencies.chance = np.random.default_rng(seed), chance
        run = Run(monkeypatch, tmp_path / path, **settings)
        made.append(run)
        monkeypatch.setattr(async_source, "_all_ready", lambda pending: made[-1].source_ready())
        return run

    return make


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 200), marks=pytest.mark.nightly)]
)
def test_never_too_old_never_lost_never_twice(runs, seeds):
    """Also if the process is killed at any step; none of the waits goes on for ever."""
    ages = set()
    kinds = itertools.cycle(itertools.product(("recompute", "keep", "drain"), (True, False)))
    for seed, (new_weights, apart) in zip(seeds, kinds, strict=False):
        random = np.random.default_rng(seed)
        run = runs(
            seed,
            k=int(random.integers(0, 5)),
            # Few shapes, of which each is compiled, where groups are dropped.
            size=2 if seed % 4 == 0 else int(random.integers(1, 4)),
            samples=2 if seed % 4 == 0 else int(random.integers(1, 4)),
            apart=apart,
            chance=tuple(random.uniform(0.05, 0.9, 5)),
            uniform=0.0 if seed % 4 else 0.5,
            new_weights=new_weights,
        )
        saved, step = json.dumps(run.source.get_state()), 1
        learned, rejected = [], []
        while step <= STEPS:
            numbers = run.step(step)
            ages.add(numbers["training/off_policy/staleness/max"])
            assert numbers["training/off_policy/staleness/max"] <= run.k
            if random.random() < 0.25:  # a process is killed: this step was in vain
                run.make()
                run.source.set_state(json.loads(saved))
                run.learned, run.rejected = list(learned), list(rejected)
                continue
            saved = json.dumps(run.source.get_state(), allow_nan=False)
            learned, rejected = list(run.learned), list(run.rejected)
            step += 1
        run.check_end()
    assert len(ages) >= 3  # the bound was met in many ways, not avoided


def test_a_schedule_is_recorded_and_replayed(runs):
    """Other latencies of the learner, the same meetings; one that does not fit is refused."""
    first = runs(k=2, schedule="record")
    for step in range(1, STEPS + 1):
        first.step(step)
        first.source.get_state()
    lines = [json.loads(line) for line in first.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {"0", "1"} == set("".join(line["answers"] for line in lines))
    again = runs(k=2, schedule="replay")
    again.random = np.random.default_rng(99)
    for step in range(1, STEPS + 1):
        again.step(step)
        again.source.get_state()
    assert again.learned == first.learned
    fewer = runs(k=2, schedule="replay", num_steps=3)  # prompts begin as if it had all steps
    for step in range(1, 4):
        fewer.step(step)
        fewer.source.get_state()
    assert fewer.learned == first.learned[: len(fewer.learned)]
    other = runs(k=2, schedule="replay", chance=(0.5,))
    with pytest.raises(
        ScheduleError, match=r"step 1 learned from prompt .* by versions 0 to 0, now"
    ):
        for step in range(1, STEPS + 1):
            other.step(step)
    short = runs(k=2, schedule="replay")
    short.source._schedule._steps[1]["answers"] = ""
    with pytest.raises(ScheduleError, match="step 1 asks more than was recorded"):
        short.step(1)
    with pytest.raises(ScheduleError, match="has 7 steps, but this is step 8"):
        short.source._schedule.begin_step(8, False)
    (first.path.parent / "bad.jsonl").write_text('{"step": 2, "restored": 0}\n')
    for name in ("bad.jsonl", "none.jsonl"):
        with pytest.raises(ScheduleError, match=f"{name}: no recorded schedule"):
            AsyncSchedule("replay", first.path.parent / name, STEPS)


def test_a_resumed_record_goes_on_at_its_step(runs):
    run = runs(k=1, schedule="record")
    saved = {}
    for step in range(1, 4):
        run.step(step)
        saved[step] = run.source.get_state()
    run.make()
    run.source.set_state(saved[2])
    run.step(3)
    run.source.get_state()
    lines = [json.loads(line) for line in run.path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["restored"] for line in lines] == [False, False, True]


def test_all_rejected_has_a_clear_end(runs):
    run = runs(k=2, uniform=1.0)
    with pytest.raises(SamplingError, match="in 9 waves gave 0 of the 2 groups"):
        run.step(1)


@pytest.mark.parametrize("who", ["engine", "reward"])
def test_crash_ends_the_run_and_the_resume_loses_nothing(runs, monkeypatch, who):
    """The engine while the learner is at work or waits; a reward function that gave up."""
    for moment in range(1, 14, 4):
        run = runs(moment, k=2)
        calls = itertools.count()
        whole = {"engine": Latencies.step, "reward": run.score}[who]

        def dies(*args, calls=calls, whole=whole, moment=moment, **kwargs):
            if next(calls) == moment:
                raise RuntimeError("died")
            return whole(*args, **kwargs)

        saved, step, deaths = json.dumps(run.source.get_state()), 1, 0
        with monkeypatch.context() as patch:
            if who == "engine":
                patch.setattr(Latencies, "step", dies)
            else:
                run.source._score = dies
            learned: list[int] = []
            while step <= STEPS:
                try:
                    run.step(step)
                except RuntimeError as error:
                    assert str(error) == "died"
                    deaths += 1
                    run.make()
                    run.source.set_state(json.loads(saved))
                    run.learned = list(learned)
                    continue
                saved, learned = json.dumps(run.source.get_state()), list(run.learned)
                step += 1
        assert deaths == (who == "engine" or moment < STEPS)
        run.check_end()


def test_a_full_buffer_waits_for_the_learner(runs):
    """While an update takes for ever, no more is begun than K steps may use; then all is used."""
    run = runs(k=2, size=3)
    run.step(1)
    never = iter(lambda: False, True)
    run.source_ready = lambda: next(never)
    run.source.on_wait(None)  # returns, although the update is never ready
    numbers = run.source.metrics()
    assert numbers["training/off_policy/buffer"] == 2 * 3
    assert numbers["training/off_policy/in_flight"] == 0
    for step in range(2, STEPS + 1):
        run.step(step)
    run.check_end()


def test_samples_are_not_interrupted_without_need(runs):
    """Only "recompute" has them read again, once for each new version of the weights."""
    for how, wanted in (("recompute", STEPS - 1), ("keep", 0), ("drain", 0)):
        run = runs(k=2, new_weights=how)
        for step in range(1, STEPS + 1):
            run.step(step)
        assert getattr(run.source._in_flight._runner, "pauses", 0) == wanted


def test_a_saved_group_is_as_before():
    from jaxrl_llm.sampling import async_checkpoint

    prompt = Prompt((3, 4), "x", "s", {"a": (1, b"2")}, {"when": b"z"}, 7, ({"role": "user"},))
    samples = [SamplingParams(9), SamplingParams(5)]
    sequences = [
        episode_runner.EpisodeSequence(
            8 + i, prompt.tokens, samples[i], np.array([1, i], np.uint32), (), [5, 6], [True, True],
            [-0.1, float(np.float32(-1e-30))], [1, 2], i == 0,
            np.arange(6, dtype=np.int16).reshape(3, 2),
        )
        for i in range(2)
    ]  # fmt: skip
    group = async_checkpoint.PromptGroup(prompt, 1, 1)
    text = async_checkpoint.to_text(4, group, [(sequences[0], True), (sequences[1], False)])
    number, found, own = async_checkpoint.from_text(text, samples)
    assert number == 4 and (found.oldest_version, found.num_unfinished) == (1, 1)
    assert found.prompt == dataclasses.replace(prompt, ground_truth={"a": [1, b"2"]})
    for (mine, has_ended), wanted, ended in zip(own, sequences, (True, False), strict=True):
        assert has_ended == ended
        np.testing.assert_array_equal(mine.key, wanted.key)
        np.testing.assert_array_equal(mine.routes, wanted.routes)
        kept = {k: v for k, v in vars(wanted).items() if k not in ("key", "routes", "log_probs")}
        assert kept == {k: v for k, v in vars(mine).items() if k in kept}
        np.testing.assert_array_equal(mine.log_probs, np.float32(wanted.log_probs))
