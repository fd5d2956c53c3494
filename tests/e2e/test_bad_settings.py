"""Settings that cannot work end the program with a message before anything is written."""

import sys

import commands
import pytest
import runs

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.workdir import SEAL_FILE, claim_workdir
from jaxrl_llm.errors import UserError
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.rewards.reward_pool import RewardError
from jaxrl_llm.trainer import rl


def test_every_mistake_of_a_config_file_is_named(tmp_path, cache):
    file = tmp_path / "run.py"
    file.write_text(
        "from jaxrl_llm.config.bridge import default_config_dict\n"
        "def get_config():\n"
        "    config = default_config_dict()\n"
        "    config.algorithm.clip_lwo = 0.1\n"
        "    config.rewards.functions.answer = {'function': 'arithmetic'}\n"
        "    config.trainer.num_steps = 'ten'\n"
        "    config.mesh.data = 0\n"
        "    return config\n"
    )
    workdir = tmp_path / "run"
    said = runs.refused("train", [f"--config={file}", f"--workdir={workdir}"], cache)
    assert "3 problems in this config" in said
    assert "config.algorithm.clip_lwo: unknown field; did you mean 'clip_low'?" in said
    assert "config.trainer.num_steps: expected int, got 'ten'" in said
    assert "config.mesh.data: must be -1 or in [1, 1000000] (-1: the rest), got 0" in said
    assert not workdir.exists()


@pytest.mark.parametrize(
    "argument, message",
    [
        (
            "--config.trainer.optimizer.learning_rat=1",
            "config.trainer.optimizer.learning_rat: unknown field; did you mean 'learning_rate'?",
        ),
        ("--config.trainer.num_steps=ten", "--config.trainer.num_steps=ten"),
    ],
    ids=["unknown", "type"],
)
def test_a_mistake_on_the_command_line_is_named(tmp_path, capsys, argument, message):
    arguments = [*runs.flags("grpo_tiny"), argument, f"--workdir={tmp_path / 'run'}"]
    assert message in commands.refused(capsys, "train", *arguments)
    assert not (tmp_path / "run").exists()


def test_a_missing_config_file_is_named(tmp_path, capsys):
    arguments = [f"--config={tmp_path / 'grpo.py'}", f"--workdir={tmp_path / 'run'}"]
    assert str(tmp_path / "grpo.py") in commands.refused(capsys, "train", *arguments)


def refused(tmp_path, settings, error=UserError) -> str:
    """Returns the message of a run in this process; its folder must not even be made."""
    with pytest.raises(error) as raised:
        rl.train(runs.config("grpo_tiny", settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    return str(raised.value)


def test_sizes_that_do_not_divide(tmp_path):
    said = refused(tmp_path, {"trainer.minibatch_size": 6}, ConfigError)
    assert (
        "6 does not divide the 16 sequences of a step (4 prompts x 4 samples); use 4 or 8" in said
    )


def test_a_stop_token_beyond_the_vocabulary(tmp_path):
    said = refused(tmp_path, {"rollout.stop_tokens": (1, 10**9)}, ConfigError)
    assert "config.rollout.stop_tokens: [1000000000] are not in the vocabulary, tokens 0 to" in said


def test_fewer_steps_than_are_done(tmp_path):
    config = runs.config("grpo_tiny", {"trainer.num_steps": 7})
    claim_workdir(resolve_sizes.resolve(config, tmp_path), tmp_path)
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "checkpoints" / "7" / SEAL_FILE).write_text("{}")  # else it counts as no step
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError, match="has done 7 steps; set it above 7 to go on"):
        rl.train(runs.config("grpo_tiny", {"trainer.num_steps": 5}), tmp_path)
    assert (tmp_path / "config.json").read_text() == before


def test_a_mesh_that_does_not_fill_the_devices(tmp_path):
    said = refused(tmp_path, {"mesh.data": 3}, ConfigError)
    assert (
        "config.mesh: stage 1 x data 3 x fsdp -1 x expert 1 x sequence 1 x tensor 1 does not fill"
        in said
    )
    assert "the 8 devices" in said


@pytest.mark.parametrize(
    "where, content, message",
    [
        ("missing.py:score", None, "cannot be used: FileNotFoundError"),
        ("broken.py:score", "def score(", "cannot be used: SyntaxError"),
        ("other.py:score", "def scor(**_): return 0.0\n", "other.py has no 'score'"),
        ("ends.py:score", "import os\nos._exit(7)\n", "its process ended with exit code 7"),
        ("short.py:score", "def score(text): return 0.0\n", "must take data_source, solution_str"),
    ],
)
def test_a_reward_function_that_cannot_be_used(tmp_path, where, content, message):
    name = f"{tmp_path}/{where}"
    if content is not None:
        (tmp_path / where.partition(":")[0]).write_text(content)
    settings = {"rewards.functions": {"answer": {"function": name}}}
    assert message in refused(tmp_path, settings, RewardError)
    settings = {"evaluation.functions": {"answer": {"function": name}}}
    assert message in refused(tmp_path, settings, RewardError)


@pytest.mark.parametrize(
    "content, message",
    [
        ("def mine(", "SyntaxError"),
        ("import absent_package", "ModuleNotFoundError: No module named 'absent_package'"),
        ("raise SystemError('at import')", "SystemError: at import"),
        ("def mine(rewards): return rewards.no_such", "raises in line 1: AttributeError"),
    ],
)
@pytest.mark.parametrize("field", ["advantage", "policy_loss"])
def test_an_algorithm_file_that_cannot_be_used(tmp_path, field, content, message):
    file = tmp_path / "mine.py"
    file.write_text(content.replace("(rewards)", "(old_log_probs)").replace("rewards.n", "1 .n"))
    said = refused(tmp_path, {f"algorithm.{field}": f"{file}:mine"}, ConfigError)
    assert f"config.algorithm.{field}: '{file}:mine'" in said and message in said


def test_a_package_for_metrics_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    said = refused(tmp_path, {"metrics.wandb_project": "mine"}, ConfigError)
    assert "config.metrics.wandb_project: 'mine' needs the package wandb" in said


def test_an_unknown_reward_function_names_the_known_ones(tmp_path):
    said = refused(tmp_path, {"rewards.functions": {"answer": {"function": "arithmetik"}}})
    assert "unknown reward function 'arithmetik'; known: arithmetic, gsm8k" in said


def test_the_folder_of_another_run(tmp_path):
    config = runs.config("grpo_tiny", {"seed": 3})
    (tmp_path / "run").mkdir()
    claim_workdir(config, tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        rl.train(runs.config("grpo_tiny"), tmp_path / "run")
    assert "belongs to another run; use another --workdir" in str(error.value)
    assert "config.seed: 0 here, 3 there" in str(error.value)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]
