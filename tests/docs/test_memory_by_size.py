"""The tables of docs/memory_by_size.md are those that its commands print."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "memory_by_size.md").read_text()
COMMANDS = re.findall(r"^    python benchmarks/sizes.py --table=(\w+) --recipe=(\w+)", TEXT, re.M)


@pytest.mark.parametrize(
    ("table", "recipe"),
    [c if c == ("part", "grpo") else pytest.param(*c, marks=pytest.mark.slow) for c in COMMANDS],
)
def test_the_table_is_what_its_command_prints(table, recipe):
    spec = importlib.util.spec_from_file_location("sizes", ROOT / "benchmarks" / "sizes.py")
    sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sizes)
    assert len(COMMANDS) == 6
    assert "\n".join(sizes.TABLES[table](recipe)) in TEXT
