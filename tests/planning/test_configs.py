"""Every shipped config of a large model fits what its docstring names, as it says."""

import importlib.util
import pathlib
import re

import pytest

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import plan_report, resolve_sizes

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SIZES = ("3b", "8b", "32b", "70b", "mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3")
PLANNED = [f"{recipe}_{size}" for recipe in ("ppo", "grpo") for size in SIZES]
PLANNED += [f"{job}_8b" for job in ("sft", "dpo", "reward_model", "agent_search")]
PLANNED += ["grpo_vl_7b"]
PLANNED += [f"grpo_qlora_{size}" for size in ("1.5b", "4b", "8b")]
PLANNED += ["sft_qlora_8b", "dpo_qlora_8b"]


@pytest.mark.parametrize("name", PLANNED)
def test_the_docstring_has_the_plan(name):
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    device, topology = re.search(
        r"`launch/plan.py(?: --device=(\S+))?`(?:, (\S+))?:", module.__doc__
    ).groups("")
    place = resolve_sizes.topology_target(topology, device, 1)
    plan = resolve_sizes.make_plan(from_config_dict(module.get_config()), place)
    assert plan.fits
    assert f"{plan_report.headline(plan)}." in module.__doc__
