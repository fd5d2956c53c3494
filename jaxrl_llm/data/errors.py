"""The exception of this folder."""

from jaxrl_llm.errors import UserError


class DataError(UserError, ValueError):
    """A dataset, one of its rows or a tokenizer cannot be used; the text says which and why."""
