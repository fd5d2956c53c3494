"""Runs of a black-box agent: resumed, ahead of the learner, in two processes."""

import json

import processes
import pytest
import runs

NAME, STEPS = "agent_harness_tiny", 4
SETTINGS = {
    "trainer.num_steps": STEPS,
    "trainer.prompts_per_step": 2,
    "checkpoint.every": 2,
    "checkpoint.keep": 4,
    "data.arithmetic_train_prompts": 100,
    "data.arithmetic_eval_prompts": 4,
    "data.max_prompt_tokens": 24,
    "rollout.max_response_tokens": 24,
    "evaluation.num_prompts": 4,
    "evaluation.every": 0,
    "evaluation.after": False,
    # The length of the run must not decide the learning rate: it is cut in two.
    "trainer.optimizer.schedule": "constant",
    "trainer.optimizer.warmup_steps": 0,
    # So that an untaught policy ends its turns.
    "rollout.stop_tokens": tuple(range(20, 28)),
}


def launch(folder, cache, **settings):
    arguments = [f"--workdir={folder}", *runs.flags(NAME, {**SETTINGS, **settings})]
    runs.launch("train", arguments, cache)
    return runs.metrics(folder)


@pytest.mark.slow
def test_a_resumed_run_repeats_its_samples(tmp_path, cache):
    whole = launch(tmp_path / "whole", cache)
    assert whole[STEPS]["agent/requests"] >= 8 and whole[STEPS]["num_turns/max"] >= 1
    assert all(numbers.get("tool_errors/total", 0) < 8 for numbers in whole.values())
    launch(tmp_path / "two", cache, **{"trainer.num_steps": 2})
    resumed = launch(tmp_path / "two", cache)
    for step in (3, 4):
        assert runs.repeatable(resumed[step]) == runs.repeatable(whole[step])
    rows = [
        json.loads(line)
        for line in (tmp_path / "whole/rollouts" / f"{STEPS}.jsonl").read_text().splitlines()
    ]
    assert all(row["num_turns"] >= 1 and row["sampled"] for row in rows)


@pytest.mark.slow
def test_agents_run_ahead_of_the_learner(tmp_path, cache):
    ahead = {"trainer.sampling": "async", "trainer.max_staleness": 1}
    half = launch(tmp_path / "run", cache, **ahead, **{"trainer.num_steps": 2})
    assert set(half) == {0, 1, 2}
    numbers = launch(tmp_path / "run", cache, **ahead)
    assert set(numbers) == {0, 1, 2, 3, 4}
    assert all(0 <= numbers[n]["training/off_policy/staleness/max"] <= 1 for n in range(1, 5))
    assert numbers[STEPS]["agent/requests"] >= 8


@pytest.mark.nightly
def test_two_processes_sample_what_one_does(tmp_path, cache):
    """Each process runs the agents of its own half; both sample for all."""
    for folder, count in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        flags = runs.flags(NAME, SETTINGS)
        command = ["launch/train.py", f"--workdir={tmp_path / folder / 'run'}", *flags]
        processes.run(command, count, 8 // count, cache)
    one, two = (runs.metrics(tmp_path / folder / "run") for folder in ("one", "two"))
    for step in range(1, STEPS + 1):
        for name in ("critic/score/mean", "response_length/mean", "agent/requests"):
            assert one[step][name] == two[step][name]
        assert one[step]["actor/grad_norm"] == pytest.approx(two[step]["actor/grad_norm"], rel=1e-3)
