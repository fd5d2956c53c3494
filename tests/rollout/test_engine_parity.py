"""Greedy rollout against transformers, token for token, for every family."""

import hf_checkpoints
import numpy as np
import pytest
import tiny
import torch

from jaxrl_llm.models import huggingface
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.requests import Request, SamplingParams

NUM_TOKENS = 24


@pytest.mark.parametrize("family", hf_checkpoints.CONFIGS)
def test_greedy_tokens_equal_transformers(family, tmp_path):
    theirs = hf_checkpoints.make(tmp_path, family, num_hidden_layers=2)
    network = Network(huggingface.read_shape(tmp_path))
    mesh = tiny.make_mesh()
    params = tiny.rollout_params(huggingface.load(tmp_path, network), mesh, network)
    engine = Engine(network, mesh, num_slots=4, max_tokens=64)
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(4, 96, n).tolist()) for n in (1, 30, 17, 8)]
    greedy = SamplingParams(NUM_TOKENS, temperature=0.0, stop_tokens=(2, 3))
    requests = [Request(prompt, np.zeros((1, 2), np.uint32), (greedy,)) for prompt in prompts]
    for prompt, (completion,) in zip(prompts, engine.generate(params, requests), strict=True):
        tokens = torch.tensor([prompt])
        want = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
        )
        assert completion.tokens == want[0, len(prompt) :].tolist()
        assert completion.stopped == (completion.tokens[-1] in (2, 3))
