"""Arrays that rest in host memory between uses; each device's part in its own host's memory."""

from typing import Any

import jax
from jax.sharding import Mesh

_HOST = "pinned_host"


def problem(mesh: Mesh) -> str:
    """Returns why arrays of this mesh cannot rest in host memory; "" if they can."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _HOST in kinds:
        return ""
    return f"{device.platform} devices have no {_HOST} memory here (they have {', '.join(kinds)})"


def resting(tree: Any) -> Any:
    """Returns the arrays in host memory; scalars stay where they are."""
    host = lambda a: jax.device_put(a, a.sharding.with_memory_kind(_HOST))  # noqa: E731
    return jax.tree.map(lambda a: host(a) if a.ndim else a, tree)


def working(tree: Any) -> Any:
    """Returns the arrays in device memory; those that are there already are not copied."""
    return jax.tree.map(lambda a: jax.device_put(a, in_use(a.sharding)), tree)


def in_use(sharding: Any) -> Any:
    """Returns the sharding that an array has in device memory."""
    if sharding.memory_kind != _HOST:
        return sharding
    device = next(iter(sharding.device_set))
    return sharding.with_memory_kind(device.default_memory().kind)
