"""The one command that measures an accelerator, rehearsed on a CPU with tiny models."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.nightly
def test_one_command_measures_and_writes_one_table(tmp_path):
    out = tmp_path / "table.md"
    command = ["benchmarks/accelerator.sh", "--rehearse", f"--out={out}"]
    env = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    head, _, _, _, *rows = out.read_text().splitlines()
    assert "cpu, jax" in head and head in done.stdout
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert all(len(row) == 4 for row in cells) and not any(row[0] == "failed" for row in cells)
    if any(row[0] == "cut off" for row in cells):
        pytest.skip(f"this machine is too slow for the whole rehearsal: {len(rows)} rows")
    what = [row[0] for row in cells]
    assert sum(name.startswith("sampling, tiny") for name in what) == 4
    assert {"update, tiny", "memory, planned and measured", "iteration of GRPO, tiny's layers"} <= {
        *what
    }
