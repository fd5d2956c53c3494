"""A dump of rollouts is complete, valid JSON under verl's keys."""

import json

import numpy as np
import pytest

from jaxrl_llm import types
from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.metrics import writer as writer_lib
from jaxrl_llm.metrics.writer import Writer

QUIET = MetricsConfig(console=False, tensorboard=False)


@pytest.fixture
def sampled():
    prompt = types.Prompt(
        tokens=(1, 2),
        text="1+1=\u2028",
        data_source="sums",
        ground_truth={"answer": np.int64(2)},
        extra_info={},
        index=0,
    )
    rollouts = types.Rollouts(
        tokens=np.zeros((2, 4), np.int32),
        response_mask=np.zeros((2, 4), bool),
        rollout_log_probs=np.zeros((2, 4), np.float32),
        versions=np.zeros((2, 4), np.int32),
        lengths=np.array([3, 4]),
        group_ids=np.array([0, 0]),
        stopped=np.array([True, False]),
        prompts=(prompt,),
        responses=('"2"\n', "\ud800 löng"),
    )
    rewards = types.Rewards(
        scores=np.array([1.0, np.nan], np.float32),
        terms={"answer": np.array([1.0, 0.5])},
        weights={"answer": np.ones(2)},
        costs=np.zeros(2),
        baselines=np.zeros(2),
        details=({"acc": True}, {"error": ValueError("bad")}),
        num_failures=1,
    )
    return rollouts, rewards


def test_lines_of_a_dump(tmp_path, sampled):
    Writer(tmp_path, QUIET).write_rollouts(12, *sampled)
    path = tmp_path / "rollouts" / "12.jsonl"
    with path.open(encoding="utf-8") as file:
        first, second = (json.loads(line) for line in file)
    assert first == {
        "input": "1+1=\u2028",
        "output": '"2"\n',
        "gts": {"answer": 2},
        "score": 1.0,
        "step": 12,
        "data_source": "sums",
        "num_tokens": 1,
        "stopped": True,
        "terms": {"answer": 1.0},
        "details": {"acc": True},
    }
    assert (second["score"], second["output"]) == (None, "? löng")
    assert (second["details"], second["stopped"]) == ({"error": "bad"}, False)


def test_a_dump_that_fails_leaves_the_one_before(tmp_path, sampled, monkeypatch):
    writer = Writer(tmp_path, QUIET)
    writer.write_rollouts(1, *sampled)
    path = tmp_path / "rollouts" / "1.jsonl"
    before = path.read_bytes()

    def crash(source, target):
        raise OSError("killed")

    monkeypatch.setattr(writer_lib.os, "replace", crash)
    with pytest.raises(OSError, match="killed"):
        writer.write_rollouts(1, *sampled)
    assert path.read_bytes() == before


def test_the_writer_dumps_when_asked(tmp_path, sampled):
    quiet = dict(console=False, tensorboard=False)
    with Writer(tmp_path, MetricsConfig(**quiet, rollouts_every=2)) as writer:
        for step in (1, 2, 3, 4):
            writer.write_rollouts(step, *sampled)
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["2.jsonl", "4.jsonl"]
    with Writer(tmp_path / "off", MetricsConfig(**quiet, rollouts_every=0)) as writer:
        writer.write_rollouts(1, *sampled)
    assert not (tmp_path / "off" / "rollouts").exists()
