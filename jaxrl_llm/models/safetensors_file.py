"""The safetensors file format: a JSON header, then the bytes of the tensors.

Unlike the library, this reads a shard of a tensor alone, writes a file without holding it, and
names every fault.
"""

import contextlib
import dataclasses
import glob
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.family_table import CheckpointFormatError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BLOCK_BYTES = 1 << 26  # of two tensors, compared at one time

_DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# What quantized tensors consist of; they are no weights by themselves.
_PARTS = {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
_KNOWN = {**_DTYPES, **_PARTS}
# What reading JSON of another structure raises; RecursionError: brackets nested too deep.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored; slices of `view` read it."""

    file: pathlib.Path
    name: str
    code: str  # dtype as the file calls it
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int

    @property
    def readable(self) -> bool:
        return self.code in _DTYPES

    def view(self) -> np.ndarray:
        return np.memmap(self.file, _KNOWN[self.code], "r", self.begin, self.shape)


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """A tensor whose contents are computed when it is written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    contents: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without keys that come twice with different values (`object_pairs_hook`)."""
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries and entries[key] != value:
            raise ValueError(f"{key!r} comes twice: {str(entries[key])[:60]}, {str(value)[:60]}")
        entries[key] = value
    return entries


def read_header(path: pathlib.Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Returns the tensors of one file by name, and the file's metadata.

    Raises:
      CheckpointFormatError: If the file is missing, cut short or inconsistent.
    """
    if not path.is_file():
        raise _fault(path, "no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            remedy = "run 'git lfs pull' in its folder"
            raise _fault(path, f"is a Git LFS pointer, not the weights; {remedy}")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or 8 + length > size:
            raise _fault(path, f"not a complete safetensors file ({size} bytes); copy it again")
        try:
            header = json.loads(file.read(length), object_pairs_hook=unique_keys)
            metadata = header.pop("__metadata__", None) or {}
            tensors = {}
            for name, entry in header.items():
                begin, end = (8 + length + offset for offset in entry["data_offsets"][:2])
                shape = tuple(entry["shape"])
                tensors[name] = StoredTensor(path, name, entry["dtype"], shape, begin, end)
        except (*_MALFORMED, IndexError) as error:
            what = f"the header is not valid: {type(error).__name__} {error}"
            raise _fault(path, what) from error
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end))
    for tensor, other in itertools.pairwise(ordered):
        if other.begin < tensor.end:
            raise _fault(path, f"{tensor.name} and {other.name} overlap; copy the file again")
    for name, tensor in tensors.items():
        if tensor.end > size:
            what = f"{name} ends at byte {tensor.end}, the file has {size}"
            raise _fault(path, f"cut short: {what}; copy it again")
        if tensor.code in _KNOWN:
            given = tensor.end - tensor.begin
            expected = math.prod(tensor.shape) * _KNOWN[tensor.code].itemsize
            if given != expected or tensor.begin < 8 + length:
                what = f"{name} {tensor.code}{list(tensor.shape)} needs {expected} bytes"
                raise _fault(path, f"{what}, the header gives it {given}")
    return tensors, metadata


def _fault(path: pathlib.Path, what: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{path}: {what}")


def open_folder(folder: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns every tensor of a model folder by name; only headers are read.

    Of a model of text and images those of the text model, under the names they have in a model of
    text alone.

    Raises:
      CheckpointFormatError: If there are no safetensors, or a file that the index names is
        missing, cut short, or lacks a tensor.
    """
    index = folder / INDEX
    if (folder / SINGLE).exists():
        if parts := [name for name in _shards(index) if name != SINGLE]:
            raise _fault(
                folder,
                f"has {SINGLE}, and {INDEX} with {', '.join(parts[:3])}: two sets of weights;"
                " remove the one that is not the model's",
            )
        return _of_text(read_header(folder / SINGLE)[0])
    if not index.exists():
        pickles = [p.name for end in ("*.bin", "*.pt*") for p in sorted(folder.glob(end))]
        remedy = "can run code and are never read, convert them with transformers' save_pretrained"
        hint = f", only {', '.join(pickles[:3])}; pickled weights {remedy}" if pickles else ""
        raise _fault(folder, f"has neither {SINGLE} nor {INDEX}{hint}")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted(set(weight_map.values()), key=str)
    except _MALFORMED as error:
        raise _fault(index, f"not a valid index: {error!r}") from error
    for name in files:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name or name == "..":
            rule = "names a file outside of this folder; it must be a plain name"
            raise _fault(index, f"{name!r} {rule}")
    if missing := [name for name in files if not (folder / name).is_file()]:
        count = f"{len(missing)} of {len(files)} files are missing"
        raise _fault(index, f"{count}: {', '.join(missing[:5])}")
    headers = {name: read_header(folder / name)[0] for name in files}
    if problem := next(_differing_copies({**headers, **_unnamed_shards(folder, files)}), ""):
        raise _fault(index, problem)
    tensors = {}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise _fault(index, f"{tensor} is not in {name} as the index says")
        tensors[tensor] = headers[name][tensor]
    return _of_text(tensors)


def _shards(index: pathlib.Path) -> list[str]:
    """The files beside an index that it names; none if it cannot be read."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, *_MALFORMED):
        return []
    plain = [name for name in names if isinstance(name, str) and name == pathlib.Path(name).name]
    return sorted(name for name in plain if (index.parent / name).is_file())


def _unnamed_shards(
    folder: pathlib.Path, named: Sequence[str]
) -> dict[str, dict[str, StoredTensor]]:
    """The headers of shards of the same model that its index does not name, if they are whole."""
    headers = {}
    for count in {name.rpartition("-of-")[2] for name in named if "-of-" in name}:
        for path in sorted(folder.glob(f"*-of-{glob.escape(count)}")):
            if path.name not in named:
                with contextlib.suppress(CheckpointFormatError):
                    headers[path.name] = read_header(path)[0]
    return headers


def _differing_copies(headers: Mapping[str, Mapping[str, StoredTensor]]) -> Iterator[str]:
    """Yields tensors that several files of one model hold with different contents."""
    places: dict[str, StoredTensor] = {}
    for tensors in headers.values():
        for name, tensor in tensors.items():
            first = places.setdefault(name, tensor)
            if first is not tensor and not _same_bytes(first, tensor):
                yield (
                    f"{name} is in {first.file.name} and in {tensor.file.name} with different"
                    " values; keep the file that is the model's"
                )


def _same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.code, one.shape) != (other.code, other.shape):
        return False
    with one.file.open("rb") as file, other.file.open("rb") as other_file:
        file.seek(one.begin)
        other_file.seek(other.begin)
        for at in range(one.begin, one.end, BLOCK_BYTES):
            size = min(BLOCK_BYTES, one.end - at)
            if file.read(size) != other_file.read(size):
                return False
    return True


def _of_text(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    prefix = "language_model."
    if not any(prefix in name for name in tensors):
        return tensors
    beside = ("lm_head.", "model.visual.")
    kept = {name: tensor for name, tensor in tensors.items() if prefix in name}
    found = {name.replace(prefix, "", 1): tensor for name, tensor in kept.items()}
    others = {name: tensor for name, tensor in tensors.items() if name.startswith(beside)}
    return found | {name.removeprefix("model."): tensor for name, tensor in others.items()}


def write_file(
    path: pathlib.Path, tensors: Iterable[TensorToWrite], metadata: Mapping[str, str]
) -> None:
    """Writes one file, holding one tensor at a time, and waits until it is on disk."""
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            contents = np.ascontiguousarray(tensor.contents())
            assert (contents.dtype, contents.shape) == (tensor.dtype, tensor.shape), tensor.name
            file.write(contents.view(np.uint8).data)
            del contents  # before the next is asked for
        file.flush()
        os.fsync(file.fileno())
