"""Configs as YAML files, by the rules of YAML 1.2: `off` is a text, `1e-5` a number.

JSON is YAML: the `config.json` of a run is such a file.
"""

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from jaxrl_llm.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json")


class _Loader(yaml.SafeLoader):
    """Reads plain values as YAML 1.2's core schema does; refuses a key that comes twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # none of YAML 1.1  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            problem = f"the key {key.value!r} comes twice" if str(key.value) in seen else ""
            if key.tag != "tag:yaml.org,2002:str":
                problem = f"{key.value!r} is no name; quote it if it is meant to be one"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_NUMBERS = list("-+0123456789.")
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", _NUMBERS),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", _NUMBERS),
    ("null", r"null|Null|NULL|~|", [*"nN~", ""]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )
_Loader.add_constructor(  # PyYAML reads 010 as 8
    "tag:yaml.org,2002:int", lambda loader, node: int(str(loader.construct_scalar(node)))
)


def read(path: str) -> Mapping[str, Any]:
    """Returns the mapping in a file.

    Raises:
      ConfigError: With the line, if it is no YAML, or holds no mapping.
    """
    try:
        with open(path, encoding="utf-8") as file:
            values = _Loader(file).get_single_data()
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or error
        raise ConfigError(f"--config: {path}{line}: {what}; mend the file") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config: {path}: holds {values!r}; write settings, as `seed: 1`")
    return values


def text(values: Mapping[str, Any]) -> str:
    """Returns nested dicts, as `bridge.to_dict` makes them, as a file that `read` reads."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads alike: a text that it would take for another thing is quoted."""

    yaml_implicit_resolvers = {  # of both versions, so that all readers agree
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *rows]
        for first, rows in _Loader.yaml_implicit_resolvers.items()
    } | {
        first: rows
        for first, rows in yaml.SafeDumper.yaml_implicit_resolvers.items()
        if first not in _Loader.yaml_implicit_resolvers
    }
