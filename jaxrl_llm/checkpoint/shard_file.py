"""A file with the shards of arrays that one process holds, made to lie in the memory of a host.

Magic, length of the header, header (JSON), the shards' bytes, their CRC-32. The header has a row
for each shard: array, corner, shape, dtype, offset.
"""

import json
import mmap
import os
import pathlib
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

Json = dict[str, Any]
Index = tuple[slice, ...]

_MAGIC = b"jaxrl_llm shards 1\n"
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_ALIGNMENT = 64  # of each shard, so that its bytes are an array without a copy
_BLOCK = 1 << 24  # bytes between two looks at other threads


def write(path: pathlib.Path, leaves: Mapping[str, jax.Array], extra: Json) -> Callable[[], None]:
    """Copies the shards of this process; the returned function completes the file at `path`.

    When this returns the arrays may be donated. The function computes the checksum and may run in
    another thread. Each distinct shard is written once. Raises OSError if there is no space.
    """
    shards = [(name, *each) for name, leaf in leaves.items() for each in _distinct_shards(leaf)]
    for _, _, data in shards:
        data.copy_to_host_async()
    rows: list[Json] = []
    end = 0
    for name, start, data in shards:
        dtype = np.dtype(data.dtype)
        rows.append({"name": name, "start": start, "shape": data.shape, "dtype": dtype.name})
        rows[-1]["offset"] = end
        end += -(-data.size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    header = json.dumps({**extra, "shards": rows, "bytes": end}).encode()
    begin = _data_start(len(header))
    temporary = path.with_name(f"{path.name}.tmp")
    file = os.open(temporary, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(file, 0, begin + end + _CRC.size)  # fails here if it does not fit
        _write_at(file, 0, memoryview(_MAGIC + _LENGTH.pack(len(header)) + header))
        for row, (_, _, data) in zip(rows, shards, strict=True):
            # By system calls: through a mapped file it would take twice as long.
            flat = np.ascontiguousarray(np.asarray(data)).reshape(-1).view(np.uint8)
            _write_at(file, begin + row["offset"], flat.data)
    except OSError:
        os.close(file)
        temporary.unlink(missing_ok=True)
        raise

    def complete() -> None:
        try:
            with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as memory:
                crc = _crc(memory, begin, end)
            _write_at(file, begin + end, memoryview(_CRC.pack(crc)))
        finally:
            os.close(file)
        temporary.replace(path)

    return complete


def _write_at(file: int, start: int, content: memoryview) -> None:
    """Writes all of `content`; one call may write less."""
    while content:
        written = os.pwrite(file, content, start)
        content, start = content[written:], start + written


def _distinct_shards(array: jax.Array) -> Iterator[tuple[list[int], jax.Array]]:
    """(corner, data) of the shards on this process, each index range once."""
    # A view of the array: the host's copy that jax keeps of an array would prevent its donation.
    view = jax.device_put(array, array.sharding, may_alias=True)
    corners = set()
    for shard in view.addressable_shards:
        corner = [
            part.indices(size)[0] for part, size in zip(shard.index, array.shape, strict=True)
        ]
        if tuple(corner) not in corners:
            corners.add(tuple(corner))
            yield corner, shard.data


def _data_start(header_bytes: int) -> int:
    return -(-(len(_MAGIC) + _LENGTH.size + header_bytes) // _ALIGNMENT) * _ALIGNMENT


def _view(memory: mmap.mmap, begin: int, row: Json) -> np.ndarray:
    """The array of a shard in the file's memory."""
    dtype = np.dtype(row["dtype"])
    count = int(np.prod(row["shape"], dtype=np.int64))
    flat = np.frombuffer(memory, dtype, count, begin + row["offset"])
    return flat.reshape(row["shape"])


def _crc(memory: mmap.mmap, begin: int, size: int) -> int:
    crc = 0
    for start in range(begin, begin + size, _BLOCK):
        crc = zlib.crc32(memoryview(memory)[start : min(start + _BLOCK, begin + size)], crc)
    return crc


class ShardFile:
    """A complete file, read in place. Raises ValueError if it is none, OSError if unreadable."""

    def __init__(self, path: pathlib.Path):
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        prefix = len(_MAGIC) + _LENGTH.size
        if self._memory[: len(_MAGIC)] != _MAGIC or len(self._memory) < prefix:
            raise ValueError(f"{path}: not a file of shards")
        (length,) = _LENGTH.unpack(self._memory[len(_MAGIC) : prefix])
        self.header: Json = json.loads(self._memory[prefix : prefix + length])
        self._begin = _data_start(length)

    @property
    def is_intact(self) -> bool:
        """Whether the bytes are those that were written; reads all of them."""
        end = self._begin + self.header["bytes"]
        if len(self._memory) != end + _CRC.size:
            return False
        return _CRC.unpack(self._memory[end:]) == (
            _crc(self._memory, self._begin, end - self._begin),
        )

    def fill(self, regions: "Regions") -> None:
        """Copies what the shards of this file and the regions have in common."""
        for row in self.header["shards"]:
            if row["name"] in regions.wanted:
                regions.add(row["name"], row["start"], _view(self._memory, self._begin, row))


class Regions:
    """Index ranges of arrays that are wanted, filled from shards that were cut in any other way."""

    def __init__(self) -> None:
        # Array -> corner and shape of a region -> its values.
        self.wanted: dict[str, dict[tuple, np.ndarray]] = {}
        self._missing = 0  # elements
        self._seen: set[tuple] = set()  # shards; a replica brings the same again

    def want(self, name: str, index: Index, shape: tuple[int, ...], dtype: Any) -> None:
        """Asks for `array[index]` of an array of `shape`."""
        key = _bounds(index, shape)
        regions = self.wanted.setdefault(name, {})
        if key not in regions:
            regions[key] = np.empty([end - start for start, end in key], dtype)
            self._missing += regions[key].size

    @property
    def is_complete(self) -> bool:
        return self._missing == 0

    def add(self, name: str, start: list[int], values: np.ndarray) -> None:
        """Adds a shard whose corner is `start`."""
        if (name, tuple(start)) in self._seen:
            return
        self._seen.add((name, tuple(start)))
        for key, region in self.wanted[name].items():
            common = [
                (max(low, corner), min(high, corner + size))
                for (low, high), corner, size in zip(key, start, values.shape, strict=True)
            ]
            if all(low < high for low, high in common):
                to = tuple(
                    slice(lo - k, hi - k) for (lo, hi), (k, _) in zip(common, key, strict=True)
                )
                of = tuple(slice(lo - s, hi - s) for (lo, hi), s in zip(common, start, strict=True))
                region[to] = values[of]
                self._missing -= region[to].size

    def get(self, name: str, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        """The values of a region that was wanted."""
        return self.wanted[name][_bounds(index, shape)]


def _bounds(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
