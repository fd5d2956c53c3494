"""Arrays [B, T, n] of the host in packed rows and back: routes of experts, a teacher's lessons.

They go to the devices that hold the rows: unlike the rest of a batch they are too large for every
device to hold. -1 stands where a row has no token.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from jaxrl_llm.data.packing import PackedBatch
from jaxrl_llm.sharding import hosts
from jaxrl_llm.sharding import mesh as mesh_lib

_DIMS = (None, "batch", "length", None)
_FIELDS = ("routes", "listed", "listed_log_probs", "parts", "seen")  # of a microbatch


def carried(packed: PackedBatch, mesh: Mesh, **fields: Shaped[np.ndarray, "..."]) -> PackedBatch:
    """Returns a batch, from the host, with wide fields [B, T, _] of its sequences by name.

    And with the `vectors` [n, D] of its images, if these are among them.
    """
    vectors: Any = fields.pop("vectors", packed.vectors)
    packed = dataclasses.replace(packed, vectors=vectors)
    m: Any = packed.microbatches
    owners = np.abs(m.segment_ids) - 1

    def placed(values: np.ndarray) -> Array:
        assert len(values) == len(packed.chosen)
        shape = *owners.shape, values.shape[-1]

        def part(index: Any) -> np.ndarray:
            of, at = owners[index[:3]], m.positions[index[:3]]
            return np.where(of[..., None] >= 0, values[of, at], np.array(-1, values.dtype))

        here = mesh_lib.sharding_of(shape, _DIMS, mesh)
        return jax.make_array_from_callback(shape, here, part, values.dtype)

    return _with(packed, {name: placed(values) for name, values in fields.items()})


def without(packed: PackedBatch) -> PackedBatch:
    """Returns the batch for networks that read no wide field."""
    m = packed.microbatches
    blank = (*m.segment_ids.shape, 0)
    packed = dataclasses.replace(packed, shown=None)
    return _with(packed, {name: np.zeros(blank, getattr(m, name).dtype) for name in _FIELDS})


def abstract(packed: PackedBatch, mesh: Mesh, **widths: int) -> PackedBatch:
    """Returns the shapes of a batch with fields of these widths, as `carried` places them."""
    m = packed.microbatches

    def field(name: str, width: int) -> jax.ShapeDtypeStruct:
        shape = *m.segment_ids.shape, width
        sharding = mesh_lib.sharding_of(shape, _DIMS, mesh)
        return jax.ShapeDtypeStruct(shape, getattr(m, name).dtype, sharding=sharding)

    return _with(packed, {name: field(name, width) for name, width in widths.items()})


def by_sequence(
    packed: PackedBatch,
    found: Shaped[Array, "M R W n"],
    lengths: Shaped[np.ndarray, " B"],
    width: int,
) -> Shaped[np.ndarray, "B T n"]:
    """Returns what was found in packed rows for each sequence of a batch from the host."""
    m: Any = packed.microbatches
    whole = hosts.whole(found)
    values = np.full((len(lengths), width, whole.shape[-1]), -1, whole.dtype)
    for i, place in zip(*np.nonzero(m.sequences < len(lengths)), strict=True):
        sequence, row = m.sequences[i, place], whole[i, m.rows[i, place]]
        start, begin, shared = m.starts[i, place], m.beginnings[i, place], m.shared[i, place]
        length = lengths[sequence]
        values[sequence, :shared] = row[begin : begin + shared]
        values[sequence, shared:length] = row[start + shared : start + length]
    return values


def _with(packed: PackedBatch, fields: dict[str, Any]) -> PackedBatch:
    return dataclasses.replace(
        packed, microbatches=dataclasses.replace(packed.microbatches, **fields)
    )
