"""Runs whose responses follow a JSON schema: `rollout.schema`."""

import json

import pytest
import runs
from test_support import SETTINGS, steps_of

from jaxrl_llm.config import ConfigError
from jaxrl_llm.trainer import rl

SCHEMA = {"type": "integer", "minimum": 10, "maximum": 5000}


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["sync", "async"])
def test_responses_follow_the_schema_and_policy_and_engine_agree(sampling, tmp_path):
    settings = {**SETTINGS, "rollout.top_p": 1.0, "rollout.schema": json.dumps(SCHEMA)}
    settings |= {"rollout.support_tokens": 16, "trainer.sampling": sampling}
    if sampling == "async":
        settings["trainer.max_staleness"] = 0
    rl.train(runs.config("grpo_tiny", settings), tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/skipped_updates"] == 0 and step["actor/grad_norm"] > 1e-3
    for number in (1, 2):
        rows = [json.loads(line) for line in (tmp_path / f"run/rollouts/{number}.jsonl").open()]
        values = [json.loads(row["output"]) for row in rows]
        assert all(isinstance(v, int) and 10 <= v <= 5000 for v in values), values
        assert len(set(values)) > 4
    # Where the schema leaves one token, the end, it has probability one.
    assert any(ids == [row["tokens"][-1]] for row in rows for ids in row["support"][-1:])


def problem_of(tmp_path, **settings):
    with pytest.raises(ConfigError) as error:
        config = runs.config("grpo_tiny", {f"rollout.{k}": v for k, v in settings.items()})
        rl.train(config, tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    return str(error.value)


def test_a_schema_that_cannot_be_followed_is_refused_before_a_model_is_loaded(tmp_path):
    assert "needs rollout.support_tokens" in problem_of(tmp_path, schema='{"type": "integer"}')
    assert "cannot be read as a JSON schema" in problem_of(tmp_path, schema='{"type": ')
    assert "No such file" in problem_of(tmp_path, schema="nowhere.json")
    (tmp_path / "list.json").write_text("[1]")
    assert "is list, not an object" in problem_of(tmp_path, schema=str(tmp_path / "list.json"))
    bad = json.dumps({"type": "string", "pattern": "("})
    assert "rollout.schema" in problem_of(tmp_path, schema=bad, support_tokens=4)
    assert "only the built-in engine" in problem_of(tmp_path, schema="{}", engine="vllm")


TOOL = '''
from typing import Literal


def turn(side: Literal["left", "right"], times: Literal[1, 2, 3]) -> str:
    """Turns.

    Args:
        side: To which side.
        times: How often.
    """
    return f"{side} {times + 1}"
'''

# Short, with a token before each call: a random model writes that now and then.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.slow
def test_strict_tools_are_called_with_valid_arguments_alone(tmp_path):
    # A random model: of its calls otherwise all have an error.
    (tmp_path / "tools.py").write_text(TOOL)
    settings = {**SETTINGS, "rollout.top_p": 1.0, "rollout.support_tokens": 32}
    settings |= {"agent.tools": (f"{tmp_path}/tools.py:turn",), "agent.strict_tools": True}
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    settings |= {"model.chat_template": str(tmp_path / "template.jinja")}
    settings |= {"model.words": ("<tool_call>", "</tool_call>")}
    settings |= {"rollout.max_response_tokens": 200, "agent.max_turns": 3}
    settings |= {"trainer.prompts_per_step": 8, "trainer.minibatch_size": 32}
    rl.train(runs.config("agent_calculator_tiny", settings), tmp_path / "run")
    num_calls = 0
    for number, step in enumerate(steps_of(tmp_path / "run"), 1):
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/skipped_updates"] == 0 and step["actor/grad_norm"] > 1e-3
        for line in (tmp_path / f"run/rollouts/{number}.jsonl").open():
            row = json.loads(line)
            assert not row["errors"] or set(row["errors"]) == {"too_long"}, row["errors"]
            num_calls += sum(row["calls"].values())
            assert set(row["calls"]) <= {"turn"}
    assert num_calls > 5
