"""Agents that nobody here wrote, unchanged, are trained from one config.

    python -m pytest -m nightly tests/e2e/test_foreign_agents.py

Frameworks whose packages conflict with others are tested where they are installed. The npm packages
`openai` and `@anthropic-ai/sdk` are looked for in the folder that `NODE_PACKAGES` names.
"""

import importlib.util
import os
import pathlib
import shutil

import pytest
import runs

FOLDER = pathlib.Path(__file__).parent / "foreign_agents"
# Harness -> the package that it needs.
FUNCTIONS = {
    "openai_client": "openai",
    "openai_agents_sdk": "agents",
    "pydantic_ai_agent": "pydantic_ai",
    "langgraph_agent": "langgraph",
    "smolagents_agent": "smolagents",
}
NODE_SCRIPTS = {"openai_client.mjs": "openai", "anthropic_client.mjs": "@anthropic-ai/sdk"}
COMMANDS = ("curl_agent.sh", *NODE_SCRIPTS)
STEPS = 20
METRIC = "val-core/products/mean@1"


def harness(name, folder):
    """The setting `agent.harness` for an agent; skips the test if it cannot run here."""
    if name in FUNCTIONS:
        if importlib.util.find_spec(FUNCTIONS[name]) is None:
            pytest.skip(f"the package {FUNCTIONS[name]!r} is not installed")
        return f"{FOLDER / name}.py:solve"
    if name == "curl_agent.sh":
        if missing := [tool for tool in ("bash", "curl", "jq", "bc") if not shutil.which(tool)]:
            pytest.skip(f"there is no {missing[0]}")
        return f"bash {FOLDER / name}"
    packages = pathlib.Path(os.environ.get("NODE_PACKAGES", "nowhere")) / "node_modules"
    if not shutil.which("node") or not (packages / NODE_SCRIPTS[name]).is_dir():
        pytest.skip(f"NODE_PACKAGES has no {NODE_SCRIPTS[name]}")
    # Node resolves packages from the folder of the script.
    shutil.copy(FOLDER / name, folder)
    (folder / "node_modules").symlink_to(packages)
    return f"node {folder / name}"


def train(folder, cache, settings):
    """Runs the config as it is, but for these settings."""
    arguments = [f"--config={runs.ROOT / 'configs' / 'agent_harness_tiny.py'}"]
    arguments += [f"--workdir={folder}", *(f"--config.{k}={v}" for k, v in settings.items())]
    result = runs.finish(runs.start("train", arguments, cache), timeout_s=3600)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory, cache):
    """The folder of a policy that knows calls and answers, mostly wrong ones."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    settings = {"trainer.num_steps": 1, "evaluation.every": 0, "evaluation.before": False}
    train(folder, cache, settings)
    return folder / "warm_start"


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*FUNCTIONS, *COMMANDS])
def test_an_agent_is_trained_as_it_is(name, tmp_path, cache, warm_start):
    folder = tmp_path / "run"
    shutil.copytree(warm_start, folder / "warm_start")
    settings = {
        "agent.harness": harness(name, tmp_path),
        "trainer.num_steps": STEPS,
        "evaluation.num_prompts": 64,
    }
    train(folder, cache, settings)
    metrics = runs.metrics(folder)
    assert metrics[0][METRIC] < 0.3
    assert metrics[STEPS][METRIC] > 0.85
    # Replies come back as they were sampled: no client changes one of them.
    assert all(numbers.get("agent/unmatched", 0.0) == 0.0 for numbers in metrics.values())
