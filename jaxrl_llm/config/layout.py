"""Layouts that a run changes to between two steps: sizes of the mesh, placement of its roles."""

import functools
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from jaxrl_llm.config.bridge import from_config_dict, to_dict
from jaxrl_llm.config.folder import load_config, replace_text
from jaxrl_llm.config.job import RLConfig
from jaxrl_llm.config.placement import CHANGEABLE
from jaxrl_llm.errors import ConfigError

_ASKED, _ANSWERS = "control.json", "layouts.jsonl"  # in the folder of a run


def changed(config: RLConfig, text: str) -> RLConfig:
    """Returns the config with a layout such as "mesh.fsdp=1 mesh.tensor=4", all of it checked.

    Raises:
      ConfigError: If it is no layout, or the config is wrong with it.
    """
    values: dict[str, Any] = to_dict(config)
    for key, value in parsed(text).items():
        *groups, name = key.split(".")
        place = functools.reduce(lambda at, group: at.get(group, {}), groups, values)
        if groups[:2] == ["placement", "pools"] and name not in place:
            raise ConfigError(f"layout {text!r}: {key}: no pool of this run")
        place[name] = value
    found = from_config_dict(values)
    assert isinstance(found, RLConfig)
    return found


def parsed(text: str) -> Mapping[str, Any]:
    """Returns the values of a layout by their keys; raises ConfigError if it is none.

    >>> parsed("mesh.tensor=4 placement.choice=split")
    {'mesh.tensor': 4, 'placement.choice': 'split'}
    """
    found, problems = {}, []
    for part in text.split():
        key, equals, value = part.partition("=")
        size_of_pool = re.fullmatch(r"placement\.pools\.\w+\.devices", key)
        if not (key in CHANGEABLE or size_of_pool) or not equals:
            known = ", ".join((*CHANGEABLE, "placement.pools.NAME.devices"))
            problems.append(f"layout {text!r}: {part!r} is not KEY=VALUE with one of {known}")
        else:
            found[key] = yaml.safe_load(value)
    if problems:
        raise ConfigError(problems)
    return found


def ask(workdir: str | os.PathLike[str], text: str) -> None:
    """Asks the run in `workdir` for a layout ("": that of its config); raises as `changed`."""
    config = load_config(workdir)
    if not isinstance(config, RLConfig):
        raise ConfigError(f"{workdir}: a job {type(config).__name__}; only RL changes its layout")
    changed(config, text)
    replace_text(pathlib.Path(workdir) / _ASKED, json.dumps({"layout": text}))


def asked(workdir: str | os.PathLike[str]) -> str | None:
    """Returns the layout that somebody asked for and `answer` has not answered; None: nobody."""
    try:
        found = json.loads((pathlib.Path(workdir) / _ASKED).read_text("utf-8"))
        return str(found["layout"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def answer(workdir: str | os.PathLike[str], step: int, text: str, refused: str) -> None:
    """Writes that a layout holds from `step` on, or why it is refused."""
    line = {"step": step, "layout": text, "refused": refused}
    with (pathlib.Path(workdir) / _ANSWERS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    (pathlib.Path(workdir) / _ASKED).unlink(missing_ok=True)


def answers(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the answers so far, in their order."""
    try:
        text = (pathlib.Path(workdir) / _ANSWERS).read_text("utf-8")
    except FileNotFoundError:
        return []
    # A kill may have cut the last one short.
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
