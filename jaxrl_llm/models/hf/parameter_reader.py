"""Reads a parameter of the network from the tensors of a model folder, block by block.

Each block goes straight to its devices. Tensors in remote files cost a request and their bytes, so
that of those every byte is read once in a process; and where the blocks of a process are strided in
the files, the processes read contiguous stripes and exchange them over the devices.
"""

import collections
import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxrl_llm.models.hf.quantized_tensors import CheckpointTensor
from jaxrl_llm.models.hf.safetensors_file import contiguous_range
from jaxrl_llm.models.hf.tensor_names import TensorName

Block = tuple[slice, ...]  # a slice per dim of an array, with start and stop
BlockReader = Callable[[Block], np.ndarray]

MAX_SHARED_BYTES = 1 << 33  # of a parameter on a host while its blocks are cut from it
MAX_SURPLUS = 1.02  # bytes read over those needed, above which stripes are read instead
_NUM_REQUESTS = 8  # at the same time


def read_parameter(
    name: TensorName,
    tensors: Sequence[CheckpointTensor],
    dtype: np.dtype,
    shape: tuple[int, ...],
    sharding: Sharding,
) -> jax.Array:
    """One sharded parameter; `tensors` has one tensor per layer and expert, or a single one."""
    read = functools.partial(_read_block, name, tensors, dtype)
    if not any(tensor.is_remote for tensor in tensors):
        return assemble(shape, sharding, read)
    if (
        not isinstance(sharding, NamedSharding)
        or sharding.is_fully_addressable
        or _surplus(name, tensors, shape, sharding) <= MAX_SURPLUS
    ):
        return assemble(shape, sharding, _read_once(shape, sharding, read))
    stripes = _stripe_sharding(name, shape, sharding)
    array = assemble(shape, stripes, _read_once(shape, stripes, read))
    # On CPUs the collectives of two programs at the same time may be mixed up.
    return jax.block_until_ready(jax.device_put(array, sharding))


def _read_block(
    name: TensorName, tensors: Sequence[CheckpointTensor], dtype: np.dtype, block: Block
) -> np.ndarray:
    """One block of a parameter; reads local layers and experts one after the other."""
    out = np.empty([part.stop - part.start for part in block], dtype)

    def fill(slot: tuple[int, ...]) -> None:
        tensor, stored = _stored_block(name, tensors, block, slot)
        out[slot] = name.parameter_block(tensor.view()[stored], block[name.num_leading_dims :])

    slots = list(np.ndindex(out.shape[: name.num_leading_dims]))
    if len(slots) > 1 and any(tensor.is_remote for tensor in tensors):
        with concurrent.futures.ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            collections.deque(pool.map(fill, slots), maxlen=0)  # raises the first error
    else:
        for slot in slots:
            fill(slot)
    return out


def _stored_block(
    name: TensorName, tensors: Sequence[CheckpointTensor], block: Block, slot: tuple[int, ...]
) -> tuple[CheckpointTensor, Block]:
    """The tensor of a layer and expert of a block, and the part of the tensor."""
    leading, inner = block[: name.num_leading_dims], block[name.num_leading_dims :]
    number = 0
    for i, span, size in zip(slot, leading, (1, name.experts), strict=False):
        number = number * size + span.start + i
    tensor = tensors[number]
    return tensor, name.stored_slices(inner, tensor.shape)


def assemble(shape: tuple[int, ...], sharding: Sharding, read: BlockReader) -> jax.Array:
    """A sharded array; each block is read once for all devices that hold it."""
    arrays: list[jax.Array] = []
    indices = sharding.addressable_devices_indices_map(shape)
    for block, devices in _holders(shape, indices).items():
        contents = read(tuple(slice(*span) for span in block))
        copies = [
            jax.device_put(
                contents, jax.sharding.SingleDeviceSharding(d, memory_kind=sharding.memory_kind)
            )
            for d in devices
        ]
        arrays += jax.block_until_ready(copies)  # else all blocks would be in host memory at once
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


Spans = tuple[tuple[int, int], ...]  # (start, stop) per dim


