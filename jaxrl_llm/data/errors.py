"""The exception of this folder, and the check of restored iterator states."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError


class DataError(UserError, ValueError):
    """A dataset, one of its rows or a tokenizer cannot be used; the text says which and why."""


def check_saved(what: str, state: Mapping[str, Any], mine: Mapping[str, Any], remedy: str) -> None:
    """Raises DataError if a saved state, read from JSON, differs from this run in one of `mine`."""
    for name, value in mine.items():
        saved = state.get(name)
        if (tuple(saved) if isinstance(saved, list) else saved) != value:
            raise DataError(
                f"the saved {what} has {name}={saved!r}, this run has {value!r}: {remedy}, or begin"
                " in an empty folder"
            )
