"""Checks that all processes hold the same values, by digests; the first difference stops the run.

Different prompts, tokens or weights on one process raise no error by themselves: the run would go
on with wrong results. Arrays are compared where processes hold copies of the same part.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import hosts

_UNEQUAL = "unequal copies "


class DivergenceError(UserError, RuntimeError):
    """Processes hold different values; the message names the first item and who holds what."""


def check(where: str, items: Mapping[str, Any]) -> None:
    """Compares `items` between all processes, which must all call this.

    A value is what `digest` takes, or `Copies` of arrays on devices. The message begins with
    `where`, e.g. "step 3".

    Raises:
      DivergenceError: If an item differs; names the first, and who holds what.
    """
    if jax.process_count() == 1:
        return
    mine: dict[str, str] = {}
    for name, value in items.items():
        if isinstance(value, Copies):
            mine |= {f"{name}{part}": digest for part, digest in value.digests()}
        else:
            mine[name] = digest(value)
    compare(where, hosts.share(mine))


def compare(where: str, everyone: Sequence[Mapping[str, str]]) -> None:
    """Compares the digests of processes; an item is compared between those that hold it."""
    for name in dict.fromkeys(name for digests in everyone for name in digests):
        holders: dict[str, list[int]] = {}
        for process, digests in enumerate(everyone):
            if name in digests:
                holders.setdefault(digests[name], []).append(process)
        if len(holders) > 1 or any(text.startswith(_UNEQUAL) for text in holders):
            found = "; ".join(
                f"process{'es' * (len(some) > 1)} {', '.join(map(str, some))}: {text}"
                for text, some in holders.items()
            )
            raise DivergenceError(
                f"{where}: the processes disagree, first about {name} ({found}); look for a host"
                " with other files, packages or settings, or a failing device, and start the run"
                " again to resume from its last checkpoint"
            )


def digest(value: Any) -> str:
    """Returns 16 hex digits that two values share if they are equal.

    Values are numbers, texts, host arrays, and sequences, mappings and dataclasses of them.

    >>> digest({"a": [1, 2.0], "b": "x"}) == digest({"b": "x", "a": (1, 2.0)})
    True
    >>> digest(np.zeros(2, np.int32)) == digest(np.zeros(2, np.float32))
    False
    """
    found = hashlib.blake2b(digest_size=8)
    for part in _parts(value):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for key in sorted(value, key=str):
            yield str(key).encode(errors="surrogatepass")
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)):
        yield f"sequence of {len(value)}".encode()
        for entry in value:
            yield from _parts(entry)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
    else:
        yield repr(value).encode(errors="surrogatepass")


@dataclasses.dataclass(frozen=True)
class Copies:
    """Arrays on devices, whose copies of the same part must be equal."""

    tree: Any  # of jax arrays with `NamedSharding`s

    def digests(self) -> Iterator[tuple[str, str]]:
        """Yields (path and part, digest) of every part that this process holds.

        Each device digests its own parts. Arrays in host memory are left out. Copies within this
        process are compared here.
        """
        on_device = jax.local_devices()[0].default_memory().kind
        by_mesh: dict[Mesh, dict[str, Any]] = {}
        for keys, leaf in jax.tree_util.tree_leaves_with_path(self.tree):
            if leaf.sharding.memory_kind in (None, on_device):
                by_mesh.setdefault(leaf.sharding.mesh, {})[jax.tree_util.keystr(keys)] = leaf
        for mesh, leaves in by_mesh.items():
            paths = sorted(leaves)
            specs = tuple((path, leaves[path].sharding.spec) for path in paths)
            with jax.set_mesh(mesh):
                table = _local_digests(mesh, specs)(leaves)
            rows = {shard.device: np.asarray(shard.data)[0] for shard in table.addressable_shards}
            for column, path in enumerate(paths):
                found: dict[str, set[int]] = {}
                for shard in leaves[path].addressable_shards:
                    bounds = zip(shard.index, leaves[path].shape, strict=True)
                    part = ",".join("{}:{}".format(*s.indices(size)) for s, size in bounds)
                    found.setdefault(part, set()).add(int(rows[shard.device][column]))
                for part, values in found.items():
                    text = ", ".join(f"{value:08x}" for value in sorted(values))
                    yield f"{path}[{part}]", _UNEQUAL + text if len(values) > 1 else text


@functools.lru_cache(maxsize=16)
def _local_digests(mesh: Mesh, specs: tuple[tuple[str, PartitionSpec], ...]):
    """Returns a program for each device's digests of its own parts, [devices, leaves]."""
    rows = PartitionSpec(mesh.axis_names)

    def of_device(leaves: dict[str, Array]) -> UInt32[Array, "1 leaves"]:
        return jnp.stack([_array_digest(leaves[path]) for path, _ in specs])[None]

    program = jax.shard_map(
        of_device, mesh=mesh, in_specs=(dict(specs),), out_specs=rows, check_vma=False
    )
    return jax.jit(program, out_shardings=NamedSharding(mesh, rows))


def _array_digest(array: Array) -> UInt32[Array, ""]:
    """Returns the sum of the elements' bits, each times an odd number that its position gives.

    A change of one element always changes it: odd numbers have inverses modulo 2**32.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{min(array.dtype.itemsize * 8, 32)}")
    bits = jax.lax.bitcast_convert_type(array, unsigned).reshape(-1).astype(jnp.uint32)
    odd = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435769) * 2 + 1
    return (bits * odd).sum(dtype=jnp.uint32)
