"""Harnesses of all kinds against the server of a run: their samples, and what failures cost."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
import serving_model
import session_agents

from jaxrl_llm.agents.agent_pool import AgentError
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.rollout.session_runner import SessionRunner
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.sessions.harness_manager import HarnessManager
from jaxrl_llm.types import Prompt, Weights

FOLDER = pathlib.Path(__file__).parent
TOKENIZER = serving_model.byte_tokenizer(session_agents.TEMPLATE)
EOS = TOKENIZER.eos_token_id
SERVED = ServedModel("m", TOKENIZER, (EOS,), len(TOKENIZER), max_tokens=2000, call_format="hermes")
MESSAGES = ({"role": "user", "content": "What is 1 + 1?"},)
PROMPT = Prompt((5, 6), "", "test", "2", {"number": 7}, 0, MESSAGES)


def played(harness, count=2, max_tokens=10_000, judged=(), **settings):
    """Runs a harness on some episodes; returns their sequences and logs."""
    if "." not in harness:
        harness = f"{FOLDER / 'harnesses.py'}:{harness}"
    config = AgentConfig(harness=harness, **{"harness_timeout_s": 60.0, **settings})
    engine = session_agents.ScriptedEngine(
        TOKENIZER, session_agents.random_reply, max_tokens=SERVED.max_tokens
    )
    with HarnessManager(config, SERVED, judged) as manager:
        wave = manager.open_wave()
        params = SamplingParams(max_tokens, stop_tokens=(EOS,))
        runner = SessionRunner(engine, [params] * count, wave)
        runner.start(PROMPT, 0, episodes.sample_keys(jax.random.key(0), count))
        for _ in runner.run(Weights({}, 5)):
            pass
        wave.close()
    order = range(count)
    return [runner.sequences[n] for n in order], [runner.logs[n] for n in order], engine


def test_a_function_of_two_turns_is_one_sequence():
    sequences, logs, _ = played("by_urllib")
    for episode, log in zip(sequences, logs, strict=True):
        (sequence,) = episode
        assert log.reward == 7 and log.environment == "harness"
        assert (log.num_turns, log.num_requests, log.num_unmatched) == (2, 2, 0)
        assert log.messages[0]["role"] == log.messages[-1]["role"] == "assistant"
        starts = np.flatnonzero(np.diff([0, *sequence.sampled]) == 1)
        assert len(starts) == 2 and {*sequence.versions} == {0, 5}
        assert "What is 1 + 1?" in TOKENIZER.decode(sequence.prompt)
    # The samples of an episode are its own, and the same whenever it is played again.
    assert sequences[0][0].tokens != sequences[1][0].tokens
    again, _, _ = played("by_urllib")
    assert [s[0].tokens for s in again] == [s[0].tokens for s in sequences]


def test_clients_streams_and_protocols():
    (sequences, _), (log, _), _ = played("by_openai", judged=("test",))
    # A completion of text begins a branch; no reward: reward functions judge.
    assert len(sequences) == 2 and log.environment == "" and log.num_branches == 1
    (sequences, _), (log, _), _ = played("by_messages")
    assert len(sequences) == 1 and log.reward == 1.0
    assert sum(np.diff([0, *sequences[0].sampled]) == 1) == 2


def test_a_command_in_another_language():
    sequences, logs, _ = played(f"sh {FOLDER / 'agent.sh'}")
    for episode, log in zip(sequences, logs, strict=True):
        assert len(episode) == 1 and log.reward == 0.25 and log.num_turns == 2
        assert not log.errors


@pytest.mark.parametrize(
    ("harness", "kind", "num_turns"),
    [("raises", "exception", 1), ("exits", "ended", 0), ("no_number", "exception", 0)],
)
def test_a_harness_that_fails_costs_its_episode(harness, kind, num_turns):
    sequences, logs, _ = played(harness, failure_reward=-2.0)
    for episode, log in zip(sequences, logs, strict=True):
        assert log.errors == {f"harness_{kind}": 1} and log.reward == -2.0
        assert log.environment == "harness" and log.num_turns == num_turns
        assert sum(episode[0].sampled) > 0 if num_turns else not episode[0].tokens


def test_limits_of_time_tokens_and_requests():
    (episode, _), (log, _), _ = played("hangs", harness_timeout_s=3.0)
    assert log.errors == {"harness_timeout": 1} and sum(episode[0].sampled) > 0
    _, (log, _), _ = played("hostile", max_requests=8)
    assert log.reward == 1.0 and log.errors == {"too_many_requests": 1}
    (episode, _), (log, _), _ = played("by_urllib", max_tokens=4)
    assert sum(episode[0].sampled) == 4 and log.errors["no_tokens_left"] == 1
    assert log.errors["harness_exception"] == 1


def test_coroutines_share_a_process_and_parallel_calls_branch():
    sequences, logs, _ = played("many_at_once", count=6, episodes_per_process=3)
    assert [log.reward for log in logs] == [1.0] * 6
    assert all(len(episode) == 3 for episode in sequences)
    # Three different samples of one prompt.
    assert all(len({tuple(s.tokens) for s in episode}) > 1 for episode in sequences)


def test_what_cannot_work_is_named_before_or_at_the_first_row():
    with pytest.raises(AgentError, match=r"cannot be used: .*no_such"):
        played("no_such")
    with pytest.raises(AgentError, match=r"'no_such_program\.x' is not found"):
        played("no_such_program.x --flag")
    with pytest.raises(AgentError, match="returned no reward for row 0"):
        played("by_openai", judged=("other",))
    assert dataclasses.replace(SERVED, name="n").tokenize_chat is None


def test_roles_have_sequences_and_rewards_of_their_own():
    roles = ("proposer", "solver")
    sequences, logs, _ = played("two_roles", roles=roles)
    for episode, log in zip(sequences, logs, strict=True):
        assert not log.errors and log.environment == "harness"
        assert [sequence.role for sequence in episode] == [0, 1]
        assert [np.sum(np.diff([0, *s.sampled]) == 1) for s in episode] == [1, 2]
        assert [log.total_reward(role) for role in (0, 1)] == [0.25, 7.0]
        assert log.num_branches == 0
        # The same prompt, but another sample for another role.
        assert episode[0].prompt == episode[1].prompt
        assert episode[0].tokens != episode[1].tokens[: len(episode[0].tokens)]
    _, (log, _), _ = played("one_role_short", roles=roles, failure_reward=-2.0)
    assert log.errors == {"harness_exception": 1} and log.role_rewards == [-2.0, -2.0]
    # One number is of all roles, and a role's address is none without roles.
    _, (log, _), _ = played("two_roles")
    assert log.errors == {"harness_exception": 1}
