"""The commits of the models that a run reads from the hub, fixed when it starts."""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import TypeVar

from jaxrl_llm.config.validation import ConfigGroup, with_models
from jaxrl_llm.config.workdir import load_config
from jaxrl_llm.errors import ConfigError, UserError
from jaxrl_llm.sharding import multihost
from jaxrl_llm.storage import hub
from jaxrl_llm.storage.address import (
    AddressError,
    HubAddress,
    LocalAddress,
    parse_address,
    same_source,
)

Config = TypeVar("Config", bound=ConfigGroup)

logger = logging.getLogger(__name__)


def pin_models(config: Config, workdir: str | os.PathLike[str] = "") -> Config:
    """The config with the address of each model on the hub completed by a commit.

    It is that of the run in `workdir`, if it reads the same branch, else the newest: a resumed run
    reads what it began with, and the processes of a run read the same. All must call it.

    Raises:
      UserError: If a name on the hub cannot be resolved.
    """
    pinned = resolve_on_host0(lambda: _pinned_addresses(config, workdir))
    return with_models(config, lambda key, address: pinned.get(key, address))


def resolve_on_host0(resolve: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The addresses that the first process resolves, on all processes, as is its UserError."""
    pinned: dict[str, str] = {}
    if multihost.is_first():
        try:
            pinned = resolve()
        except UserError as error:
            pinned = {"": str(error)}
    pinned = multihost.broadcast_from_host0(pinned)
    if problem := pinned.pop("", ""):
        raise UserError(problem)
    return pinned


def _pinned_addresses(config: ConfigGroup, workdir: str | os.PathLike[str]) -> dict[str, str]:
    """The new addresses by key."""
    pinned: dict[str, str] = {}
    stored = _stored_models(workdir)

    def pin(key: str, text: str) -> str:
        address = parse_address(text, "model")
        if isinstance(address, LocalAddress) and os.path.isdir(text):
            with contextlib.suppress(AddressError):
                other = parse_address(f"hf://{text}")
                logger.info("%s: the local folder %s is read, not %s", key, text, other.text)
        if isinstance(address, HubAddress):
            begun = stored.get(key, "")
            if not address.commit and begun and same_source(text, begun, "model"):
                pinned[key] = begun
                logger.info("%s: %s, as the run began", key, begun)
            else:
                resolved = hub.resolve_commit(address)
                pinned[key] = resolved.text
                if not address.commit:
                    logger.info("%s: %s is commit %s", key, address.name, resolved.commit)
        return text

    with_models(config, pin)
    return pinned


def _stored_models(workdir: str | os.PathLike[str]) -> dict[str, str]:
    """The model addresses of the run in a folder by their keys; empty without a run."""
    models: dict[str, str] = {}
    if workdir:
        with contextlib.suppress(ConfigError):  # none yet, or reported by `check_workdir`
            with_models(load_config(workdir), lambda key, text: models.setdefault(key, text))
    return models
