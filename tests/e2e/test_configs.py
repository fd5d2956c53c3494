"""Every config file describes a run that could work, and says what machine it wants."""

import ast

import pytest
import runs

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config.bridge import from_config_dict

FILES = sorted((runs.ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_config_is_valid_and_has_no_idle_setting(file):
    config = from_config_dict(runs.values(file.stem))
    assert list(config.warnings()) == []
    title = ast.get_docstring(ast.parse(file.read_text()))
    assert any(machine in title for machine in ("CPU cores", "GPU", "TPU"))


def test_the_8b_run_has_all_four_models():
    config = from_config_dict(runs.values("ppo_8b"))
    needed = requirements.requirements(config.algorithm)
    assert needed.critic and needed.reference
    assert config.rewards.models["preference"].path and not config.rewards.functions
    assert (config.mesh.fsdp, config.model.compute_dtype) == (8, "bfloat16")
