"""The exception of this folder, and the check of saved positions that raises it."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError


class DataError(UserError, ValueError):
    """A dataset, one of its rows or a tokenizer cannot be used; the text says which and why."""


def check_saved(what: str, state: Mapping[str, Any], mine: Mapping[str, Any], remedy: str) -> None:
    """Raises a DataError if a saved state, read as JSON, has another value for one of `mine`."""
    for name, value in mine.items():
        found = state.get(name)
        if (tuple(found) if isinstance(found, list) else found) != value:
            raise DataError(
                f"the saved {what} has {name}={found!r}, this run has {value!r}: {remedy}, or begin"
                " in an empty folder"
            )
