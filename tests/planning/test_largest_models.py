"""`plan` without a config: the largest models of a device, and the config that it writes."""

import json
import sys
import unittest.mock as mock

import pytest

from jaxrl_llm.commands import command_line
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.planning import largest_models, resolve_sizes

SMALL = largest_models.MODELS[:2]


def plan(*words):
    """Runs `plan`, of the two smallest models of the table."""
    with mock.patch.object(largest_models, "MODELS", SMALL):
        options = command_line.parse(command_line.COMMANDS["plan"], words)
        sys.modules["jaxrl_llm.commands.plan"].main(options)


@pytest.fixture(autouse=True)
def command():
    __import__("jaxrl_llm.commands.plan")


def test_the_table_of_a_card_and_its_config(tmp_path, capsys):
    path = tmp_path / "fit.json"
    plan("--device=t4", "--job=dpo", f"--fit={path}")
    said = capsys.readouterr().out
    assert said.startswith("largest model that fits 1 x t4, 13.4 GiB each:")
    rows = {line.partition(",")[0]: line for line in said.splitlines() if " tokens " in line}
    assert list(rows) == ["sft", "dpo", "grpo"]  # GRPO's longest last
    assert rows["sft"].count("Qwen3-1.7B") == 2  # with adapters; all weights do not fit
    config = from_config_dict(json.loads(path.read_text()))
    assert config.job == "dpo" and config.model.quantization == "nf4"
    assert config.model.path == SMALL[-1]
    target = resolve_sizes.topology_target("", "t4", 1)
    assert resolve_sizes.make_plan(resolve_sizes.fit_mesh(config, target), target).fits
    with pytest.raises(ConfigError, match="cannot be written: File exists"):
        plan("--device=t4", f"--fit={path}")


def test_flags_of_one_run_need_its_config():
    with pytest.raises(ConfigError, match="--json: is of one run; name its --config"):
        plan("--device=t4", "--json")
    with pytest.raises(ConfigError, match=r"is written as JSON; call it run\.json"):
        plan("--device=t4", "--fit=run")
