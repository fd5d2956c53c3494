"""No dead keys: whatever can be set is read somewhere."""

import dataclasses
import inspect
import pathlib
import re
import typing

import pytest

from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import JOBS

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
    # A stage is described as the job that it is; that is where its group is read.
    return "\n".join([*(path.read_text() for path in files), inspect.getsource(RLConfig.stage)])


KEYS = {key for job in JOBS.values() for key in _leaves(job)}
# Read by the bridge: what the others are set to, and which class they make.
KEYS -= {("AlgorithmConfig", "recipe"), *((job.__name__, "job") for job in JOBS.values())}


@pytest.mark.parametrize("group, name", sorted(KEYS))
def test_every_key_is_read(group, name, source):
    by_attribute = re.search(rf"\.{name}\b", source)
    by_name = re.search(rf"\"{name}\"", source)  # getattr over several fields of one kind
    assert by_attribute or by_name, f"nothing reads {group}.{name}; remove it or use it"
