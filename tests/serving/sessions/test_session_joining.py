"""Sessions of random agents: each sampled token bears loss once, and no id ever changes."""

import dataclasses
import random

import jax
import numpy as np
import pytest
import serving_model
import session_agents
import tiny
from session_agents import ScriptedEngine, ScriptedWave

from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.rollout.session_runner import SessionRunner, session_rollouts
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.types import Prompt, PromptBatch, Weights

TOKENIZER = serving_model.byte_tokenizer(session_agents.TEMPLATE)
EOS = TOKENIZER.eos_token_id
SERVED = ServedModel("m", TOKENIZER, (EOS,), len(TOKENIZER), max_tokens=4000, call_format="hermes")
PROMPT = Prompt((5, 6), "", "", None, {}, 0)


def run_sessions(engine, make_agent, count, params, served=SERVED, pauses=False):
    """Runs sessions; returns the runner and its wave."""
    wave = ScriptedWave(served, make_agent)
    runner = SessionRunner(engine, [params], wave)
    for number, key in enumerate(episodes.sample_keys(jax.random.key(3), count)):
        runner.start(PROMPT, number, key[None])
    step = 0
    while runner.is_running:
        runner.step(Weights({}, step))
        step += 1
        if pauses and step % 3 == 0:
            runner.pause()
            runner.resume()
    return runner, wave


@pytest.mark.parametrize(
    ("num_wild", "num_linear", "pauses"),
    [
        (12, 4, True),
        pytest.param(200, 100, False, marks=pytest.mark.slow),
        pytest.param(200, 100, True, marks=pytest.mark.nightly),
    ],
)
def test_each_sampled_token_bears_loss_once_and_keeps_its_context(num_wild, num_linear, pauses):
    engine = ScriptedEngine(TOKENIZER, session_agents.random_reply, max_tokens=4000)

    def make_agent(number):
        draw = random.Random(number)
        kind = session_agents.wild_agent if number < num_wild else session_agents.linear_agent
        return kind(draw)

    params = SamplingParams(10_000, stop_tokens=(EOS,))
    runner, _ = run_sessions(engine, make_agent, num_wild + num_linear, params, pauses=pauses)
    sequences = [s for number in sorted(runner.sequences) for s in runner.sequences[number]]
    trained = []
    for sequence in sequences:
        tokens = [*sequence.prompt, *sequence.tokens]
        start = len(sequence.prompt)
        for place, is_sampled in enumerate(sequence.sampled):
            log_prob = sequence.log_probs[place]
            if not is_sampled:
                assert log_prob == 0.0
                continue
            trained.append(log_prob)
            context, token = engine.contexts[log_prob]
            assert token == sequence.tokens[place]
            assert list(context) == tokens[: start + place]
    assert len(trained) == len(set(trained)) == len(engine.contexts) > 100 * num_wild
    logs = runner.logs
    # A client that changes only the form of what it got begins no branch.
    linear, wild = range(num_wild, num_wild + num_linear), range(num_wild)
    assert all(len(runner.sequences[number]) == 1 for number in linear)
    assert all(logs[number].num_unmatched == 0 for number in linear)
    assert all(sum(runner.sequences[number][0].sampled) > 20 for number in linear)
    assert sum(logs[number].num_branches for number in wild) > num_wild
    assert 0 < sum(logs[number].num_unmatched for number in wild) < num_wild
    # What was retained is freed when its episode ends.
    assert len(engine.freed) == len(set(engine.freed)) > num_wild


def test_rows_of_a_tiny_model_have_the_log_probs_of_a_full_pass():
    network = tiny.with_sizes(vocab_size=len(TOKENIZER), max_positions=1024)
    params = tiny.params(network)
    mesh = tiny.make_mesh()
    engine = Engine(
        network,
        mesh,
        num_slots=8,
        max_tokens=400,
        decode=TOKENIZER.decode,
        prompt_shapes=((2, 400),),
    )
    served = dataclasses.replace(SERVED, max_tokens=400)
    temperature = 0.9
    sampling = SamplingParams(64, temperature=temperature, stop_tokens=(EOS,))
    wave = ScriptedWave(served, lambda number: short_turns(random.Random(number)))
    host = type("Host", (), {"open_wave": lambda self: wave})()
    weights = Weights(tiny.rollout_params(params, mesh, network), 1)
    rollouts, statistics = session_rollouts(
        engine,
        weights,
        TOKENIZER,
        PromptBatch((PROMPT, PROMPT)),
        [sampling] * 2,
        jax.random.key(0),
        host,
    )
    rows = len(rollouts.lengths)
    assert rows > 4 and rollouts.response_mask.sum() == wave.num_delivered > 60
    assert statistics.decode_tokens + wave.num_samples == wave.num_delivered
    expected = np.asarray(
        tiny.teacher_forced(rollouts.tokens, np.full(rows, temperature), network, params)
    )
    mask = rollouts.response_mask
    np.testing.assert_allclose(rollouts.rollout_log_probs[mask], expected[mask], atol=1e-4)
    assert not rollouts.rollout_log_probs[~mask].any()
    _, episode_of_row = np.unique(rollouts.last_rows, return_inverse=True)
    assert (rollouts.group_ids == episode_of_row // 2).all()


def short_turns(draw):
    """An agent with short turns, so that a model that never stops has several."""
    agent = session_agents.wild_agent(draw)
    replies = None
    while True:
        try:
            bodies = agent.send(replies)
        except StopIteration:
            return
        replies = yield [{**body, "max_tokens": 6} for body in bodies]
