"""The file in docs/custom_algorithm.md trains, as it stands there."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import minibatch_denominators
from jaxrl_llm.algorithms.losses import policy_objective
from jaxrl_llm.algorithms.requirements import check_functions
from jaxrl_llm.config import AlgorithmConfig, ConfigError
from jaxrl_llm.types import Minibatch

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "custom_algorithm.md").read_text()
(SOURCE,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
FLAGS = re.findall(r"^ {8}(--config\.\S+)", DOCUMENT, re.MULTILINE)
TINY = {
    "model.hidden_size": 32,
    "model.num_layers": 1,
    "model.mlp_size": 64,
    "data.max_prompt_tokens": 16,
    "rollout.max_response_tokens": 16,
    "warm_start.num_steps": 20,
    "algorithm.samples_per_prompt": 4,
    "trainer.num_steps": 2,
    "trainer.prompts_per_step": 4,
    "trainer.minibatch_size": 16,
    "evaluation.before": False,
    "evaluation.after": False,
    "metrics.tensorboard": False,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the document's file, where the program is started."""
    (tmp_path / "my_algorithm.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(folder, flags):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, ROOT / "launch" / "train.py"]
    command += [f"--config={ROOT / 'configs' / 'grpo_tiny.py'}", "--workdir=run", *flags]
    command += [f"--config.{key}={value}" for key, value in TINY.items()]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )


@pytest.mark.slow
def test_the_file_of_the_document_trains(folder):
    assert len(FLAGS) == 4
    result = train(folder, FLAGS)
    assert result.returncode == 0, result.stderr[-4000:]
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    # What only the file's loss and reward report.
    assert all("actor/my_distance" in line["data"] for line in lines)
    config = json.loads((folder / "run/config.json").read_text())
    assert config["algorithm"]["loss_args"] == {"softness": 2.0}
    dump = json.loads((folder / "run/rollouts/2.jsonl").read_text().splitlines()[0])
    assert "pred" in dump["details"]


def test_a_wrong_name_ends_the_program_before_it_works(folder):
    (flag,) = [flag for flag in FLAGS if "advantage" in flag]
    result = train(folder, [flag + "s"])
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    shown = re.search(r" {4}(1 problem in this config:)\n {6}(.*)\n", DOCUMENT)
    assert shown is not None
    assert shown[1] in result.stderr and shown[2] in result.stderr
    assert not (folder / "run").exists()


def test_hyperparameters_of_the_loss_reach_it(folder):
    """Its softness 0 is the plain ratio; out of range it is refused."""
    mask = jnp.ones((1, 2), bool)
    batch = dataclasses.replace(
        Minibatch.zeros(1, 2), loss_mask=mask, advantages=mask + 0.0, correction_weights=mask + 0.0
    )

    def loss(**loss_args):
        config = AlgorithmConfig(policy_loss="my_algorithm.py:my_loss", loss_args=loss_args)
        check_functions(config)
        now, counts = jnp.full((1, 2), jnp.log(3.0)), minibatch_denominators(mask)
        return policy_objective(config, now, 0.0 * now, batch, ~mask, counts)[0]

    np.testing.assert_allclose(loss(softness=0.0), -3.0, rtol=1e-6)
    np.testing.assert_allclose(loss(), -3.0 / (1.0 + 2.0), rtol=1e-6)
    np.testing.assert_allclose(loss(softness=2.0), -3.0 / (1.0 + 2.0 * 2.0), rtol=1e-6)
    with pytest.raises(ConfigError, match=r"loss_args\.softness: must be in \[0, 100\], got -1"):
        loss(softness=-1.0)


def test_the_document_lists_what_is_available(folder):
    """A function that names all that its row lists can be called."""
    for field, result in (
        ("advantage", "(rewards, rewards)"),
        ("policy_loss", "(log_probs.sum(), {})"),
    ):
        (row,) = re.findall(rf"^\| {field.replace('_', ' ')} \|(.*)\|.*\|$", DOCUMENT, re.MULTILINE)
        names = [name for name in re.findall(r"`(\w+)`", row)]
        (folder / f"{field}.py").write_text(f"def f({', '.join(names)}):\n    return {result}\n")
        assert len(names) > 10
        check_functions(AlgorithmConfig(**{field: f"{field}.py:f"}))


@pytest.mark.parametrize(
    ("field", "body", "message"),
    [
        ("advantage", "def f(rewards, prompts): ...", "parameter 'prompts' is not available"),
        ("advantage", "def f(rewards): return rewards", "an estimator returns"),
        ("advantage", "def f(rewards): return rewards[:, 0], rewards", "of response_mask's shape"),
        ("policy_loss", "def f(rewards): ...", "parameter 'rewards' is not available"),
        ("policy_loss", "def f(log_probs): return log_probs, {}", "a policy loss returns"),
        ("policy_loss", "def g(): ...", "has no 'f'; its functions: g"),
        ("policy_loss", "f = 3", "is a int, not a function"),
    ],
)
def test_unusable_algorithm_files_are_named(folder, field, body, message):
    (folder / "wrong.py").write_text(body + "\n")
    with pytest.raises(ConfigError, match=f"config.algorithm.{field}.*{message}"):
        check_functions(AlgorithmConfig(**{field: "wrong.py:f"}))


def test_all_problems_are_reported_together(folder):
    with pytest.raises(ConfigError, match="2 problems") as error:
        check_functions(AlgorithmConfig(advantage="no_file.py:f", policy_loss="no_such_module:f"))
    assert "no file" in str(error.value) and "cannot import module" in str(error.value)
