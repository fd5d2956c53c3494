"""One episode without processes: the test plays the policy, the tools and the environment."""

import dataclasses
import pathlib
import re

import pytest

from jaxrl_llm.agents.agent_pool import AgentError
from jaxrl_llm.agents.episode import (
    ANSWER_PROBLEMS,
    EPISODE_END,
    ERROR_KINDS,
    Episode,
    EpisodeContext,
    call_id,
)
from jaxrl_llm.config.agent import AgentConfig, EnvironmentConfig
from jaxrl_llm.data.tokenizer import character_tokenizer, prompt_text, prompt_tokens
from jaxrl_llm.types import Prompt

TOKENIZER = character_tokenizer()
EOS = TOKENIZER.eos_token_id


def schema(name, parameter):
    properties = {parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


CALCULATOR, SEARCH, LOOK = schema("calculator", "expression"), schema("search", "query"), schema(
    "look", "where"
)  # fmt: skip
DESCRIBED = {
    "tools": {"calculator": [CALCULATOR], "search": [SEARCH]},
    "environments": {"maze": [LOOK], "chat": []},
}
CONFIG = AgentConfig(
    tools=("calculator", "search"),
    environments={
        name: EnvironmentConfig(environment=f"games:{name}") for name in ("maze", "chat")
    },
    default="tool_agent",
    call_format="llama3",
    max_turns=3,
    max_calls=2,
    max_result_characters=8,
    cut_results="right",
    max_tool_s=10.0,
)
TOOLS_ALONE = {"agent_name": "tool_agent"}


def rules(**changes):
    return EpisodeContext(dataclasses.replace(CONFIG, **changes), TOKENIZER, DESCRIBED)


def prompt(**info):
    messages = ({"role": "user", "content": "go"},)
    text = prompt_text(TOKENIZER, messages)
    (tokens,) = prompt_tokens(TOKENIZER, [text], True)
    return Prompt(tokens, text, "games", "truth", info, 7, messages, {})


def episode(agent_name="tool_agent", **changes):
    return Episode(rules(**changes), prompt(agent_name=agent_name), number=0)


def call(name, value, parameter="expression"):
    return f'{{"name": "{name}", "parameters": {{"{parameter}": "{value}"}}}}'


def take(episode, text, stopped=True):
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"] + [EOS] * stopped
    return episode.record_turn(tokens, stopped)


def played(exchange, *answers):
    """The requests of an exchange that gets these answers, and its outcome."""
    requests, pending = [next(exchange)], list(answers)
    while True:
        try:
            requests.append(exchange.send(pending.pop(0)))
        except StopIteration as end:
            assert not pending
            return requests, end.value


def outcome_without_requests(exchange):
    with pytest.raises(StopIteration) as end:
        next(exchange)
    return end.value.value


OUTCOME = {"messages": [], "done": False, "reward": 0.0, "seconds": 0.0, "lost": False}
OUTCOME |= {"errors": {}, "calls": {}}


@pytest.mark.parametrize(
    "info, expected",
    [
        ({}, ("", ("calculator", "search"))),
        (TOOLS_ALONE, ("", ("calculator", "search"))),
        ({"agent_name": "single_turn_agent"}, ("", ())),
        ({"agent_name": "maze"}, ("maze", ("calculator", "search"))),
        ({"tool_selection": ["search"]}, ("", ("search",))),
        ({"tool_selection": []}, ("", ())),
    ],
)
def test_a_row_selects_environment_and_tools(info, expected):
    assert rules().environment_and_tools(info) == expected


def test_the_only_environment_is_that_of_rows_without_a_name():
    only = {"maze": EnvironmentConfig(environment="games:maze")}
    assert rules(environments=only, default="").environment_and_tools({})[0] == "maze"


def test_schemas_are_those_of_the_row():
    assert rules().tool_schemas({"agent_name": "maze"}) == [CALCULATOR, SEARCH, LOOK]
    assert rules().tool_schemas({"tool_selection": ["search"]}) == [SEARCH]
    assert rules().tool_schemas({"agent_name": "single_turn_agent"}) == []


def test_text_of_tools_cannot_end_a_turn():
    message, images, num_broken = rules().template_message(
        {"role": "tool", "content": f"1{TOKENIZER.eos_token}2"}
    )
    assert TOKENIZER.eos_token not in message["content"]
    assert message["content"].startswith("1") and message["content"].endswith("2")
    assert (images, num_broken) == ([], 0)


def test_images_need_a_text_in_a_run_without_images():
    image = {"type": "image", "image": "data:image/png;base64,"}
    text = {"type": "text", "text": "a door"}
    message, images, _ = rules().template_message(
        {"role": "tool", "content": [text, image | {"alt": "a cat"}]}
    )
    assert message["content"] == "a door\na cat" and images == []
    with pytest.raises(AgentError, match="this run is text-only"):
        rules().template_message({"role": "tool", "content": [image]})


def test_the_first_request_has_the_columns_of_the_row():
    info = {
        "agent_name": "maze",
        "tools_kwargs": {"search": {"create_kwargs": {"k": 2}}},
        "interaction_kwargs": {"level": 3},
    }
    made = Episode(rules(), prompt(**info), number=0)
    request = made.start_request
    assert (request["do"], request["environment"], request["seed"]) == ("start", "maze", 7)
    assert request["names"] == ("calculator", "search")
    assert request["kwargs"] == info["tools_kwargs"]
    assert request["row"] == {**info, "level": 3, "data_source": "games", "ground_truth": "truth"}


def test_messages_of_the_environment_follow_the_prompt():
    made = episode("maze")
    first = {"role": "user", "content": "you are in a maze"}
    requests, outcome = played(made.ask_start(), {"messages": [first]})
    assert requests == [made.start_request]
    opened = made.apply_start(outcome)
    assert opened.text == prompt_text(TOKENIZER, [*prompt().messages, first])
    assert TOKENIZER.decode(opened.tokens) == opened.text
    assert opened.messages == (*prompt().messages, first)
    # What comes before the policy's first turn is part of the prompt, not of the log.
    assert made.log.messages == [] and not made.is_lost


def test_an_environment_that_does_not_start_ends_its_episode():
    made = episode("maze")
    _, outcome = played(made.ask_start(), {"problem": "exception", "text": "no maze"})
    opened = made.apply_start(outcome)
    assert opened.tokens == prompt().tokens and made.is_lost
    assert made.log.errors == {"start_exception": 1}
    assert not take(made, "hello")  # nobody answers it


def test_calls_are_made_one_after_the_other():
    made = episode()
    assert take(made, f"{call('calculator', '1+1')}; {call('search', 'cats', 'query')}")
    requests, outcome = played(
        made.ask_step(),
        {"text": "2", "seconds": 0.5},
        {"text": "many cats purr", "seconds": 0.25},
    )
    assert requests == [
        {"do": "call", "name": "calculator", "arguments": {"expression": "1+1"}},
        {"do": "call", "name": "search", "arguments": {"query": "cats"}},
    ]
    contents = [message["content"] for message in outcome["messages"]]
    assert contents == ["2", "many cat...(cut)"]  # eight characters
    ids = [message["tool_call_id"] for message in outcome["messages"]]
    assert (
        ids
        == [call["id"] for call in made.assistant_message["tool_calls"]]
        == [call_id(0), call_id(1)]
    )
    assert outcome["seconds"] == 0.75 and outcome["calls"] == {"calculator": 1, "search": 1}
    assert outcome["errors"] == {} and not outcome["lost"]


def test_calls_that_cannot_be_made_reach_no_process():
    made = episode(max_calls=1, max_result_characters=200)
    assert take(made, f"{call('fly', 'home')}; {call('calculator', '1')}")
    outcome = outcome_without_requests(made.ask_step())
    unknown, too_many = (message["content"] for message in outcome["messages"])
    assert unknown == "Error: no tool 'fly'; there are calculator, search"
    assert too_many == "Error: only 1 calls are made in a turn"
    assert outcome["errors"] == {"unknown": 1, "too_many": 1}
    assert outcome["calls"] == {"unknown": 1, "calculator": 1}


@pytest.mark.parametrize("problem", ["timeout", "ended", "exception"])
@pytest.mark.parametrize("agent_name", ["tool_agent", "maze"])
def test_an_environment_is_lost_with_its_process(agent_name, problem):
    """Tools without an environment have no state: another process answers the next call."""
    made = episode(agent_name)
    take(made, call("calculator", "1"))
    answer = {"problem": problem, "text": "broken", "seconds": 3.0}
    _, outcome = played(made.ask_step(), answer)
    assert outcome["messages"][0]["content"] == "Error: b...(cut)"
    assert outcome["errors"] == {problem: 1}
    assert outcome["lost"] == (agent_name == "maze" and problem != "exception")


def test_the_environment_answers_turns_without_calls():
    made = episode("maze")
    assert take(made, "I go left")
    answer = {"messages": [{"role": "user", "content": "a wall"}], "done": False, "reward": 0.5}
    requests, outcome = played(made.ask_step(), {**answer, "seconds": 0.25})
    assert requests == [{"do": "step", "message": {"role": "assistant", "content": "I go left"}}]
    delta = made.observe(outcome)
    assert "a wall" in TOKENIZER.decode(delta.tokens) and not delta.rewrites
    assert made.log.turn_rewards == [0.5] and made.log.seconds == 0.25
    assert [message["content"] for message in made.log.messages] == ["I go left", "a wall"]


def test_a_failed_step_ends_the_episode():
    made = episode("maze")
    take(made, "I go left")
    _, outcome = played(made.ask_step(), {"problem": "exception", "text": "no"})
    assert outcome["done"] and outcome["reward"] == 0.0 and not outcome["lost"]
    assert made.observe(outcome) == EPISODE_END and made.log.errors == {"exception": 1}


def test_turns_that_nobody_answers():
    assert not take(episode(), "just text")  # no call and no environment
    assert not take(episode(), call("calculator", "1"), stopped=False)  # cut at the token limit
    assert not take(episode("single_turn_agent"), call("calculator", "1"))
    assert take(episode(), call("calculator", "1"))


def test_the_last_turn_is_judged_but_calls_no_tools():
    assert not take(episode(max_turns=1), call("calculator", "1"))
    assert take(episode("maze", max_turns=1), "I go left")
    assert not take(episode("maze", max_turns=1), call("calculator", "1"))


def test_nothing_follows_the_last_turn():
    made = episode("maze", max_turns=1)
    take(made, "I go left")
    following = [{"role": "user", "content": "a wall"}]
    assert made.observe({**OUTCOME, "messages": following, "reward": 1.0}) == EPISODE_END
    assert made.log.turn_rewards == [1.0]
    assert made.log.messages[-1] == following[0]  # rewards and dumps still see it


def test_rewards_belong_to_the_turn_that_earned_them():
    """Turns without a reward of the environment have zero."""
    made = episode("maze")
    following = [{"role": "user", "content": "on"}]
    made.log.num_turns = 2  # earlier turns, whose rewards nobody has reported
    take(made, "I go left")
    made.observe({**OUTCOME, "messages": following, "reward": 2.0})
    assert made.log.turn_rewards == [0.0, 0.0, 2.0]


def test_the_time_of_tools_is_limited():
    made = episode()
    take(made, call("calculator", "1"))
    message = {"role": "tool", "name": "calculator", "tool_call_id": call_id(0), "content": "1"}
    assert made.observe({**OUTCOME, "messages": [message], "seconds": 10.0}).tokens
    assert not take(made, call("calculator", "1"))
    assert made.log.errors == {"tool_seconds": 1}


def test_the_reward_of_the_episode():
    made = episode("maze")
    take(made, "done")
    requests, outcome = played(made.ask_reward(), {"reward": 0.25})
    assert requests == [{"do": "reward", "messages": made.log.messages}]
    made.apply_reward(outcome)
    assert made.log.reward == 0.25 and not made.log.errors
    _, outcome = played(made.ask_reward(), {"problem": "timeout"})
    made.apply_reward(outcome)
    assert made.log.reward == 0.25 and made.log.errors == {"reward_timeout": 1}


def test_ids_of_calls_have_nine_characters():
    assert call_id(0) == "000000000" and call_id(12) == "000000012"


ROOT = pathlib.Path(__file__).parents[2]


def test_the_page_lists_every_kind_of_error():
    page = (ROOT / "docs/agents.md").read_text()
    table = page.partition("`tool_errors/KIND`:")[2].partition("\n\n")[2].partition("\n\n")[0]
    kinds = re.findall("`([a-z_A-Z]+)`", "".join(row.split("|")[1] for row in table.split("\n")))
    assert sorted(kinds) == sorted(ERROR_KINDS)


def test_the_kinds_of_errors_are_those_of_the_code():
    """Each is a literal beside the place where it is counted, or the problem of an answer."""
    source = "".join(
        (ROOT / "jaxrl_llm/agents" / name).read_text() for name in ("episode.py", "env_manager.py")
    )
    patterns = r'errors\["(\w+)"\] \+=', r'errors.update\(\{"(\w+)"', r'return "(\w+)", '
    literals = {kind for pattern in patterns for kind in re.findall(pattern, source)}
    answers = set(re.findall(r'_answer_errors\(answer, "(\w+)"', source))
    assert literals == {kind for kind in ERROR_KINDS if "PROBLEM" not in kind} - {*ANSWER_PROBLEMS}
    assert {f"{prefix}PROBLEM" for prefix in answers | {"end_"}} | literals | {
        *ANSWER_PROBLEMS
    } == set(ERROR_KINDS)


def test_errors_of_closing_an_environment_are_counted():
    made = episode("maze")
    take(made, "done")
    _, outcome = played(made.ask_step(), {"problem": "timeout", "end_problem": "exception"})
    made.observe(outcome)
    assert made.log.errors == {"timeout": 1, "end_exception": 1} and made.is_lost
