"""The engine of docs/custom_engine.md trains behind `rollout.engine`; what is none is refused."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
import recipe_settings
import runs

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.rollout import engines
from jaxrl_llm.rollout.engine_api import Capabilities

DOCUMENT = (pathlib.Path(__file__).parents[2] / "docs" / "custom_engine.md").read_text()
(SOURCE,) = re.findall(r"```python\n(.*?)```", DOCUMENT, flags=re.DOTALL)
# Weights of its own, as an engine in another process has.
REMOTE = """
class RemoteEngine(FullForwardEngine):
    received = []  # versions

    def receive_weights(self, params, version):
        self.received.append(version)
        self.weights = jax.tree.map(np.asarray, params)

    def step(self, params, version=0, *, ahead=False):
        return super().step(self.weights, version, ahead=ahead)
"""
SMALL = {
    "model": {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_size": 8, "mlp_size": 16},
    "mesh": {"data": 1, "fsdp": 1},
    "algorithm": {"recipe": "grpo", "samples_per_prompt": 4},
    "rollout": {"max_response_tokens": 6},
    "trainer": {"num_steps": 2, "prompts_per_step": 4, "max_tokens_per_microbatch": 512},
    "metrics": {"rollout_tokens": True},
}
VALUES = recipe_settings.merged(
    recipe_settings.merged(recipe_settings.SUMS, recipe_settings.UNTAUGHT), SMALL
)
MINE = "my_engine.py:FullForwardEngine"


@pytest.fixture
def folder(tmp_path, one_device, monkeypatch):
    """A folder with the document's engine, where runs are started on one device."""
    (tmp_path / "my_engine.py").write_text(SOURCE + REMOTE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(engine, **changes):
    values = recipe_settings.merged(VALUES, {"rollout": {"engine": engine}})
    return from_config_dict(recipe_settings.merged(values, changes))


def train(folder, engine, **changes):
    """Returns the policy after two steps, and the lines of both dumps of rollouts."""
    state = jaxrl_llm.train(config(engine, **changes), folder)
    assert list(runs.metrics(folder)) == [1, 2]
    text = "".join((folder / f"rollouts/{step}.jsonl").read_text() for step in (1, 2))
    return jax.device_get(state.policy.params), list(map(json.loads, text.splitlines()))


def test_grpo_with_another_engine_is_as_with_the_built_in_one(folder):
    policy, rows = train(folder / "built_in", "jaxrl_llm")
    mine, my_rows = train(folder / "mine", MINE)
    assert [row["tokens"] for row in my_rows] == [row["tokens"] for row in rows]
    assert {version for row in my_rows for version in row["versions"]} == {0, 1}
    for row, other in zip(my_rows, rows, strict=True):
        np.testing.assert_allclose(row["log_probs"], other["log_probs"], atol=1e-4)
    for a, b in zip(*map(jax.tree.leaves, (mine, policy)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_an_engine_with_weights_of_its_own_receives_each_version_once(folder):
    name = "my_engine.py:RemoteEngine"
    train(folder / "remote", name)
    assert engines.factory(name).received == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("new_weights", ["recompute", "drain"])
def test_another_engine_samples_asynchronously(folder, new_weights):
    trainer = {"sampling": "async", "max_staleness": 1, "new_weights": new_weights}
    _, rows = train(folder / "async", MINE, trainer=trainer)
    assert {version for row in rows for version in row["versions"]} <= {0, 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "mine",
            "unknown engine 'mine'; known: jaxrl_llm, vllm; or your own as 'package.module:fac",
        ),
        ("no_such_module:Engine", "cannot import module 'no_such_module'"),
        ("no_file.py:Engine", "no file .*no_file.py; give it absolute or relative to"),
        ("my_engine.py:Engine", "my_engine.py has no 'Engine'; its functions: .*FullForwardEngine"),
        ("wrong.py:number", "is a int, not a function"),
        ("wrong.py:no_arguments", "could not be built from EngineArgs: TypeError: no_arguments"),
        ("wrong.py:refuses", "could not be built from EngineArgs: RuntimeError: no accelerator"),
        ("wrong.py:Partial", "built a Partial without .*abort, .*step; an engine has all members"),
        ("wrong.py:Declares", "has capabilities of dict; make them a .*engine_api.Capabilities"),
    ],
)
def test_invalid_engine_is_refused_before_weights_are_loaded(folder, name, message):
    (folder / "wrong.py").write_text(
        "number = 3\n"
        "def no_arguments(): ...\n"
        "def refuses(args): raise RuntimeError('no accelerator')\n"
        "class Partial:\n    def __init__(self, args): ...\n    def submit(self, request): ...\n"
        "class Declares:\n    capabilities = {'images': True}\n"
    )
    with pytest.raises(ConfigError, match=f"config.rollout.engine: .*{message}"):
        jaxrl_llm.check(config(name), folder / "run")
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("setting", "value", "capability"),
    [
        ("rollout.top_k", 5, "filtered_sampling"),
        ("rollout.top_p", 0.9, "filtered_sampling"),
        ("rollout.min_p", 0.1, "filtered_sampling"),
        ("rollout.stop_strings", ("#",), "stop_strings"),
        ("rollout.speculation.draft_tokens", 2, "speculation"),
        ("rollout.quantization", "int8", "low_precision"),
        ("rollout.cache_dtype", "fp8", "low_precision"),
        ("router.replay", "rollout", "router_replay"),
        ("trainer.new_weights", "keep", "in_flight_updates"),
    ],
)
def test_the_setting_that_needs_an_absent_capability_is_named(folder, setting, value, capability):
    changes = {"trainer": {"sampling": "async"}} if capability == "in_flight_updates" else {}
    for part in reversed(setting.split(".")):
        value = {part: value}
    asked = config(MINE, **recipe_settings.merged(changes, value))
    with pytest.raises(ConfigError) as refusal:
        engines.check(asked, reads_images=False, num_processes=1)
    (problem,) = refusal.value.problems
    assert problem.startswith(f"config.{setting}: ") and f"capability {capability!r}" in problem
    of_built_in = config("jaxrl_llm", **recipe_settings.merged(changes, value))
    engines.check(of_built_in, reads_images=True, num_processes=2)


def test_several_processes_and_images_are_capabilities(folder):
    with pytest.raises(ConfigError) as refusal:
        engines.check(config(MINE), reads_images=True, num_processes=2)
    processes, images = refusal.value.problems
    assert "a run of 2 processes needs" in processes and "'multi_process'" in processes
    assert "config.model.family: 'qwen2' reads images and needs" in images


def test_the_refusal_that_the_document_shows(folder):
    (shown,) = re.findall(r"1 problem in this config:\n +(.*)\n", DOCUMENT)
    with pytest.raises(ConfigError) as refusal:
        jaxrl_llm.check(config(MINE, rollout={"top_p": 0.9}), folder / "run")
    assert refusal.value.problems == (shown,)


def test_the_document_lists_every_capability():
    rows = re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.MULTILINE)
    assert rows == list(vars(Capabilities()))
