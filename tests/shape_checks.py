"""The jaxtyping annotations of the package, enforced while tests run: see `conftest.py`.

Within a call a letter is one size. Types that name no array are mypy's work and not checked here.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jaxtyping
import numpy as np
import typeguard

ALL = typeguard.CollectionCheckStrategy.ALL_ITEMS


def expected(annotation: Any) -> Any:
    """Returns what is checked for an annotation, None if no array stands in it.

    NumPy's arrays pass for jax's, which take them everywhere; not the other way round.
    """
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        if annotation.array_type is not jax.Array:
            return annotation
        return annotation.dtype[jax.Array | np.ndarray, annotation.dim_str]
    inner = typing.get_args(annotation)
    found = [expected(part) for part in inner]
    if not any(part is not None for part in found) or typing.get_origin(annotation) is Callable:
        return None
    parts = tuple(old if new is None else new for old, new in zip(inner, found, strict=True))
    union = isinstance(annotation, types.UnionType)
    return (typing.Union if union else typing.get_origin(annotation))[parts]


def typechecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with typeguard's check of each argument that is annotated as an array.

    jaxtyping hands over a function whose parameters are those of one of ours and its result.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    checks = {p.name: expected(p.annotation) for p in parameters}
    checks = {name: check for name, check in checks.items() if check is not None}
    if not checks:
        return function
    kinds = {p.name: p.kind for p in parameters}

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        for name in [name for name in checks if name in arguments]:  # in order: dims are bound
            value = arguments[name]
            if function.__name__ == "__init__" and not _holds_arrays(value):
                continue
            if kinds[name] is inspect.Parameter.VAR_KEYWORD:
                value = tuple(value.values())
            elif kinds[name] is not inspect.Parameter.VAR_POSITIONAL:
                value = (value,)
            for one in value:
                typeguard.check_type(one, checks[name], collection_check_strategy=ALL)
        return function(*args, **kwargs)

    return checked


def _holds_arrays(field: Any) -> bool:
    """Returns False for a tree's field that jax fills with what is no array, as shardings are."""
    leaves = jax.tree.leaves(field)
    return bool(leaves) and all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)
