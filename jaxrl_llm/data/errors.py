"""The exception of this folder."""


class DataError(ValueError):
    """A dataset, one of its rows or a tokenizer cannot be used; the text says which and why."""
