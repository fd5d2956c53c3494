"""Workers that are real processes but sample without vLLM."""

import os
import pathlib
import sys

import pytest

from jaxrl_llm.processes import supervisor
from jaxrl_llm.rollout.vllm_engine import worker_client

STAND_IN = pathlib.Path(__file__).with_name("stand_in_worker.py")


@pytest.fixture
def stand_in(monkeypatch):
    """Makes `rollout.vllm.python` run the stand-in; afterwards no process of a worker is left."""
    monkeypatch.setattr(worker_client, "WORKER_SCRIPT", STAND_IN)
    monkeypatch.setattr(worker_client, "_PROBE", "")
    before = set(supervisor.descendants(os.getpid()))
    yield sys.executable
    assert set(supervisor.descendants(os.getpid())) <= before
