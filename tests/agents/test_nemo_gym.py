"""NeMo Gym's resources servers: a real HTTP server with their public interface, and sessions."""

import contextlib
import itertools
import json
import uuid

import jax
import local_server
import pytest
import serving_model
import session_agents

from jaxrl_llm.agents.adapters import nemo_gym
from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.rollout.session_runner import SessionRunner
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.sessions.harness_manager import HarnessManager
from jaxrl_llm.types import Prompt, Weights

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
TASK = {
    "id": 3,
    "responses_create_params": {
        "input": [{"role": "user", "content": "Is it cold in Oslo?"}],
        "tools": [WEATHER],
        "parallel_tool_calls": False,
    },
    "expected": "cold",
    "agent_ref": {"type": "responses_api_agents", "name": "weather"},
}


@contextlib.contextmanager
def resources_server(fails_in=""):
    """A server with sessions by cookie, one tool and a verification; yields address and log."""
    sessions, log = {}, []

    class Handler(local_server.JsonHandler):
        def do_POST(self):
            body = self.read_json()
            path, cookie = self.path.strip("/"), self.headers.get("Cookie", "")
            session = cookie.partition("session=")[2] or uuid.uuid4().hex
            status, answer = 200, {}
            if path == fails_in:
                status, answer = 500, {"detail": "broken"}
            elif path == "seed_session":
                sessions[session] = {"task": body["id"], "calls": 0}
            elif path == "get_weather":
                if "city" not in body:
                    status, answer = 422, {"detail": "city is missing"}
                else:
                    sessions[session]["calls"] += 1
                    answer = {"weather": f"cold in {body['city']}"}
            elif path == "verify":
                log.append(body)
                last = body["response"]["output"][-1]
                text = "".join(part["text"] for part in last.get("content", ()))
                right = body["expected"] in text and sessions[session] == {"task": 3, "calls": 1}
                answer = {**body, "reward": 1.0 if right else 0.25}
            else:
                status, answer = 404, {"detail": "Not Found"}
            self.reply(status, answer, [("Set-Cookie", f"session={session}")])

    with local_server.serving(Handler) as address:
        yield address, log


def played(address, *turns):
    """Plays the task with these turns of the policy; returns sequences and log."""
    tokenizer = serving_model.byte_tokenizer(session_agents.TEMPLATE)
    eos = tokenizer.eos_token_id
    served = ServedModel("m", tokenizer, (eos,), len(tokenizer), 4000, call_format="hermes")
    (row,) = nemo_gym.task_rows(address, [json.dumps(TASK)])
    prompt = Prompt((5,), "", row["data_source"], "", row["extra_info"], 0, tuple(row["prompt"]))
    said = itertools.chain(turns, itertools.repeat("never"))
    engine = session_agents.ScriptedEngine(tokenizer, lambda _: next(said), max_tokens=4000)
    config = AgentConfig(harness=f"{nemo_gym.__name__}:solve", harness_timeout_s=60.0)
    with HarnessManager(config, served) as manager:
        wave = manager.open_wave()
        runner = SessionRunner(engine, [SamplingParams(10_000, stop_tokens=(eos,))], wave)
        runner.start(prompt, 0, episodes.sample_keys(jax.random.key(0), 1))
        for _ in runner.run(Weights({}, 0)):
            pass
        wave.close()
    return runner.sequences[0], runner.logs[0]


def call(name="get_weather", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_are_called_in_a_session_and_the_output_is_verified():
    with resources_server() as (address, verified):
        sequences, log = played(address, call(city="Oslo"), "It is cold.")
    assert log.reward == 1.0 and not log.errors and log.num_turns == 2
    assert len(sequences) == 1  # one dialogue, each turn as it was sampled
    (body,) = verified
    output = body["response"]["output"]
    assert [item["type"] for item in output] == [
        "function_call", "function_call_output", "message"
    ]  # fmt: skip
    assert json.loads(output[1]["output"]) == {"weather": "cold in Oslo"}
    assert body["responses_create_params"] == TASK["responses_create_params"]
    assert body["response"]["object"] == "response" and body["id"] == 3


def test_an_error_of_a_tool_is_an_answer():
    with resources_server() as (address, verified):
        _, log = played(address, call(town="Oslo"), call(city="Oslo"), "It is cold.")
    assert log.reward == 1.0 and log.num_turns == 3
    assert "city is missing" in verified[0]["response"]["output"][1]["output"]
    with resources_server() as (address, _):
        _, log = played(address, "It is warm.")
    assert log.reward == 0.25


@pytest.mark.parametrize("path", ["seed_session", "verify"])
def test_a_server_that_fails_costs_the_episode_and_is_named(path, caplog):
    with resources_server(fails_in=path) as (address, _), caplog.at_level("WARNING"):
        _, log = played(address, "It is cold.")
    assert log.errors == {"harness_exception": 1}
    with resources_server(fails_in=path) as (address, _):
        server = nemo_gym.ResourcesServer(address)
        with pytest.raises(nemo_gym.ResourcesServerError, match=f"{path}: status 500: .*broken"):
            server.seed(TASK)
            server.verify(TASK, {})
    with pytest.raises(nemo_gym.ResourcesServerError, match="start the server, or correct it"):
        nemo_gym.ResourcesServer(address).seed(TASK)


def test_lines_that_are_no_tasks():
    with pytest.raises(ValueError, match="tasks line 1: a task has responses_create_params"):
        list(nemo_gym.task_rows("http://x", ['{"question": 1}'], "tasks"))
    with pytest.raises(ValueError, match="is no address"):
        list(nemo_gym.task_rows("localhost:80", []))
    task = {"responses_create_params": {"input": "What?"}}
    (row,) = nemo_gym.task_rows("http://x", [json.dumps(task)])
    assert row["prompt"] == [{"role": "user", "content": "What?"}]
    assert row["data_source"] == "nemo_gym" and row["extra_info"]["task"] == task
