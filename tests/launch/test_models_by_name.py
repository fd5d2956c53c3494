"""A run and the commands with models by name, against a stand-in of the hub."""

import json
import os
import pathlib

import hub_server
import jax
import numpy as np
import pytest
import serving_model
from commands import ROOT, call, refused

import jaxrl_llm
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.storage import model_folder

SMOLLM2 = pathlib.Path(os.environ.get("SMOLLM2_FOLDER", ROOT / "models" / "smollm2"))


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    serving_model.make_folder(folder)
    return folder


@pytest.fixture
def hub(monkeypatch, tmp_path, source):
    with hub_server.HubServer() as server:
        hub_server.use_hub(monkeypatch, server, tmp_path / "hf")
        server.first_commit = server.add("org/name", source)
        yield server


def train(workdir, num_steps=1, path="org/name", adapters=None):
    config = jaxrl_llm.default_config("sft")
    config.model.path = path
    config.lora.update(adapters or {})
    config.data.chat_template = False
    config.trainer.num_steps, config.trainer.batch_size = num_steps, 8
    config.trainer.max_sequence_tokens = 128
    config.evaluation.before, config.data.arithmetic_eval_prompts = False, 8
    config.metrics.tensorboard = config.metrics.console = False
    return jaxrl_llm.train(config, workdir)


def stored_path(workdir):
    return json.loads((workdir / "config.json").read_text())["model"]["path"]


@pytest.mark.slow
def test_a_resumed_run_reads_the_commit_that_it_began_with(hub, tmp_path, capsys):
    run = tmp_path / "run"
    train(run)
    assert stored_path(run) == f"hf://org/name@main#{hub.first_commit}"
    hub.add("org/name", {"config.json": b'{"model_type": "none"}'})  # the branch moves
    model_folder.forget_folders()
    train(run, num_steps=2)
    assert stored_path(run) == f"hf://org/name@main#{hub.first_commit}"
    with pytest.raises(ConfigError, match="belongs to another run"):
        train(run, num_steps=2, path=f"hf://org/name@{hub.first_commit}")
    with pytest.raises(UserError, match="none"):
        train(tmp_path / "other")  # begins with the newest

    out = tmp_path / "out"
    code, _, said = call(capsys, "export", f"--workdir={run}", f"--out={out}")
    assert code == 0, said
    assert checkpoint.read_architecture(out) == checkpoint.read_architecture(tmp_path / "source")


@pytest.mark.slow
def test_adapters_by_name_and_their_base_in_an_export(hub, tmp_path, capsys):
    train(tmp_path / "first", adapters={"rank": 2})
    out = tmp_path / "adapters"
    arguments = [f"--workdir={tmp_path / 'first'}", f"--out={out}", "--adapters"]
    assert call(capsys, "export", *arguments)[0] == 0
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "org/name"
    assert settings["revision"] == hub.first_commit
    commit = hub.add("org/adapters", out)
    train(tmp_path / "second", adapters={"rank": 2, "path": "org/adapters"})
    stored = json.loads((tmp_path / "second" / "config.json").read_text())
    assert stored["lora"]["path"] == f"hf://org/adapters@main#{commit}"


@pytest.mark.slow
def test_commands_take_names(hub, capsys, source):
    arguments = ["--prompt=a", "--max_tokens=3"]
    code, by_name, said = call(capsys, "generate", "--model=org/name", *arguments)
    assert code == 0, said
    code, by_folder, said = call(capsys, "generate", f"--model={source}", *arguments)
    assert code == 0 and by_name == by_folder
    overrides = ["--config.model.path=org/name", "--config.warm_start.num_steps=0"]
    code, plan, said = call(capsys, "plan", "--config=grpo_tiny", "--json", *overrides)
    assert code == 0, said
    assert json.loads(plan)


def test_what_a_command_says_about_names(hub, capsys):
    hub.add("org/gated", {"config.json": b"{}"}, gated=True)
    assert "no model of this name" in refused(capsys, "generate", "--model=org/nmae", "--prompt=a")
    assert "is gated; accept its terms" in refused(
        capsys, "generate", "--model=org/gated", "--prompt=a"
    )
    assert "did you mean hf://org/name" in refused(
        capsys, "generate", "--model=hg://org/name", "--prompt=a"
    )


@pytest.mark.nightly
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason=f"no folder {SMOLLM2}; set SMOLLM2_FOLDER")
def test_smollm2_by_name(hub, monkeypatch):
    hub.add("org/smollm2", SMOLLM2)
    large = max(SMOLLM2.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    hub.breaks = [(large.name, large.stat().st_size // 2)]
    hub.busy_share = 0.2
    with hub_server.without_delays(monkeypatch):
        network = Network(checkpoint.read_architecture("org/smollm2"))
        params = checkpoint.load("org/smollm2", network)
    assert not hub.breaks
    expected = checkpoint.load(SMOLLM2, network)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
