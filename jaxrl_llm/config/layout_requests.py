"""Requests to change the layout (mesh, placement) of a running job: files in its workdir."""

import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config import yaml_file
from jaxrl_llm.config.bridge import from_config_dict, to_dict
from jaxrl_llm.config.job import RLConfig
from jaxrl_llm.config.placement import LAYOUT_KEYS
from jaxrl_llm.config.workdir import load_config
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.storage import files, line_log
from jaxrl_llm.text import json_value

_REQUEST_FILE, _ANSWERS_FILE = "control.json", "layouts.jsonl"  # in the folder of a run


def apply_layout(config: RLConfig, text: str) -> RLConfig:
    """Applies a layout such as "mesh.fsdp=1 mesh.tensor=4" to a config and validates the result.

    Raises:
      ConfigError: If it is no layout, or the resulting config is invalid.
    """
    values: dict[str, Any] = to_dict(config)
    for key, value in parse_layout(text).items():
        *groups, name = key.split(".")
        parent = functools.reduce(lambda tree, group: tree.get(group, {}), groups, values)
        if groups[:2] == ["placement", "pools"] and name not in parent:
            raise ConfigError(f"layout {text!r}: {key}: no pool of this run")
        parent[name] = value
    return from_config_dict(values).require_rl()


def parse_layout(text: str) -> Mapping[str, Any]:
    """Parses a layout into values by key; raises ConfigError if it is malformed.

    >>> parse_layout("mesh.tensor=4 placement.choice=split")
    {'mesh.tensor': 4, 'placement.choice': 'split'}
    """
    layout, problems = {}, []
    for part in text.split():
        key, equals, value = part.partition("=")
        size_of_pool = re.fullmatch(r"placement\.pools\.\w+\.devices", key)
        if not (key in LAYOUT_KEYS or size_of_pool) or not equals:
            known = ", ".join((*LAYOUT_KEYS, "placement.pools.NAME.devices"))
            problems.append(f"layout {text!r}: {part!r} is not KEY=VALUE with one of {known}")
            continue
        try:
            layout[key] = yaml_file.scalar(value)
        except ValueError as error:
            problems.append(f"layout {text!r}: {key}: {error}")
    if problems:
        raise ConfigError(problems)
    return layout


def check_layout(workdir: str | os.PathLike[str], text: str) -> None:
    """Validates a layout for the job in `workdir`; raises ConfigError as `apply_layout` does."""
    config = load_config(workdir)
    if not config.learns_from_samples:
        raise ConfigError(f"{workdir}: a job {type(config).__name__}; only RL changes its layout")
    apply_layout(config.require_rl(), text)


def request_layout(workdir: str | os.PathLike[str], text: str) -> None:
    """Requests a layout of the run in `workdir` ("": the one of its config); raises as
    `check_layout`.
    """
    check_layout(workdir, text)
    files.replace_text(files.run_path(workdir) / _REQUEST_FILE, json.dumps({"layout": text}))


def pending_request(workdir: str | os.PathLike[str]) -> str | None:
    """The pending layout request, None if there is none."""
    try:
        return str(json_value(files.read_bytes(files.run_path(workdir) / _REQUEST_FILE))["layout"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def withdraw_request(workdir: str | os.PathLike[str]) -> None:
    """Withdraws the pending request."""
    files.remove(files.run_path(workdir) / _REQUEST_FILE)


def answer_request(workdir: str | os.PathLike[str], step: int, text: str, refused: str) -> None:
    """Answers a request: the layout applies from `step` on, or the reason why it is refused."""
    line = {"step": step, "layout": text, "refused": refused}
    line_log.append_line(files.run_path(workdir) / _ANSWERS_FILE, json.dumps(line))
    files.remove(files.run_path(workdir) / _REQUEST_FILE)


def read_answers(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All answers so far in order, without malformed lines."""
    try:
        content = line_log.read_log(files.run_path(workdir) / _ANSWERS_FILE)
    except FileNotFoundError:
        return []
    # A kill may have truncated the last line, and a resumed run may have appended to it.
    *lines, _ = content.split(b"\n")
    return [answer for answer in map(_parsed_answer, lines) if answer]


def _parsed_answer(line: bytes) -> dict[str, Any]:
    """Parses one answer; empty if the line is malformed."""
    try:
        answer = json_value(line)
    except ValueError:
        return {}
    is_answer = isinstance(answer, dict) and isinstance(answer.get("step"), int)
    is_valid = is_answer and all(
        isinstance(answer.get(name, ""), str) for name in ("layout", "refused")
    )
    return answer if is_valid else {}
