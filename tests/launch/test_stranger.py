"""A stranger: the wheel in an empty folder, a run by name, its upload, its use by name."""

import glob
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import hub_server
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 1200
TRANSFORMERS = """
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained("alice/sums")
tokenizer = transformers.AutoTokenizer.from_pretrained("alice/sums")
print(model.num_parameters(), len(tokenizer))
"""


def interpreter(version):
    """Returns a Python of a version, "" if there is none."""
    pyenv = glob.glob(os.path.expanduser(f"~/.pyenv/versions/{version}*/bin/python"))
    for candidate in (sys.executable, f"python{version}", *pyenv):
        path = shutil.which(candidate)
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if path:
            ended = subprocess.run([path, "-c", code], capture_output=True, text=True)
            if ended.stdout.strip() == version:
                return path
    return ""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # A copy: setuptools writes into the folder that it builds from.
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxrl_llm", "configs"):
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return next(folder.glob("*.whl"))


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_from_the_wheel_to_a_name(tmp_path, wheel, version):
    python = interpreter(version)
    if not python:
        pytest.skip(f"no Python {version} here")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    install = [programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(install, check=True, timeout=TIMEOUT_S)
    folder = tmp_path / "empty"
    folder.mkdir()
    with hub_server.HubServer() as hub:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "JAX_PLATFORMS": "cpu",
            **hub_server.hub_environment(hub, tmp_path / "hf", "hf_alice"),
        }

        def call(program, *words):
            ended = subprocess.run(
                [program, *words],
                cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
            )  # fmt: skip
            assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
            return ended.stdout

        jaxrl_llm = programs / "jaxrl_llm"
        few = ("--config.trainer.num_steps=2", "--config.warm_start.num_steps=2")
        call(jaxrl_llm, "train", "--config=grpo_tiny", "--workdir=run", *few)
        assert "model.safetensors" in call(
            jaxrl_llm, "export", "--workdir=run", "--to=alice/sums", "--dry_run"
        )
        call(jaxrl_llm, "export", "--workdir=run", "--to=alice/sums")
        assert "README.md" in hub.files("alice/sums")
        prompt = "--prompt=3+4+2="
        said = call(jaxrl_llm, "generate", "--model=alice/sums", prompt, "--max_tokens=4")
        assert json.loads(said)["prompt"]
        if importlib.util.find_spec("torch"):
            parameters, tokens = call(sys.executable, "-c", TRANSFORMERS).split()
            assert int(parameters) > 0 and int(tokens) == 104
