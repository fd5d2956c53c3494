"""Starter configs by name: listed, copied, run."""

import json
import pathlib
import tomllib

import commands
import pytest

from jaxrl_llm.config import flags, starters
from jaxrl_llm.config.bridge import from_config_dict

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def test_they_are_the_files_of_the_repository():
    assert starters.names() == sorted(path.stem for path in CONFIGS.glob("*.py"))
    assert starters.find("grpo_tiny").samefile(CONFIGS / "grpo_tiny.py")
    assert starters.find("../configs/grpo_tiny") is None and starters.find("grpo") is None


def test_the_wheel_has_every_package():
    settings = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = (path.parent for path in (CONFIGS.parent / "jaxrl_llm").rglob("__init__.py"))
    names = {".".join(folder.relative_to(CONFIGS.parent).parts) for folder in folders}
    assert set(settings["packages"]) == names | set(settings["package-dir"])


def test_each_says_its_task_and_its_machine_or_size():
    for name in starters.names():
        row = starters.Starter.from_file(starters.find(name))
        assert row.task and row.machine, name


def test_starters_are_listed(capsys):
    code, out, _ = commands.call(capsys, "configs")
    assert code == 0 and "grpo_tiny " in out
    assert "planned: 8 x v5p (fsdp 8): 52.0 of 95.7 GiB a device" in out
    code, out, _ = commands.call(capsys, "configs", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows.keys() == set(starters.names())
    assert rows["ppo_8b"]["machine"] == "TPU v5p:2x2x2"


def test_a_name_is_a_config_and_a_file_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = from_config_dict(flags.load("grpo_tiny"))
    assert by_name == from_config_dict(flags.load(str(CONFIGS / "grpo_tiny.py")))
    (tmp_path / "grpo_tiny").write_text("def get_config():\n    return {'seed': 7}\n")
    assert flags.load("grpo_tiny")["seed"] == 7


def test_a_copy_to_edit(capsys, tmp_path):
    target = tmp_path / "my_run.py"
    code, out, _ = commands.call(capsys, "new", "grpo_tiny", target)
    assert code == 0 and f"--config={target}" in out
    assert target.read_bytes() == (CONFIGS / "grpo_tiny.py").read_bytes()


@pytest.mark.parametrize(
    ("name", "files", "problem"),
    [
        ("grpo_tinny", ["a.py"], "did you mean the starter config 'grpo_tiny'?"),
        ("grpo_tiny", ["a.yaml"], "the copy is a Python file"),
        ("grpo_tiny", ["no/such/a.py"], "make it first"),
        ("grpo_tiny", ["there.py"], "there.py: exists; name another file"),
        ("grpo_tiny", ["a.py", "b.py"], "takes a starter config and a file, got 3"),
    ],
)
def test_starters_that_cannot_be_copied(capsys, tmp_path, name, files, problem):
    (tmp_path / "there.py").write_text("mine")
    assert problem in commands.refused(capsys, "new", name, *(tmp_path / file for file in files))
    assert (tmp_path / "there.py").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["there.py"]


def test_misspelt_starter_gets_a_suggestion(capsys, tmp_path):
    said = commands.refused(capsys, "train", "--config=gpro_tiny", f"--workdir={tmp_path / 'run'}")
    assert "--config: gpro_tiny: no such file; did you mean the starter config 'grpo_tiny'?" in said
    assert "`jaxrl_llm configs` lists" in said
