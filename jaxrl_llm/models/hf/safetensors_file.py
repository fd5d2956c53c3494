"""The safetensors file format: a JSON header, then the bytes of the tensors.

Unlike the safetensors library, this module reads single shards of a tensor, writes a file without
holding it in memory, and names every format error.
"""

import contextlib
import dataclasses
import fnmatch
import glob
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.hf.family_format import CheckpointFormatError
from jaxrl_llm.storage import model_folder
from jaxrl_llm.storage.model_folder import PathLike, RemoteFile, WeightFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
COMPARE_BLOCK_BYTES = 1 << 26  # block size for comparing two tensors
_FIRST_READ_BYTES = 1 << 15  # of a remote file: one request for most headers

_DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# Dtypes of the components of quantized tensors, which are not weights by themselves.
_QUANTIZED_DTYPES = {
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
_ALL_DTYPES = {**_DTYPES, **_QUANTIZED_DTYPES}
# Raised by JSON of another structure; RecursionError: brackets nested too deep.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Location of a tensor in a file; slicing `view` reads it."""

    file: WeightFile
    name: str
    dtype_code: str  # dtype code of the file, such as "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int

    @property
    def readable(self) -> bool:
        return self.dtype_code in _DTYPES

    @property
    def is_remote(self) -> bool:
        return isinstance(self.file, RemoteFile)

    @property
    def dtype(self) -> np.dtype:
        return _ALL_DTYPES[self.dtype_code]

    def view(self) -> "np.ndarray | RemoteArray":
        if isinstance(self.file, RemoteFile):
            return RemoteArray(self)
        return np.memmap(self.file, self.dtype, "r", self.begin, self.shape)


@dataclasses.dataclass(frozen=True)
class DerivedTensor:
    """A tensor that is computed from a stored one when a block of it is read."""

    stored: StoredTensor

    @property
    def file(self) -> WeightFile:
        return self.stored.file

    @property
    def is_remote(self) -> bool:
        return self.stored.is_remote

    def view(self) -> Self:
        return self


@dataclasses.dataclass(frozen=True)
class RemoteArray:
    """A tensor in a remote file; indexing it reads the smallest byte range with these elements."""

    tensor: StoredTensor

    def __getitem__(self, index: Any) -> np.ndarray:
        stored, parts = self.tensor, index if isinstance(index, tuple) else (index,)
        if not all(isinstance(part, slice) for part in parts):
            return self[:][index]
        block = (*parts, *[slice(None)] * (len(stored.shape) - len(parts)))
        begin, shape, within = contiguous_range(block, stored.shape)
        size = stored.dtype.itemsize
        start = stored.begin + begin * size
        data = read_bytes(stored.file, start, start + math.prod(shape) * size)
        return np.frombuffer(data, stored.dtype).reshape(shape)[within]


def contiguous_range(
    block: Sequence[slice], shape: Sequence[int]
) -> tuple[int, tuple[int, ...], tuple[slice, ...]]:
    """The smallest contiguous range of a tensor that holds a block of it.

    Returns its first element in the flattened tensor, the shape of its elements, and the block
    within them.

    >>> contiguous_range((slice(1, 2), slice(3, 5), slice(0, 2)), (4, 6, 8))[:2]
    (72, (1, 2, 8))
    """
    spans = [part.indices(size) for part, size in zip(block, shape, strict=True)]
    lengths = [max(0, stop - start) for start, stop, _ in spans]
    # Dims before the first of several rows have one index each; those behind it are read whole.
    dim = next((i for i, length in enumerate(lengths) if length != 1), len(shape))
    cut = min(dim + 1, len(shape))
    begin = sum(spans[i][0] * math.prod(shape[i + 1 :]) for i in range(cut))
    within = (*(slice(None, None, step) for _, _, step in spans[:cut]), *block[cut:])
    return begin, (*lengths[:cut], *shape[cut:]), within


def read_bytes(file: WeightFile, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a file; raises HubError or BucketError of a remote one."""
    if isinstance(file, RemoteFile):
        return file.read(begin, end)
    with file.open("rb") as opened:
        opened.seek(begin)
        return opened.read(end - begin)


@dataclasses.dataclass(frozen=True)
class TensorToWrite:
    """A tensor whose contents are computed only when it is written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    contents: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for JSON that rejects a key with two different values."""
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries and entries[key] != value:
            raise ValueError(f"{key!r} comes twice: {str(entries[key])[:60]}, {str(value)[:60]}")
        entries[key] = value
    return entries


def read_header(path: WeightFile) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of one file by name, and the file's metadata.

    Raises:
      CheckpointFormatError: If the file is missing, cut short or inconsistent.
    """
    if isinstance(path, pathlib.Path) and not path.is_file():
        raise _format_error(path, "no such file")
    size = path.num_bytes if isinstance(path, RemoteFile) else path.stat().st_size
    beginning = read_bytes(path, 0, min(size, _FIRST_READ_BYTES))
    if beginning[:8] == b"version ":
        remedy = "run 'git lfs pull' in its folder"
        raise _format_error(path, f"is a Git LFS pointer, not the weights; {remedy}")
    length = int.from_bytes(beginning[:8], "little")
    if size < 8 or 8 + length > size:
        raise _format_error(path, f"not a complete safetensors file ({size} bytes); copy it again")
    if 8 + length > len(beginning):
        beginning += read_bytes(path, len(beginning), 8 + length)
    try:
        header = json.loads(beginning[8 : 8 + length], object_pairs_hook=unique_keys)
        metadata = header.pop("__metadata__", None) or {}
        tensors = {}
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"][:2])
            shape = tuple(entry["shape"])
            tensors[name] = StoredTensor(path, name, entry["dtype"], shape, begin, end)
    except (*_MALFORMED, IndexError) as error:
        problem = f"the header is not valid: {type(error).__name__} {error}"
        raise _format_error(path, problem) from error
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end))
    for tensor, other in itertools.pairwise(ordered):
        if other.begin < tensor.end:
            raise _format_error(
                path, f"{tensor.name} and {other.name} overlap; copy the file again"
            )
    for name, tensor in tensors.items():
        if tensor.end > size:
            problem = f"{name} ends at byte {tensor.end}, the file has {size}"
            raise _format_error(path, f"cut short: {problem}; copy it again")
        if tensor.dtype_code in _ALL_DTYPES:
            num_bytes = tensor.end - tensor.begin
            expected = math.prod(tensor.shape) * _ALL_DTYPES[tensor.dtype_code].itemsize
            if num_bytes != expected or tensor.begin < 8 + length:
                problem = f"{name} {tensor.dtype_code}{list(tensor.shape)} needs {expected} bytes"
                raise _format_error(path, f"{problem}, the header gives it {num_bytes}")
    return tensors, metadata


