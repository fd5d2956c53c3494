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


CONSTRAINED = """
import json, urllib.request

NUMBER = {"type": "integer", "minimum": 10, "maximum": 99}
TOOL = {"type": "function", "function": {"name": "calculator", "strict": True, "parameters": {
    "type": "object", "properties": {"expression": {"type": "string", "pattern": "[0-9]{2}"}},
    "required": ["expression"], "additionalProperties": False}}}


def ask(base_url, **fields):
    body = {"model": "policy", **fields}
    request = urllib.request.Request(
        base_url + "/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]


def solve(row, base_url):
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
    messages = list(row["prompt"])
    first = ask(base_url, messages=messages, response_format=schema)
    if first["finish_reason"] == "stop":
        assert 10 <= json.loads(first["message"]["content"]) <= 99, first
    called = ask(base_url, messages=messages, tools=[TOOL], tool_choice="required")
    if called["finish_reason"] == "tool_calls":
        (call,) = called["message"]["tool_calls"]
        assert len(json.loads(call["function"]["arguments"])["expression"]) == 2, call
    assert {first["finish_reason"], called["finish_reason"]} <= {"stop", "tool_calls", "length"}
    return float(len(called["message"].get("tool_calls") or ()))
"""


@pytest.mark.slow
def test_constrained_requests_are_learned_from_over_the_tokens_they_allow(tmp_path, cache):
    (tmp_path / "agent.py").write_text(CONSTRAINED)
    settings = {
        "agent.harness": f"{tmp_path}/agent.py:solve",
        "rollout.support_tokens": 16,
        "rollout.max_response_tokens": 64,
        "rollout.stop_tokens": (),
        "trainer.num_steps": 2,
        "warm_start.num_steps": 0,
        "evaluation.before": False,
        "metrics.rollouts_every": 1,
        "metrics.rollout_tokens": True,
        "algorithm.entropy_coef": 0.1,
    }
    steps = launch(tmp_path / "run", cache, **settings)
    rows = [
        json.loads(line) for line in (tmp_path / "run/rollouts/2.jsonl").read_text().splitlines()
    ]
    for step in (1, 2):
        assert steps[step]["training/rollout_probs_diff_max"] < 1e-5
        assert steps[step].get("tool_errors/total", 0) == 0
        assert steps[step]["actor/grad_norm"] > 1e-4
    assert any(len(ids) == 1 for row in rows for ids in row["support"] if ids)
