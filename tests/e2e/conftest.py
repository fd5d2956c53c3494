"""Runs that several tests look at, each made once a session, and what they share."""

import fcntl
import os
import pathlib
import shutil

import jax
import pytest
import recipe_settings
import runs

from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import rl


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Returns `folder(name, make)`, which `make` fills once for all processes of the session."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of the session; the folder below it is this process's own

    def folder(name, make) -> pathlib.Path:
        path = root / name
        done = path.with_suffix(".done")
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                make(path)
                done.touch()
        return path

    return folder


@pytest.fixture(scope="session")
def grpo_run(made_once, cache) -> pathlib.Path:
    """The folder of a tiny GRPO run that was not interrupted."""

    def make(folder):
        flags = [*runs.flags("grpo_tiny"), f"--workdir={folder / 'run'}"]
        result = runs.finish(runs.start("train", flags, cache))
        assert result.returncode == 0, result.stderr[-4000:]
        (folder / "stdout").write_text(result.stdout)
        (folder / "stderr").write_text(result.stderr)

    return made_once("grpo", make) / "run"


@pytest.fixture(scope="session")
def ppo_run(made_once, cache) -> pathlib.Path:
    """The folder of a tiny PPO run that was not interrupted; two of its steps are profiled."""

    def make(folder):
        # Not in this process, where the profiler crashes once the TPU's compiler is loaded.
        profiled = ["--config.profiler.first_step=3", "--config.profiler.num_steps=2"]
        flags = [*runs.flags("ppo_tiny"), *profiled, f"--workdir={folder / 'run'}"]
        runs.launch("train", flags, cache)

    return made_once("ppo", make) / "run"


@pytest.fixture(scope="session")
def taught(made_once) -> pathlib.Path:
    """The product of the warm start that all runs on sums begin from."""

    def teach(workdir):
        with mesh_lib.use_devices(jax.devices()[:1]):
            rl.train(recipe_settings.config("grpo", {"trainer": {"num_steps": 1}}), workdir)

    return made_once("taught", teach) / "warm_start"


@pytest.fixture
def train(taught, one_device, tmp_path):
    """Returns `train(recipe, changes, name) -> (state, workdir)`, begun from `taught`."""

    def run(recipe: str, changes=None, name: str = "run"):
        workdir = tmp_path / name
        shutil.copytree(taught, workdir / "warm_start")
        config = recipe_settings.config(recipe, changes or {})
        return rl.train(config, workdir), workdir

    return run


@pytest.fixture
def babble(one_device, tmp_path):
    """Returns `babble(recipe, changes) -> (state, workdir)`, begun from nothing."""

    def run(recipe: str, changes):
        changes = recipe_settings.merged(recipe_settings.UNTAUGHT, changes)
        workdir = tmp_path / "run"
        return rl.train(recipe_settings.config(recipe, changes), workdir), workdir

    return run
