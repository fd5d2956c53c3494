"""Layouts that a run changes to between two steps: sizes of the mesh, placement of its roles."""

import functools
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config import yaml_file
from jaxrl_llm.config.bridge import from_config_dict, to_dict
from jaxrl_llm.config.folder import load_config, replace_text
from jaxrl_llm.config.job import RLConfig
from jaxrl_llm.config.placement import CHANGEABLE
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.text import json_value

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
    return from_config_dict(values).require_rl()


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
            continue
        try:
            found[key] = yaml_file.scalar(value)
        except ValueError as error:
            problems.append(f"layout {text!r}: {key}: {error}")
    if problems:
        raise ConfigError(problems)
    return found


def check(workdir: str | os.PathLike[str], text: str) -> None:
    """Raises ConfigError if the job in `workdir` has no layouts, and as `changed`."""
    config = load_config(workdir)
    if not config.learns_from_samples:
        raise ConfigError(f"{workdir}: a job {type(config).__name__}; only RL changes its layout")
    changed(config.require_rl(), text)


def ask(workdir: str | os.PathLike[str], text: str) -> None:
    """Asks the run in `workdir` for a layout ("": that of its config); raises as `check`."""
    check(workdir, text)
    replace_text(pathlib.Path(workdir) / _ASKED, json.dumps({"layout": text}))


def asked(workdir: str | os.PathLike[str]) -> str | None:
    """Returns the layout that somebody asked for and `answer` has not answered; None: nobody."""
    try:
        return str(json_value((pathlib.Path(workdir) / _ASKED).read_bytes())["layout"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def withdraw(workdir: str | os.PathLike[str]) -> None:
    """Takes back what `ask` asked for."""
    (pathlib.Path(workdir) / _ASKED).unlink(missing_ok=True)


def answer(workdir: str | os.PathLike[str], step: int, text: str, refused: str) -> None:
    """Writes that a layout holds from `step` on, or why it is refused."""
    line = {"step": step, "layout": text, "refused": refused}
    path = pathlib.Path(workdir) / _ANSWERS
    cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a kill
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut + json.dumps(line) + "\n")
    (pathlib.Path(workdir) / _ASKED).unlink(missing_ok=True)


def answers(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the answers so far, in their order; lines that are none are left out."""
    path = pathlib.Path(workdir) / _ANSWERS
    if not path.exists():
        return []
    # A kill may have cut the last one short, and a resumed run has written behind it.
    *lines, _ = path.read_bytes().split(b"\n")
    return [answer for answer in map(_answer, lines) if answer]


def _answer(line: bytes) -> dict[str, Any]:
    """The answer in a line of the file, empty if it is none."""
    try:
        answer = json_value(line)
    except ValueError:
        return {}
    known = isinstance(answer, dict) and isinstance(answer.get("step"), int)
    texts = known and all(isinstance(answer.get(name, ""), str) for name in ("layout", "refused"))
    return answer if texts else {}