def _format_error(path: PathLike | WeightFile, problem: str) -> CheckpointFormatError:
    return CheckpointFormatError(f"{path}: {problem}")


def open_folder(folder: PathLike, by_ranges: bool = False) -> dict[str, StoredTensor]:
    """All tensors of a model folder by name; reads headers only.

    In a multimodal model, tensors of the text model get the names of a text-only model.

    Args:
      folder: By any address (`storage/model_folder.py`).
      by_ranges: See `model_folder.weight_files`.

    Raises:
      CheckpointFormatError: If there are no safetensors, or a file that the index names is
        missing, cut short, or lacks a tensor.
    """
    index, present = model_folder.local_folder(folder) / INDEX_FILE, model_folder.file_names(folder)
    if SINGLE_FILE in present:
        if shards := [name for name in _indexed_shards(index, present) if name != SINGLE_FILE]:
            raise _format_error(
                folder,
                f"has {SINGLE_FILE}, and {INDEX_FILE} with {', '.join(shards[:3])}: two sets of"
                " weights;"
                " remove the one that is not the model's",
            )
        files = model_folder.weight_files(folder, [SINGLE_FILE], by_ranges)
        return _text_model_tensors(read_header(files[SINGLE_FILE])[0])
    if INDEX_FILE not in present:
        pickles = [n for end in ("*.bin", "*.pt*") for n in fnmatch.filter(sorted(present), end)]
        remedy = "can run code and are never read, convert them with transformers' save_pretrained"
        hint = f", only {', '.join(pickles[:3])}; pickled weights {remedy}" if pickles else ""
        hint += model_folder.offline_hint(folder)
        raise _format_error(folder, f"has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()), key=str)
    except _MALFORMED as error:
        raise _format_error(index, f"not a valid index: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or pathlib.PurePath(name).name != name or name == "..":
            rule = "names a file outside of this folder; it must be a plain name"
            raise _format_error(index, f"{name!r} {rule}")
    if missing := [name for name in names if name not in present]:
        count = f"{len(missing)} of {len(names)} files are missing"
        hint = model_folder.offline_hint(folder)
        raise _format_error(index, f"{count}: {', '.join(missing[:5])}{hint}")
    files = model_folder.weight_files(folder, names, by_ranges)
    headers = {name: read_header(file)[0] for name, file in files.items()}
    unnamed = _unnamed_shards(folder, present, names)
    if problem := next(_differing_copies({**headers, **unnamed}), ""):
        raise _format_error(index, problem)
    tensors = {}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise _format_error(index, f"{tensor} is not in {name} as the index says")
        tensors[tensor] = headers[name][tensor]
    return _text_model_tensors(tensors)


def _indexed_shards(index: pathlib.Path, present: Collection[str]) -> list[str]:
    """The existing files named in an index; empty if the index cannot be read."""
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, *_MALFORMED):
        return []
    return sorted(name for name in names if isinstance(name, str) and name in present)


def _unnamed_shards(
    folder: PathLike, present: Iterable[str], indexed: Sequence[str]
) -> dict[str, dict[str, StoredTensor]]:
    """Headers of complete shards of the same model that its index does not name."""
    names = [
        name
        for count in {name.rpartition("-of-")[2] for name in indexed if "-of-" in name}
        for name in fnmatch.filter(sorted(present), f"*-of-{glob.escape(count)}")
        if name not in indexed
    ]
    headers = {}
    # By ranges: of a remote one nothing but the header is needed.
    for name, file in model_folder.weight_files(folder, names, by_ranges=True).items():
        with contextlib.suppress(CheckpointFormatError):
            headers[name] = read_header(file)[0]
    return headers


def _differing_copies(headers: Mapping[str, Mapping[str, StoredTensor]]) -> Iterator[str]:
    """Yields tensors that occur in several files of a model with different contents."""
    first_copies: dict[str, StoredTensor] = {}
    for tensors in headers.values():
        for name, tensor in tensors.items():
            first = first_copies.setdefault(name, tensor)
            if first is not tensor and not _has_same_bytes(first, tensor):
                yield (
                    f"{name} is in {first.file.name} and in {tensor.file.name} with different"
                    " values; keep the file that is the model's"
                )


def _has_same_bytes(tensor: StoredTensor, other: StoredTensor) -> bool:
    if (tensor.dtype_code, tensor.shape) != (other.dtype_code, other.shape):
        return False
    for start in range(0, tensor.end - tensor.begin, COMPARE_BLOCK_BYTES):
        end = min(start + COMPARE_BLOCK_BYTES, tensor.end - tensor.begin)
        first, second = (
            read_bytes(each.file, each.begin + start, each.begin + end) for each in (tensor, other)
        )
        if first != second:
            return False
    return True


def _text_model_tensors(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    prefix = "language_model."
    if not any(prefix in name for name in tensors):
        return tensors
    other_prefixes = ("lm_head.", "model.visual.", "mtp.")
    text_tensors = {name: tensor for name, tensor in tensors.items() if prefix in name}
    renamed = {name.replace(prefix, "", 1): tensor for name, tensor in text_tensors.items()}
    other_tensors = {
        name: tensor for name, tensor in tensors.items() if name.startswith(other_prefixes)
    }
    return renamed | {name.removeprefix("model."): tensor for name, tensor in other_tensors.items()}


def write_file(
    path: pathlib.Path, tensors: Iterable[TensorToWrite], metadata: Mapping[str, str]
) -> None:
    """Writes one file, one tensor in memory at a time, and syncs it to disk."""
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _DTYPE_CODES[tensor.dtype],
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
            del contents  # frees it before the next one is computed
        file.flush()
        os.fsync(file.fileno())
