"""No dead keys: whatever can be set is read somewhere."""

import dataclasses
import pathlib
import re
import typing

import pytest

from jaxrl_llm.config import RLConfig

PACKAGE = pathlib.Path(__file__).parents[2] / "jaxrl_llm"


def _leaves(cls):
    for name, hint in typing.get_type_hints(cls).items():
        inner = [h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)]
        if inner:
            yield from _leaves(inner[0])
        else:
            yield cls.__name__, name


@pytest.fixture(scope="module")
def source():
    # The description itself does not count: the bridge reads every field, whatever it is for.
    files = [p for p in PACKAGE.rglob("*.py") if PACKAGE / "config" not in p.parents]
    return "\n".join(path.read_text() for path in files)


@pytest.mark.parametrize(
    "group, name", sorted(set(_leaves(RLConfig)) - {("AlgorithmConfig", "recipe")})
)
def test_every_key_is_read(group, name, source):
    by_attribute = re.search(rf"\.{name}\b", source)
    by_name = re.search(rf"\"{name}\"", source)  # getattr over several fields of one kind
    assert by_attribute or by_name, f"nothing reads {group}.{name}; remove it or use it"
