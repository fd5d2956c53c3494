"""Files that somebody else made are read, but not run, and name nothing outside their folder."""

import ast
import json
import pathlib

import numpy as np
import pytest
import runs
from safetensors.numpy import save_file

from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import character_tokenizer, load_tokenizer
from jaxrl_llm.metrics.writer import Writer, to_jsonable
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.safetensors_file import open_folder

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Attributes that load pickles, or send them between processes.
FORBIDDEN_CALLS = {"torch.load", "jnp.load", "pandas.read_pickle", "yaml.load"}


def sources():
    for folder in ("jaxrl_llm", "launch", "configs"):
        yield from sorted((runs.ROOT / folder).rglob("*.py"))


def faults(text: str):
    """Yields what could load objects that run code when they are loaded."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (name for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in FORBIDDEN_CALLS:
            yield called
        for word in node.keywords:
            value = getattr(word.value, "value", None)
            if word.arg == "allow_pickle" and value is not False:
                yield f"{called}(allow_pickle)"
            if word.arg == "trust_remote_code" and value is not False:
                yield f"{called}(trust_remote_code)"
        # `Connection.send` and `recv` pickle; `send_bytes` and `recv_bytes` do not.
        if called.endswith(("connection.recv", "connection.send")):
            yield called


@pytest.mark.parametrize("path", list(sources()), ids=lambda p: p.name)
def test_nothing_loads_pickles(path):
    assert not list(faults(path.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from dill import load",
        "np.load('f', allow_pickle=True)",
        "torch.load('f')",
        "self.connection.recv()",
        "AutoTokenizer.from_pretrained('f', trust_remote_code=True)",
    ],
)
def test_the_scan_finds_what_it_looks_for(text):
    assert len(list(faults(text))) == 1


def test_a_tokenizer_folder_runs_no_code(tmp_path):
    folder = tmp_path / "tokenizer"
    character_tokenizer().save_pretrained(folder)
    ran = tmp_path / "ran"
    for name in ("tokenization_evil.py", "configuration_evil.py"):
        (folder / name).write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {
        "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
        "tokenizer_class": "Evil",
    }
    path.write_text(json.dumps(settings))
    (folder / "config.json").write_text(
        json.dumps({"auto_map": {"AutoConfig": "configuration_evil.Evil"}, "model_type": "evil"})
    )
    try:
        assert load_tokenizer(str(folder)).eos_token_id == 1
    except DataError as error:
        assert str(folder) in str(error)
    assert not ran.exists()


def test_a_chat_template_runs_no_code(tmp_path):
    folder = tmp_path / "tokenizer"
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer.save_pretrained(folder)
    from jaxrl_llm.data.tokenizer import render_prompts

    with pytest.raises(DataError, match="SecurityError"):
        render_prompts(load_tokenizer(str(folder)), [[{"role": "user", "content": "x"}]])


@pytest.mark.parametrize("where", ["../secret.safetensors", "/{}/secret.safetensors", "link"])
def test_an_index_that_leaves_its_folder_is_refused(tmp_path, where):
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    name = where.format(str(tmp_path).lstrip("/"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    if where == "link":  # made by who owns the folder: allowed, as Hugging Face's own cache does
        (folder / "link").symlink_to(tmp_path / "secret.safetensors")
        assert list(open_folder(folder)) == ["w"]
        return
    with pytest.raises(CheckpointFormatError, match="names a file outside of this folder"):
        open_folder(folder)


def test_names_from_rows_do_not_become_paths(tmp_path):
    """Data sources are names of metrics; no output makes a file of them."""
    workdir = tmp_path / "run"
    with Writer(workdir, MetricsConfig(console=False)) as writer:
        writer.write(1, {"critic/score/../../../evil/mean": 1.0, "critic/score//etc/x/mean": 2.0})
    files = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*")}
    assert files == {("run",), ("run", "metrics.jsonl"), ("run", "tensorboard")}
    assert not pathlib.Path("/etc/x").exists()
    assert to_jsonable({"../x": 1}) == {"../x": 1}
