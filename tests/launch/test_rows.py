"""Rows that a chat template would not show as they are: the command refuses them before a model."""

import json

import commands
import pytest
from round_trip_rows import FOLDER, TEMPLATES

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.trainer import supervised

ASK = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}
HUMAN = {"role": "human", "content": "1+1="}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{a"}}

# By job: its config, and rows with the problem of the second one.
ROWS = {
    "rl": ("grpo_tiny", lambda messages: {"data_source": "s", "prompt": messages}),
    "sft": ("sft_tiny", lambda messages: {"messages": [*messages, ANSWER]}),
    "dpo": ("dpo_tiny", lambda messages: {"prompt": messages, "chosen": "2", "rejected": "3"}),
}
PROBLEMS = {
    "role": ([HUMAN], {}, "message 1 has the role 'human', which the chat template does not know"),
    "tools": ([ASK], {"tools": [TOOL]}, "the chat template does not show the tool 'add'"),
    "call": (
        [ASK, {**ANSWER, "tool_calls": [CALL]}, ASK],
        {},
        "message 2: the arguments of call 1 (add) must be an object, or the JSON text of one",
    ),
}


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    def no_model(*args, **kwargs):
        raise AssertionError("a model is loaded before its rows are checked")

    for name in ("initial_params", "initial_policy"):
        monkeypatch.setattr(weights_lib, name, no_model)

    def run(job, rows, template):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        name, _ = ROWS[job]
        other = {"rl": "--config.warm_start.num_steps=0", "dpo": "--config.model.path="}
        return commands.refused(
            capsys,
            "train",
            f"--config=configs/{name}.py",
            f"--workdir={tmp_path / 'run'}",
            "--config.data.task=files",
            f"--config.data.train_files=('{path}',)",
            f"--config.data.eval_files=('{path}',)",
            "--config.data.chat_template=True",
            f"--config.model.chat_template={template}",
            *([other[job]] if job in other else []),
        )

    return run


def test_pairs_of_reward_models_are_checked_before_rl(tmp_path):
    path = tmp_path / "pairs.jsonl"
    judge = {"models": {"judge": {"pairs": (str(path),)}}}
    config = from_config_dict({"rewards": judge, "preference": {"num_steps": 1}})
    rows = [{"prompt": messages, "chosen": "2", "rejected": "3"} for messages in ([ASK], [HUMAN])]
    path.write_text(json.dumps(rows[0]) + "\n")
    supervised.check_preference_pairs(config, character_tokenizer())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"pairs\.jsonl, row 2: message 1 has the role 'human'"):
        supervised.check_preference_pairs(config, character_tokenizer())


@pytest.mark.skipif(not TEMPLATES, reason="needs the folder of chat templates")
@pytest.mark.parametrize(
    ("job", "problem", "template"),
    [("rl", "role", "qwen3"), ("sft", "call", "qwen2_5"), ("dpo", "tools", "llama3")],
)
def test_a_row_that_would_be_misread_ends_the_command(refused, job, problem, template):
    messages, columns, message = PROBLEMS[problem]
    make = ROWS[job][1]
    rows = [make([ASK]), {**make(messages), **columns}]
    said = refused(job, rows, FOLDER / f"{template}.jinja")
    assert "rows.jsonl, row 2: " in said and message in said
    assert "Traceback" not in said
