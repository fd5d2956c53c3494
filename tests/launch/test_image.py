"""The Dockerfile: what it copies is there, and its commands install what the image runs."""

import os
import pathlib
import subprocess
import sys
import tomllib

import image_build
import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def test_it_copies_what_the_wheel_is_made_of():
    _, (build, image) = image_build.parse(TEXT)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = []
    for stage in (build, image):
        for word, rest in stage.instructions:
            if word == "COPY" and "--from" not in rest:
                copied += rest.split()[:-1]
    assert all((ROOT / path).exists() for path in copied)
    kept = {line.removeprefix("!").partition("/")[0] for line in ignored if line.startswith("!")}
    assert kept == set(copied) and "*" in ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(project["tool"]["setuptools"]["package-dir"].values()) | {"jaxrl_llm"}
    files = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    assert folders | files | {"constraints.txt"} == set(copied)


def test_its_platforms_are_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {"tpu", "cuda", "cuda13"} <= extras.keys()
    arguments, (_, image) = image_build.parse(TEXT)
    defaults = dict(rest.split("=") for word, rest in image.instructions if word == "ARG")
    assert arguments["PYTHON"] in ("3.11", "3.12") and defaults["PLATFORM"] == "tpu"
    assert set(defaults["EXTRAS"].split(",")) <= extras.keys()


@pytest.mark.nightly
def test_its_commands_install_what_the_image_runs(tmp_path):
    python = sys.executable
    folder, entrypoint = image_build.build(TEXT, ROOT, tmp_path, python, PLATFORM="cpu")
    assert [path.name for path in (folder / "work").iterdir()] == ["constraints.txt"]
    program = folder / "venv" / "bin" / entrypoint[0]
    few = ["--config.trainer.num_steps=2", "--config.warm_start.num_steps=2"]
    subprocess.run(
        [program, "train", "--config=grpo_tiny", "--workdir=run", *few],
        cwd=folder / "work",
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=900,
    )
    assert len((folder / "work" / "run" / "metrics.jsonl").read_text().splitlines()) >= 2


def test_another_platform_is_refused(tmp_path):
    _, (_, image) = image_build.parse(TEXT)
    command = next(rest for word, rest in image.instructions if word == "RUN")
    environment = {"PATH": "/usr/bin:/bin", "PLATFORM": "rocm", "EXTRAS": "math"}
    ended = subprocess.run(
        ["/bin/sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "PLATFORM is 'rocm'; give tpu, cuda12, cuda13 or cpu" in ended.stderr