def _holders(shape: tuple[int, ...], indices: Mapping[Any, Any]) -> dict[Spans, list[Any]]:
    """The distinct blocks of an array, each with the devices that hold it."""
    holders: dict[Spans, list[Any]] = collections.defaultdict(list)
    for device, index in indices.items():
        assert index is not None
        parts = (part.indices(size) for part, size in zip(index, shape, strict=True))
        holders[tuple((start, stop) for start, stop, _ in parts)].append(device)
    return holders


def _num_elements(block: Spans) -> int:
    return math.prod(stop - start for start, stop in block)


def _read_once(shape: tuple[int, ...], sharding: Sharding, read: BlockReader) -> BlockReader:
    """A reader that cuts the blocks of this process from one read of all of them.

    Strided blocks would read the same bytes of a remote file once for each device. Where the blocks
    do not fill the box around them, or it is too large for the host, they are read one by one.
    """
    blocks = list(_holders(shape, sharding.addressable_devices_indices_map(shape)))
    box = tuple(
        (min(start for start, _ in spans), max(stop for _, stop in spans))
        for spans in zip(*blocks, strict=True)
    )
    needed = sum(map(_num_elements, blocks))
    if len(blocks) < 2 or _num_elements(box) > needed or 4 * needed > MAX_SHARED_BYTES:
        return read
    contents = read(tuple(slice(*span) for span in box))

    def block(part: Block) -> np.ndarray:
        return contents[
            tuple(
                slice(each.start - start, each.stop - start)
                for each, (start, _) in zip(part, box, strict=True)
            )
        ]

    return block


def _surplus(
    name: TensorName,
    tensors: Sequence[CheckpointTensor],
    shape: tuple[int, ...],
    sharding: Sharding,
) -> float:
    """The largest factor over all processes of the elements read over those needed.

    It is computed for all devices, so that all processes choose the same way.
    """
    by_process: dict[int, set[Spans]] = collections.defaultdict(set)
    for block, devices in _holders(shape, sharding.devices_indices_map(shape)).items():
        for device in devices:
            by_process[device.process_index].add(block)
    factors = []
    for blocks in by_process.values():
        box = tuple(
            (min(start for start, _ in spans), max(stop for _, stop in spans))
            for spans in zip(*blocks, strict=True)
        )
        needed = sum(map(_num_elements, blocks))
        whole = _num_elements(box) == needed and 4 * needed <= MAX_SHARED_BYTES
        num_read = sum(_range_size(name, tensors, each) for each in ([box] if whole else blocks))
        factors.append(num_read / max(1, needed))
    return max(factors)


def _range_size(name: TensorName, tensors: Sequence[CheckpointTensor], block: Spans) -> int:
    """The elements in the ranges of the files that hold a block."""
    slices = tuple(slice(*span) for span in block)
    # The tensors of all layers and experts have the same shape.
    tensor, stored = _stored_block(name, tensors, slices, (0,) * name.num_leading_dims)
    num_tensors = _num_elements(block[: name.num_leading_dims])
    return num_tensors * math.prod(contiguous_range(stored, tensor.shape)[1])


def _stripe_sharding(name: TensorName, shape: tuple[int, ...], sharding: NamedSharding) -> Sharding:
    """A sharding over the same devices whose blocks are contiguous in the files.

    It splits the layers or experts, or the first dim of the stored tensors, which is the last one
    of the parameter if it is transposed; into as many parts as divide both it and the devices.
    """
    devices = sharding.mesh.devices.flatten()
    rows_dim = len(shape) - 1 if name.transposed else name.num_leading_dims
    # Fused and interleaved parameters are contiguous only as whole tensors.
    dims: Iterable[int] = range(name.num_leading_dims)
    if not (name.interleaved or name.widths):
        dims = (*dims, rows_dim)
    parts, dim = max((math.gcd(shape[dim], len(devices)), -i, dim) for i, dim in enumerate(dims))[
        ::2
    ]
    mesh = Mesh(devices.reshape(parts, -1), ("stripe", "copy"))
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, "stripe"))
