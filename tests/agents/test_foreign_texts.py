"""Texts that nobody can correct: of tools, of environments, in calls that a policy wrote."""

import json
import pathlib

import pytest

from jaxrl_llm.agents.env_manager import EnvManager
from jaxrl_llm.agents.tool_call_formats import FORMATS
from jaxrl_llm.config.agent import AgentConfig, EnvironmentConfig
from jaxrl_llm.data.tokenizer import character_tokenizer, prompt_text, prompt_tokens
from jaxrl_llm.types import Prompt, PromptBatch

FILE = pathlib.Path(__file__).with_name("foreign_texts.py")
TOKENIZER = character_tokenizer()
DEEP = "[" * 900 + "]" * 900
# By format: a call of `f` with the argument `a`, whose value is JSON.
CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": VALUE}}</tool_call>',
    "qwen3_coder": "<tool_call><function=f><parameter=a>VALUE</parameter></function></tool_call>",
    "glm4": "<tool_call>f<arg_key>a</arg_key><arg_value>VALUE</arg_value></tool_call>",
    "llama3": '{"name": "f", "parameters": {"a": VALUE}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": VALUE}}]',
    "harmony": '<|channel|>commentary to=functions.f<|message|>{"a": VALUE}<|call|>',
    "deepseek": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": VALUE}<｜tool▁call▁end｜>'
    ),
}
SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "array"}}}}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_policy_are_clean(name):
    read = FORMATS[name].parse
    written = CALLS[name].replace("VALUE", r'["x\ud83d", "\ud83d\ude00", {"\udc00": 1}]')
    (call,) = read(written, SCHEMAS).calls
    assert not call.problem
    assert dict(call.arguments) == {"a": ["x\ufffd", "\U0001f600", {"\ufffd": 1}]}
    (call,) = read(CALLS[name].replace("VALUE", DEEP), SCHEMAS).calls
    assert "nested" in call.problem and not call.arguments
    json.dumps(call._asdict())


@pytest.fixture(scope="module")
def world():
    config = AgentConfig(
        tools=(f"{FILE}:half", f"{FILE}:echo"),
        environments={"Halves": EnvironmentConfig(environment=f"{FILE}:Halves")},
        default="tool_agent",
        max_turns=9,
        max_result_characters=400,
    )
    with EnvManager(config, TOKENIZER) as world:
        yield world


def begin(world, **info):
    messages = ({"role": "user", "content": "go"},)
    (tokens,) = prompt_tokens(TOKENIZER, [prompt_text(TOKENIZER, messages)], True)
    prompt = Prompt(tokens, "go", "test", "truth", info, 0, messages, {})
    return world.begin(PromptBatch((prompt,)), 1).prompts[0]


def turn(world, text):
    """The policy's turn; whether something follows it."""
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    if not world.submit_turn(0, [*tokens, TOKENIZER.eos_token_id], True):
        return False
    while not world.collect_replies(wait=True):
        pass
    return True


def test_an_episode_with_halves_of_characters_goes_on(world):
    begin(world)
    written = r'{"name": "echo", "parameters": {"value": "x\ud83d"}}'
    for kind in ("text", "pair", "json", "raise", "nested"):
        assert turn(world, f'{{"name": "half", "parameters": {{"kind": "{kind}"}}}}')
    assert turn(world, written)
    assert turn(world, f'{{"name": "echo", "parameters": {{"value": {DEEP}}}}}')
    assert not turn(world, "done")
    (log,) = world.finish()
    said = [message["content"] for message in log.messages if message["role"] == "tool"]
    assert said[:3] == ["a\ufffd", "\U0001f600", '{"k\ufffd": ["\ufffd"]}']
    assert said[3].startswith("Error: ") and "e\ufffd" in said[3]
    assert said[5] == r"'x\ufffd'"
    assert said[6] == "Error: invalid arguments: brackets are nested deeper than 64"
    json.dumps(log.messages, ensure_ascii=False).encode()


def test_an_environment_with_halves_of_characters_goes_on(world):
    opened = begin(world, agent_name="Halves")
    assert opened.messages[-1]["content"] == "start\ufffd test"
    assert turn(world, "hello")
    (log,) = world.finish()
    assert log.messages[-1]["content"] == "step\ufffd <|im_end|>"
