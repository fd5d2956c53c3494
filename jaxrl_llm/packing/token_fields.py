"""Per-token fields [B, T, n] on the host, moved to packed rows and back.

They are expert routes, supports, teachers' log-probs and image positions. They go only to the
devices that hold the rows: unlike the rest of a batch they are too large for every device. Padding
is -1.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Shaped

from jaxrl_llm.packing.packed_batch import PackedBatch
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import multihost

_DIMS = (None, "batch", "length", None)
_FIELDS = (
    "routes",
    "support",
    "teacher_tokens",
    "teacher_log_probs",
    "mrope_positions",
    "image_index",
)  # of a microbatch


def with_fields(
    packed: PackedBatch, mesh: Mesh, **fields: Shaped[np.ndarray, "..."]
) -> PackedBatch:
    """A host batch with per-token fields [B, T, _] of its sequences added by name.

    `image_features` [n, D], the features of its images, may be among them.
    """
    vectors: Any = fields.pop("image_features", packed.image_features)
    packed = dataclasses.replace(packed, image_features=vectors)
    microbatches: Any = packed.microbatches
    owners = np.abs(microbatches.segment_ids) - 1

    def on_device(values: np.ndarray) -> Array:
        assert len(values) == len(packed.is_member)
        shape = *owners.shape, values.shape[-1]

        def shard_values(index: Any) -> np.ndarray:
            sequence, position = owners[index[:3]], microbatches.positions[index[:3]]
            return np.where(
                sequence[..., None] >= 0, values[sequence, position], np.array(-1, values.dtype)
            )

        sharding = mesh_lib.activation_sharding(shape, _DIMS, mesh)
        return jax.make_array_from_callback(shape, sharding, shard_values, values.dtype)

    return _with_fields(packed, {name: on_device(values) for name, values in fields.items()})


def without_fields(packed: PackedBatch) -> PackedBatch:
    """The batch without per-token fields and images, for networks that read none of them."""
    microbatches = packed.microbatches
    shape = (*microbatches.segment_ids.shape, 0)
    packed = dataclasses.replace(packed, images=None)
    return _with_fields(
        packed, {name: np.zeros(shape, getattr(microbatches, name).dtype) for name in _FIELDS}
    )


def abstract_fields(packed: PackedBatch, mesh: Mesh, **widths: int) -> PackedBatch:
    """Shapes and shardings of a batch with fields of these widths, as `with_fields` places them."""
    microbatches = packed.microbatches

    def field(name: str, width: int) -> jax.ShapeDtypeStruct:
        shape = *microbatches.segment_ids.shape, width
        sharding = mesh_lib.activation_sharding(shape, _DIMS, mesh)
        return jax.ShapeDtypeStruct(shape, getattr(microbatches, name).dtype, sharding=sharding)

    return _with_fields(packed, {name: field(name, width) for name, width in widths.items()})


def fields_by_sequence(
    packed: PackedBatch,
    packed_values: Shaped[Array, "M R W n"],
    lengths: Shaped[np.ndarray, " B"],
    width: int,
) -> Shaped[np.ndarray, "B T n"]:
    """Per-token values of packed rows, by sequence, on the host; -1 past the end of a sequence.

    `packed` is a batch that is still on the host.
    """
    microbatches: Any = packed.microbatches
    all_rows = multihost.allgather_array(packed_values)
    values = np.full((len(lengths), width, all_rows.shape[-1]), -1, all_rows.dtype)
    for m, slot in zip(*np.nonzero(microbatches.sequences < len(lengths)), strict=True):
        sequence, row = microbatches.sequences[m, slot], all_rows[m, microbatches.rows[m, slot]]
        start, begin, shared = (
            microbatches.starts[m, slot],
            microbatches.prefix_starts[m, slot],
            microbatches.prefix_lengths[m, slot],
        )
        length = lengths[sequence]
        values[sequence, :shared] = row[begin : begin + shared]
        values[sequence, shared:length] = row[start + shared : start + length]
    return values


def _with_fields(packed: PackedBatch, fields: dict[str, Any]) -> PackedBatch:
    return dataclasses.replace(
        packed, microbatches=dataclasses.replace(packed.microbatches, **fields)
    )
