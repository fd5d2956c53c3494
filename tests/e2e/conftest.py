"""Runs that several tests look at: each is made once a session."""

import pathlib

import pytest
import runs


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> pathlib.Path:
    """Compiled programs, shared by all processes of the session."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory, cache) -> pathlib.Path:
    """The folder of a tiny GRPO run that was not interrupted."""
    workdir = tmp_path_factory.mktemp("grpo") / "run"
    runs.launch("train", [*runs.flags("grpo_tiny"), f"--workdir={workdir}"], cache)
    return workdir


@pytest.fixture(scope="session")
def ppo_run(tmp_path_factory, cache) -> pathlib.Path:
    """The folder of a tiny PPO run that was not interrupted."""
    workdir = tmp_path_factory.mktemp("ppo") / "run"
    runs.launch("train", [*runs.flags("ppo_tiny"), f"--workdir={workdir}"], cache)
    return workdir
