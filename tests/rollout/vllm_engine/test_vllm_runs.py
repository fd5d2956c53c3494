"""Runs over a worker: its death ends them with a reason, and they resume; vLLM is stood in for."""

import itertools
import json
import os

import pytest
import recipe_settings
import runs

import jaxrl_llm
from jaxrl_llm.processes import supervisor
from jaxrl_llm.rollout.vllm_engine.worker_client import VllmError

SMALL = recipe_settings.merged(
    recipe_settings.merged(recipe_settings.SUMS, recipe_settings.UNTAUGHT),
    {
        "model": {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_size": 8},
        "mesh": {"data": 1, "fsdp": 1},
        "algorithm": {"recipe": "grpo", "samples_per_prompt": 4},
        "rollout": {"engine": "vllm", "max_response_tokens": 6},
        "trainer": {"num_steps": 4, "prompts_per_step": 4, "max_tokens_per_microbatch": 512},
        "checkpoint": {"every": 1},
        "metrics": {"rollout_tokens": True},
    },
)


def train(folder, python, **changes):
    vllm = {"python": python, "llm_args": {"most": "12"} | changes.pop("llm_args", {})}
    values = recipe_settings.merged(SMALL, {"rollout": {"vllm": vllm}})
    jaxrl_llm.train(recipe_settings.merged(values, changes), folder)


def versions(folder, step):
    rows = map(json.loads, (folder / f"rollouts/{step}.jsonl").read_text().splitlines())
    return set(itertools.chain.from_iterable(row["versions"] for row in rows))


@pytest.mark.slow
def test_a_dead_worker_ends_a_run_that_then_resumes(stand_in, tmp_path, one_device, monkeypatch):
    before = set(supervisor.descendants(os.getpid()))
    died = {"die_at": "15"}  # in the third step: each samples for six
    with pytest.raises(VllmError, match="ended with signal SIGKILL in 'step'"):
        train(tmp_path / "run", stand_in, llm_args=died)
    assert list(runs.metrics(tmp_path / "run")) == [1, 2]
    assert set(supervisor.descendants(os.getpid())) <= before
    monkeypatch.setenv("STAND_IN_LIVES", "1")
    # Where and how vLLM runs may change.
    train(tmp_path / "run", stand_in, llm_args={**died, "more": "1"})
    assert list(runs.metrics(tmp_path / "run")) == [1, 2, 3, 4]
    assert set(supervisor.descendants(os.getpid())) <= before
    train(tmp_path / "whole", stand_in)
    for step in range(1, 5):
        assert versions(tmp_path / "run", step) == versions(tmp_path / "whole", step) == {step - 1}
        ids = [
            [json.loads(line)["tokens"] for line in (folder / f"rollouts/{step}.jsonl").open()]
            for folder in (tmp_path / "run", tmp_path / "whole")
        ]
        assert ids[0] == ids[1]


@pytest.mark.slow
@pytest.mark.parametrize("new_weights", ["recompute", "drain", "keep"])
@pytest.mark.parametrize("step_s", ["0.0", "0.05"])
def test_samples_asynchronously(stand_in, tmp_path, one_device, new_weights, step_s):
    trainer = {"sampling": "async", "max_staleness": 1, "new_weights": new_weights}
    evaluation = {"every": 2, "samples_per_prompt": 1}
    changes = {"trainer": trainer, "evaluation": evaluation, "llm_args": {"step_s": step_s}}
    train(tmp_path / "run", stand_in, **changes)
    assert set(runs.metrics(tmp_path / "run")) >= {1, 2, 3, 4}
    for step in range(1, 5):
        assert versions(tmp_path / "run", step) <= {step - 2, step - 1}
