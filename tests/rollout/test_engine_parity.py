"""Greedy rollout against transformers, token for token, for every family."""

import hf_checkpoints
import numpy as np
import pytest
import tiny

from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

NUM_TOKENS = 24


@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
def test_greedy_tokens_equal_transformers(family, tmp_path):
    theirs = hf_checkpoints.expected(family, "greedy")
    hf_checkpoints.make(tmp_path, family)
    network = Network(checkpoint.read_architecture(tmp_path))
    mesh = tiny.make_mesh()
    params = tiny.rollout_params(checkpoint.load(tmp_path, network), mesh, network)
    engine = Engine(network, mesh, num_slots=4, max_tokens=64)
    prompts = [tuple(theirs[f"{i}.prompt"].tolist()) for i in range(4)]
    greedy = SamplingParams(NUM_TOKENS, temperature=0.0, stop_tokens=(2, 3))
    requests = [Request(prompt, np.zeros((1, 2), np.uint32), (greedy,)) for prompt in prompts]
    for i, (completion,) in enumerate(engine.generate(params, requests)):
        assert completion.tokens == theirs[f"{i}.answer"].tolist()
        assert completion.is_stopped == (completion.tokens[-1] in (2, 3))
