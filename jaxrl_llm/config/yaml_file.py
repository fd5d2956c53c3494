"""Configs as YAML files, by the rules of YAML 1.2: `off` is a text, `1e-5` a number.

JSON is YAML: the `config.json` of a run is such a file. PyYAML refuses some JSON all the same (tabs
between values, pairs of `\\ud83d`-like escapes), so what begins as an object is read as JSON first.
"""

import json
import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from jaxrl_llm.errors import ConfigError
from jaxrl_llm.storage import files

SUFFIXES = (".yaml", ".yml", ".json")


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by YAML 1.2's core schema; refuses duplicate keys."""

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


# PyYAML raises the last ones for a value that does not fit its tag, as `!!bool maybe`.
_BAD_YAML = (yaml.YAMLError, ValueError, RecursionError, LookupError, TypeError, AttributeError)


def read(path: str) -> Mapping[str, Any]:
    """Reads the mapping in a YAML file.

    Raises:
      ConfigError: With the line, if it is no YAML, or holds no mapping.
    """
    try:
        content = files.read_bytes(files.run_path(path)).decode("utf-8-sig")
        values = _values(content, path.endswith(".json"))
    except (*_BAD_YAML, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or error
        raise ConfigError(f"--config: {path}{line}: {what}; mend the file") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config: {path}: holds {values!r}; write settings, as `seed: 1`")
    return values


def _values(content: str, is_json: bool) -> Any:
    """Parses YAML, or JSON if the content is an object.

    Raises:
      yaml.YAMLError: If it is neither; with JSON's own reason where `is_json` and YAML's is a tab.
    """
    if not content.lstrip().startswith("{"):
        return _Loader(content).get_single_data()
    problem = None
    try:
        return json.loads(content, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        problem = error
    except (ValueError, RecursionError):  # a key twice, digits without end: YAML names the line
        content = content.replace("\t", " ")  # strings of JSON have none
    try:
        return _Loader(content).get_single_data()
    except yaml.YAMLError as error:
        if problem is None or not (is_json or "'\\t'" in str(error)):
            raise
        mark = yaml.Mark(None, 0, problem.lineno - 1, problem.colno - 1, None, None)
        raise yaml.MarkedYAMLError(problem=problem.msg, problem_mark=mark) from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key twice")
    return mapping


def scalar(text: str) -> bool | int | float | str:
    """Parses one plain or quoted YAML scalar, such as a setting on the command line.

    >>> scalar("4"), scalar("split"), scalar("1e-5")
    (4, 'split', 1e-05)

    Raises:
      ValueError: If it is no YAML, or nothing, a list, a mapping or an object of a tag.
    """
    try:
        value = _Loader(text).get_single_data()
    except _BAD_YAML as error:
        problem = getattr(error, "problem", None) or error
        raise ValueError(f"{text[:100]!r} is not a value ({problem})") from error
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"{text[:100]!r} is not a single value; write a number or a name")
    return value


def text(values: Mapping[str, Any]) -> str:
    """Dumps nested dicts of `bridge.to_dict` as YAML that `read` accepts."""
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` would resolve to another type."""

    yaml_implicit_resolvers = {  # of both versions, so that all readers agree
        first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, ()), *rows]
        for first, rows in _Loader.yaml_implicit_resolvers.items()
    } | {
        first: rows
        for first, rows in yaml.SafeDumper.yaml_implicit_resolvers.items()
        if first not in _Loader.yaml_implicit_resolvers
    }
