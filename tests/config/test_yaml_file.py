"""YAML files describe jobs as Python files do, with the same errors."""

import json

import pytest

from jaxrl_llm.config import yaml_file
from jaxrl_llm.config.bridge import JOBS, from_config_dict, to_dict
from jaxrl_llm.config.flags import load, unknown_overrides
from jaxrl_llm.errors import ConfigError

GOOD = """
# A run.
trainer:
  num_steps: 7
  optimizer: {learning_rate: 1e-5}
data:
  task: files
  train_files: [a.jsonl, b.jsonl]
alerts:
  kl: {action: off, limit: .inf}
algorithm: {recipe: dapo, clip_high: 0.3}
rewards:
  functions:
    answer: {function: arithmetic}
"""


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_values_are_what_they_look_like(tmp_path):
    config = from_config_dict(load(write(tmp_path, GOOD)))
    assert config.trainer.num_steps == 7 and config.trainer.optimizer.learning_rate == 1e-5
    assert config.data.train_files == ("a.jsonl", "b.jsonl")
    assert config.alerts.kl.action == "off" and config.alerts.kl.limit == float("inf")
    assert config.algorithm.dynamic_sampling and config.algorithm.clip_high == 0.3


def test_the_command_line_changes_every_key(tmp_path):
    path = write(tmp_path, GOOD)
    good = ["--config.rewards.functions.answer.weight=2", "--config.data.train_files=('c',)"]
    assert unknown_overrides(["train", f"--config={path}", *good]) == []
    (said,) = unknown_overrides(["train", f"--config={path}", "--config.trainer.steps=2"])
    assert said.startswith("config.trainer.steps: unknown field")


@pytest.mark.parametrize("job", JOBS)
def test_a_resolved_config_is_a_file(tmp_path, job):
    more = {"rewards": {"functions": {"a": {"function": "math"}}}} if job == "rl" else {}
    config = from_config_dict({"job": job, **more})
    for name, text in {
        "a.yaml": yaml_file.text(to_dict(config)),
        "config.json": json.dumps(to_dict(config)),
    }.items():
        assert from_config_dict(load(write(tmp_path, text, name))) == config


@pytest.mark.parametrize(
    "value", ["off", "1e5", "010", "yes", "null", "~", "", "1.", "0x1", "1_0", "2001-01-01", "a: b"]
)
def test_written_texts_are_read_as_texts(tmp_path, value):
    assert yaml_file.read(write(tmp_path, yaml_file.text({"a": value}))) == {"a": value}


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: [1, 2", ", line 1: expected ',' or ']'"),
        ("seed: 1\nseed: 2\n", ", line 2: the key 'seed' comes twice; mend the file"),
        ("1: 2\n", ", line 1: '1' is no name; quote it"),
        ("just a text", ": holds 'just a text'; write settings"),
        ("", ": holds None; write settings"),
        ("trainer.num_steps: 5", "'trainer.num_steps' in the file: nest it, below `trainer:`"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: *b", ", line 1: found undefined alias"),
        ("\0", "unacceptable character"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, text))
    assert message in str(error.value)


def test_json_is_read_as_json(tmp_path):
    text = '{\n\t"seed": 7,\t"trainer": {"num_steps":\t3},\n\t"job": "sft"\n}'
    for name in ("config.json", "run.yaml"):
        config = from_config_dict(load(write(tmp_path, text, name)))
        assert (config.seed, config.trainer.num_steps) == (7, 3)
    path = write(tmp_path, '{"a": "\\ud83d\\ude00"}', "a.json")
    assert yaml_file.read(path) == {"a": "\U0001f600"}
    path = write(tmp_path, "{a: 1, b: off} # no JSON", "a.json")
    assert yaml_file.read(path) == {"a": 1, "b": "off"}
    for text, message in (
        ('{\n\t"seed": 1,,\n}', "config.json, line 2: Expecting property name"),
        ('{\n\t"seed": 1,\n\t"seed": 2\n}', "config.json, line 3: the key 'seed' comes twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(write(tmp_path, text, "config.json"))


def test_mistakes_are_those_of_python_files(tmp_path):
    text = "trainer: {num_stepz: 5}\nseed: one\nmodel: 3\nrewards: {functions: {a: 4}}\n"
    with pytest.raises(ConfigError) as error:
        from_config_dict(load(write(tmp_path, text)))
    assert len(error.value.problems) == 4
    assert "did you mean 'num_steps'?" in str(error.value)
    for job in ("{a: 1}", "[rl]", "rll", "3"):
        with pytest.raises(ConfigError, match="unknown job"):
            from_config_dict(load(write(tmp_path, f"job: {job}")))
