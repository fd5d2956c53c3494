"""`export --to`: a run becomes a repository, which is loaded by its name from there."""

import json
import os
import pathlib
import subprocess
import sys

import hub_server
import huggingface_hub
import pytest
import serving_model
from commands import call, refused
from fsspec.implementations.memory import MemoryFileSystem

import jaxrl_llm
from jaxrl_llm.models.hf import checkpoint, safetensors_file
from jaxrl_llm.models.transformer import Network

LICENSE = "---\nlicense: apache-2.0\n---\n# Base\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model folder in a cache of the hub, with a license."""
    folder = tmp_path_factory.mktemp("cache") / "models--org--base" / "snapshots" / "0a1b2c"
    folder.parent.mkdir(parents=True)
    serving_model.make_folder(folder)
    (folder / "README.md").write_text(LICENSE)
    return folder


def trained(source, workdir, rank):
    config = jaxrl_llm.default_config("sft")
    config.model.path, config.lora.rank = str(source), rank
    config.data.chat_template = False
    config.trainer.num_steps, config.trainer.batch_size = 2, 8
    config.trainer.max_sequence_tokens = 128
    config.evaluation.before, config.data.arithmetic_eval_prompts = False, 8
    config.metrics.tensorboard = config.metrics.console = False
    jaxrl_llm.train(config, workdir)
    return workdir


@pytest.fixture(scope="module")
def run(source, tmp_path_factory):
    return trained(source, tmp_path_factory.mktemp("run"), rank=0)


@pytest.fixture(scope="module")
def adapters(source, tmp_path_factory):
    return trained(source, tmp_path_factory.mktemp("adapters"), rank=4)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_server.HubServer() as server:
        hub_server.use_hub(monkeypatch, server, tmp_path / "hf", token="hf_alice")
        yield server


def export(capsys, run, *flags):
    code, said, log = call(capsys, "export", f"--workdir={run}", *flags)
    assert code == 0, log
    return said


def test_a_run_is_loaded_by_its_name(run, hub, capsys, tmp_path):
    export(capsys, run, "--to=alice/sums")
    export(capsys, run, f"--out={tmp_path / 'folder'}")
    assert hub.repos["model", "alice/sums"].private
    card = huggingface_hub.ModelCard.load("alice/sums")
    assert (card.data.base_model, card.data.license) == ("org/base", "apache-2.0")
    assert "after step 2 of supervised fine-tuning" in card.text
    folder = pathlib.Path(huggingface_hub.snapshot_download("alice/sums"))
    stored, expected = map(safetensors_file.open_folder, (folder, tmp_path / "folder"))
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (stored[name].view()[...] == tensor.view()[...]).all(), name
    checkpoint.load(folder, Network(checkpoint.read_architecture(folder)))
    uploaded = b"".join(hub.files("alice/sums").values())
    assert str(run.parent).encode() not in uploaded  # no path of this machine


def test_a_dry_run_prints_and_uploads_nothing(run, hub, capsys):
    said = export(capsys, run, "--to=alice/sums", "--dry_run", "--public")
    assert "license: apache-2.0" in said and "model.safetensors" in said
    assert "would be written to alice/sums, a public repository; nothing was" in said
    assert not hub.repos
    assert {method for _, method, _, _ in hub.log} == {"GET"}


def test_what_the_hub_refuses_is_said_before_weights_are_read(hub, capsys, tmp_path):
    message = refused(capsys, "export", f"--workdir={tmp_path}", "--to=bob/sums")
    assert "your token writes to alice, not to 'bob'" in message
    message = refused(capsys, "export", f"--workdir={tmp_path}", "--to=hf://alice")
    assert "is no name of the form org/name" in message


@pytest.mark.slow
def test_adapters_name_their_base(adapters, hub, capsys):
    export(capsys, adapters, "--to=alice/adapters", "--adapters")
    files = hub.files("alice/adapters")
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/base"
    card = huggingface_hub.ModelCard(files["README.md"].decode())
    assert card.data.library_name == "peft" and card.data.base_model_relation == "adapter"
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    assert "curves.png" in files


@pytest.mark.slow
def test_a_gguf_file_is_named_by_its_type(run, hub, capsys):
    for kind in ("f16", "q8_0"):
        export(capsys, run, "--to=alice/sums", "--format=gguf", f"--gguf_type={kind}")
    files = hub.files("alice/sums")
    assert {"sums-F16.gguf", "sums-Q8_0.gguf"} <= files.keys()
    assert "-hf alice/sums:Q8_0" in files["README.md"].decode()


@pytest.mark.slow
def test_folders_and_buckets_get_a_card_too(run, capsys, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()  # else it would be a name of the hub
    export(capsys, run, f"--to={folder}")
    assert "AutoModelForCausalLM" in (folder / "README.md").read_text()
    message = refused(capsys, "export", "--workdir=a", f"--to={folder}", "--out=b")
    assert "is a folder of this machine; leave out --out and --public" in message
    try:
        export(capsys, run, "--to=memory://bucket/sums")
        names = {path.rpartition("/")[2] for path in MemoryFileSystem().find("/bucket/sums")}
        assert names == {path.name for path in folder.iterdir()}
    finally:
        MemoryFileSystem.store.clear()


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "--out: required: a folder to write; or give --to=org/name to upload"),
        (["--out=a", "--public"], "--public: is of an upload; give --to too"),
        (["--out=a", "--dry_run"], "--dry_run: is of an upload; give --to too"),
        (["--to=b/c", "--out=a.gguf", "--format=gguf"], "is a file, and --to uploads a folder"),
    ],
)
def test_flags_that_do_not_fit(capsys, flags, message):
    assert message in refused(capsys, "export", "--workdir=none", *flags)


LOADING = """
import peft, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("alice/sums")
tokenizer = transformers.AutoTokenizer.from_pretrained("alice/sums")
prompt = tokenizer("1+2=", return_tensors="pt")
assert model.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]
adapted = peft.AutoPeftModelForCausalLM.from_pretrained("alice/adapters")
assert adapted.peft_config["default"].base_model_name_or_path == "org/base"
print("loaded")
"""


@pytest.mark.parity
def test_transformers_and_peft_load_by_name(run, adapters, source, hub, capsys, tmp_path):
    export(capsys, run, "--to=alice/sums")
    hub.add("org/base", source)
    export(capsys, adapters, "--to=alice/adapters", "--adapters")
    # In a process of its own: the libraries read the address of the hub when they are imported.
    environment = os.environ | hub_server.hub_environment(hub, tmp_path / "hf2", "hf_alice")
    command = [sys.executable, "-c", LOADING]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.stdout.endswith("loaded\n"), ended.stderr
