"""The commits of the datasets that a run reads from the hub, fixed when it starts."""

import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jaxrl_llm.config.validation import ROW_FILES, ConfigGroup, field_rules
from jaxrl_llm.config.workdir import load_config
from jaxrl_llm.data.rows.row_files import pinned_entry
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.sharding import multihost

Config = TypeVar("Config", bound=ConfigGroup)

logger = logging.getLogger(__name__)


def pin_datasets(config: Config, workdir: str | os.PathLike[str]) -> Config:
    """The config with the address of each dataset on the hub completed by a commit.

    It is that of the run in `workdir`, if it reads the same address, else the newest: a resumed run
    reads what it began with, and the processes of a run read the same. All must call it.

    Raises:
      UserError: If a name on the hub cannot be resolved.
    """
    pinned = multihost.broadcast_from_host0(_pinned_entries(config, workdir))
    if problem := pinned.pop("", ""):
        raise UserError(problem)
    return _with_entries(config, lambda entry: pinned.get(entry, entry)) if pinned else config


def _pinned_entries(config: ConfigGroup, workdir: str | os.PathLike[str]) -> dict[str, str]:
    """The new entries by the old ones, on the first process; below "" the error that came up."""
    if not multihost.is_first():
        return {}
    begun = _begun_entries(workdir)
    pinned = {}
    try:
        for entry in _entries(config):
            if (other := pinned_entry(entry, begun)) != entry:
                pinned[entry] = other
                logger.info("rows of %s are read from %s", entry, other)
    except UserError as error:
        return {"": str(error)}
    return pinned


def _begun_entries(workdir: str | os.PathLike[str]) -> tuple[str, ...]:
    """The entries of the run in a folder; none without a run."""
    if workdir and (pathlib.Path(workdir) / "config.json").exists():
        with contextlib.suppress(ConfigError):  # reported by `check_workdir`
            return tuple(_entries(load_config(workdir)))
    return ()


def _entries(config: ConfigGroup) -> Iterator[str]:
    """All addresses of files of rows in a config."""
    entries: dict[str, None] = {}

    def note(entry: str) -> str:
        entries[entry] = None
        return entry

    _with_entries(config, note)
    yield from entries


def _with_entries(group: Any, replace: Callable[[str], str]) -> Any:
    """A config group whose addresses of files of rows are replaced."""
    changes: dict[str, Any] = {}
    rules = {name: rule for name, rule, _ in field_rules(type(group))}
    for name, value in vars(group).items():
        if rules.get(name) == ROW_FILES:
            changes[name] = tuple(map(replace, value))
        elif isinstance(value, ConfigGroup):
            changes[name] = _with_entries(value, replace)
        elif isinstance(value, Mapping):
            changes[name] = {
                key: _with_entries(each, replace) if isinstance(each, ConfigGroup) else each
                for key, each in value.items()
            }
    changed = {name: value for name, value in changes.items() if value != getattr(group, name)}
    return dataclasses.replace(group, **changed) if changed else group
