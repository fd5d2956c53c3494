"""From prompts to `Rollouts`: where tokens, masks, log-probs and texts stand."""

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.rollout import agent
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.requests import SamplingParams
from jaxrl_llm.types import Prompt, PromptBatch

TOKENIZER = character_tokenizer()
NETWORK = tiny.with_sizes(vocab_size=len(TOKENIZER))
SAMPLES = (
    SamplingParams(9, stop_tokens=(1,)),
    SamplingParams(20, stop_tokens=tuple(range(40, 48))),
    SamplingParams(4, temperature=0.0),
)


@pytest.fixture(scope="module")
def setup():
    mesh = tiny.make_mesh()
    engine = Engine(NETWORK, mesh, num_slots=4, max_tokens=64)
    return engine, tiny.rollout_params(tiny.params(NETWORK), mesh, NETWORK)


def prompts(*texts):
    rows = []
    for index, text in enumerate(texts):
        tokens = tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])
        rows.append(Prompt(tokens, text, "test", None, {}, index))
    return PromptBatch(tuple(rows))


def test_fields(setup):
    batch = prompts("a", "two words", "and a longer one than those")
    rollouts = agent.rollout(*setup, TOKENIZER, batch, SAMPLES, jax.random.key(3))
    np.testing.assert_array_equal(rollouts.group_ids, np.repeat([0, 1, 2], 3))
    assert rollouts.prompts == batch.prompts
    assert rollouts.tokens.shape[1] in (32, 64)
    columns = np.arange(rollouts.tokens.shape[1])
    for row, params in enumerate(SAMPLES * 3):
        prompt, length = rollouts.prompt_of(row), rollouts.lengths[row]
        assert prompt is batch.prompts[row // 3]
        tokens, start = rollouts.tokens[row], len(prompt.tokens)
        assert tuple(tokens[:start]) == prompt.tokens
        assert (tokens[length:] == 0).all()
        inside = (columns >= start) & (columns < length)
        np.testing.assert_array_equal(rollouts.response_mask[row], inside)
        assert (rollouts.rollout_log_probs[row][~inside] == 0).all()
        assert (rollouts.rollout_log_probs[row][inside] < 0).all()
        assert rollouts.stopped[row] == (tokens[length - 1] in params.stop_tokens)
        assert rollouts.stopped[row] or inside.sum() == params.max_tokens
        text = TOKENIZER.decode(tokens[inside].tolist(), skip_special_tokens=True)
        assert rollouts.responses[row] == text
    assert 0 < rollouts.stopped.sum() < 9


def test_a_sample_depends_on_key_and_number_alone(setup):
    one, two = (
        agent.rollout(*setup, TOKENIZER, prompts("x", last), SAMPLES[:2], jax.random.key(0))
        for last in ("yz", "something else")
    )
    other = agent.rollout(*setup, TOKENIZER, prompts("x", "yz"), SAMPLES[:2], jax.random.key(1))
    width = min(one.tokens.shape[1], two.tokens.shape[1])
    np.testing.assert_array_equal(one.tokens[:2, :width], two.tokens[:2, :width])
    assert one.responses[:2] != other.responses[:2]


def test_keys_are_the_folded_ones():
    key = jax.random.key(5)
    found = agent._sample_keys(key, 3)
    for i in range(3):
        np.testing.assert_array_equal(found[i], jax.random.key_data(jax.random.fold_in(key, i)))


def test_parameters_of_a_run():
    config = RolloutConfig(
        max_response_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        stop_tokens=(4, 2),
        stop_strings=("so.",),
    )
    want = SamplingParams(7, 0.5, 3, 0.9, 0.1, stop_tokens=(2, 9, 4), stop_strings=("so.",))
    assert agent.sampling_params(config, (2, 9)) == want
