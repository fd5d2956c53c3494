"""A killed service: after the restart, and the client's retry, all is as without the kill."""

import os
import pathlib
import subprocess
import sys

import pytest
import serving_model

WORKER = pathlib.Path(__file__).with_name("restart_worker.py")
ROOT = pathlib.Path(__file__).parents[3]
# In the order of the requests: one folder meets all of them.
KILLS = [("computed", 3), ("state_written", 3), ("done", 5)]


def run_worker(model, state, point="", seq=0):
    """The exit status and the digest of a process that trains."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(WORKER), str(model), str(state), point, str(seq)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("digest")]
    assert done.returncode in (0, 9), done.stderr
    return done.returncode, lines


@pytest.mark.slow
def test_an_update_is_done_once_wherever_the_process_is_killed(tmp_path):
    model = tmp_path / "model"
    serving_model.make_folder(model)
    status, expected = run_worker(model, tmp_path / "whole")
    assert status == 0 and len(expected) == 1
    for point, seq in KILLS:
        assert run_worker(model, tmp_path / "killed", point, seq) == (9, []), (point, seq)
    assert run_worker(model, tmp_path / "killed") == (0, expected)
