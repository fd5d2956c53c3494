"""The commits of the datasets that a run reads from the hub, fixed when it starts."""

import contextlib
import logging
import os
from typing import TypeVar

from jaxrl_llm.config.validation import ConfigGroup, with_row_files
from jaxrl_llm.config.workdir import load_config
from jaxrl_llm.data.rows.row_files import pinned_entry
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.planning.model_names import resolve_on_host0
from jaxrl_llm.storage import files

Config = TypeVar("Config", bound=ConfigGroup)

logger = logging.getLogger(__name__)


def pin_datasets(config: Config, workdir: str | os.PathLike[str]) -> Config:
    """The config with the address of each dataset on the hub completed by a commit.

    It is that of the run in `workdir`, if it reads the same address, else the newest: a resumed run
    reads what it began with, and the processes of a run read the same. All must call it.

    Raises:
      UserError: If a name on the hub cannot be resolved.
    """
    pinned = resolve_on_host0(lambda: _pinned_entries(config, workdir))
    return with_row_files(config, lambda key, entry: pinned.get(entry, entry))


def _pinned_entries(config: ConfigGroup, workdir: str | os.PathLike[str]) -> dict[str, str]:
    """The new entries by the old ones."""
    begun = _begun_entries(workdir)
    pinned: dict[str, str] = {}

    def pin(key: str, entry: str) -> str:
        if (other := pinned_entry(entry, begun)) != entry:
            pinned[entry] = other
            logger.info("%s: %s is read from %s", key, entry, other)
        return entry

    with_row_files(config, pin)
    return pinned


def _begun_entries(workdir: str | os.PathLike[str]) -> tuple[str, ...]:
    """The entries of the run in a folder; none without a run."""
    if not workdir or not files.is_file(files.run_path(workdir) / "config.json"):
        return ()
    entries: dict[str, str] = {}
    with contextlib.suppress(ConfigError):  # reported by `check_workdir`
        with_row_files(load_config(workdir), lambda _, entry: entries.setdefault(entry, entry))
    return tuple(entries)
