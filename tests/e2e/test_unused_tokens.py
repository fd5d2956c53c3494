"""A policy whose vocabulary is padded past its tokenizer samples and trains text alone."""

import dataclasses
import json

import numpy as np
import pytest
import runs
import tiny

from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.trainer import rl

NUM_TOKENS, PADDED = 104, 160


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    network = Network(dataclasses.replace(tiny.SHAPE, vocab_size=PADDED, mlp_size=64))
    checkpoint.save(path, network, tiny.params(network), character_tokenizer())
    return path


def trained(tmp_path, folder, **changes):
    """The sampled tokens of a run's two steps, and the metrics of the first."""
    settings = {
        "model.path": str(folder),
        "trainer.num_steps": 2,
        "warm_start.num_steps": 0,
        "metrics.rollout_tokens": True,
        "metrics.rollouts_every": 1,
        "evaluation.every": 0,
        "evaluation.before": False,
        **changes,
    }
    workdir = tmp_path / "run"
    rl.train(runs.config("grpo_tiny", settings), workdir)
    rows = [
        json.loads(line)
        for path in sorted((workdir / "rollouts").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return np.concatenate([row["tokens"] for row in rows]), runs.metrics(workdir)[1]


def test_ids_without_a_text_are_never_sampled(tmp_path, folder):
    tokens, first = trained(tmp_path, folder)
    # A third of 160 ids have no text: random weights would sample one in every few tokens.
    assert len(tokens) > 200 and tokens.max() < NUM_TOKENS
    # The engine and the learner compute the same distribution, which is over 104 tokens alone.
    assert first["training/rollout_probs_diff_max"] < 1e-5
    assert first["actor/entropy"] <= np.log(NUM_TOKENS)


@pytest.mark.slow
def test_a_setting_allows_them(tmp_path, folder):
    allowed = {"rollout.suppress_unused_tokens": False}
    tokens, _ = trained(tmp_path, folder, **allowed)
    assert tokens.max() >= NUM_TOKENS
