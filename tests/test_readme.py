"""What the README says is so."""

import json
import pathlib
import re
from typing import Any

import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.recipes import RECIPES
from jaxrl_llm.trainer import rl

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_links_and_named_files_exist():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(targets) > 5
    assert not [target for target in targets if not (ROOT / target).exists()]


def test_every_config_has_its_row():
    rows = set(re.findall(r"^\| \[`configs/([\w.]+)\.py`\]", README, flags=re.MULTILINE))
    assert rows == {path.stem for path in (ROOT / "configs").glob("*.py")}


def test_every_recipe_is_named():
    (listed,) = re.findall(r"with their papers: ([^.]+)\.", README)
    assert set(re.findall(r"`(\w+)`", listed)) == set(RECIPES)


def snippet() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    return found


def test_the_python_snippet_describes_a_run(monkeypatch):
    """Ten lines at most; its config is built for real, the training is the next test's."""
    runs = []
    monkeypatch.setattr(rl, "train", lambda config, workdir: runs.append((config, workdir)))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    assert len([line for line in snippet().splitlines() if line]) <= 10
    exec(snippet(), {})
    ((config, workdir),) = runs
    assert (config.algorithm.recipe, workdir) == ("grpo", "runs/from_python")
    assert list(config.warnings()) == []


@pytest.mark.slow
def test_the_python_snippet_trains(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(snippet(), names)
    assert int(names["state"].policy.num_updates) == 20
    lines = pathlib.Path("runs/from_python/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 20


def test_the_error_report_is_what_a_user_sees():
    shown = re.search(r" {4}(2 problems in this config:\n(?: {6}.*\n)+)", README)
    values = {
        "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
        "algorithm": {"clip_lwo": 0.1},
        "trainer": {"prompts_per_step": 32, "minibatch_size": 48},
    }
    with pytest.raises(ConfigError) as error:
        from_config_dict(values)
    assert shown is not None
    assert str(error.value) == shown[1].replace("\n      ", "\n  ").rstrip()
