"""The notebook does what it shows."""

import json
import pathlib

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "grpo_tiny.ipynb"


def cells(notebook, kind):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def shown(notebook):
    """Returns the kinds of output of the whole notebook, and all printed text."""
    outputs = [output for cell in cells(notebook, "code") for output in cell.outputs]
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    errors = [output for output in outputs if output.output_type == "error"]
    assert not errors
    return kinds, "".join(output.get("text", "") for output in outputs)


def test_notebook_installs_first_and_stores_its_results():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    first, *rest = cells(notebook, "code")
    assert "%pip install" in first.source
    for cell in rest:
        compile(cell.source, "cell", "exec")
    kinds, text = shown(notebook)
    assert "image/png" in kinds
    assert "step 1\n" in text and "score 1" in text


# As it stands it takes minutes. That such a run learns is shown by others; here, that cells run.
FEWER = {"warm_start.num_steps = 400": "warm_start.num_steps = 10"}
FEWER |= {"trainer.num_steps = 40": "trainer.num_steps = 4", "every = 10": "every = 2"}


@pytest.mark.parametrize(
    "fewer, last_step",
    [
        pytest.param(FEWER, 4, marks=pytest.mark.slow),
        pytest.param({}, 40, marks=pytest.mark.nightly),
    ],
    ids=["few steps", "as it stands"],
)
def test_notebook_runs_and_reward_rises(fewer, last_step, monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # One device, and programs that run fast: what a user has.
    monkeypatch.delenv("XLA_FLAGS")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (settings,) = (c for c in cells(notebook, "code") if "trainer.num_steps" in c.source)
    for written, instead in fewer.items():
        assert written in settings.source
        settings.source = settings.source.replace(written, instead)
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": tmp_path}}
    ).execute()
    kinds, text = shown(notebook)
    assert "image/png" in kinds and f"step {last_step}\n" in text
    # The run's own; its warm start has one in a folder below.
    metrics = min(tmp_path.rglob("metrics.jsonl"), key=lambda path: len(path.parts))
    rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    name = "val-core/arithmetic/mean@1"
    accuracy = [row[name] for row in rows if name in row]
    assert len(accuracy) >= 3
    assert fewer or accuracy[-1] > accuracy[0] + 0.1
