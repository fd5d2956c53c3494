"""Model folders wherever they lie: the small files local, the weights as files or byte ranges.

A folder on this machine is used as it is. Of a repository on the hub, config and tokenizer are
downloaded; the weights are downloaded into the hub's cache, or, if several processes share them,
each reads the byte ranges of its own shards. A folder in a bucket is read by ranges, only its small
files are copied.
"""

import atexit
import dataclasses
import functools
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping

from jaxrl_llm.storage import bucket, hub
from jaxrl_llm.storage.address import BucketAddress, HubAddress, LocalAddress, parse_address

PathLike = str | os.PathLike[str]

# Files of a model folder besides the weights; all others are neither downloaded nor read.
_SMALL_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_SMALL_FOLDERS = ("additional_chat_templates",)


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file in a repository of the hub or in a bucket, read by byte ranges."""

    folder: HubAddress | BucketAddress
    name: str  # within the folder
    num_bytes: int

    def read(self, begin: int, end: int) -> bytes:
        """The bytes [begin, end); raises HubError or BucketError."""
        if isinstance(self.folder, HubAddress):
            path = f"{self.folder.path}/{self.name}".lstrip("/")
            return hub.read_range(self.folder, path, begin, end)
        return bucket.read_range(self.folder, self.name, begin, end)

    def __str__(self) -> str:
        return f"{location_name(self.folder.text)}/{self.name}"


WeightFile = pathlib.Path | RemoteFile


@dataclasses.dataclass(frozen=True)
class _RemoteFolder:
    """A model folder that is not on this machine."""

    address: HubAddress | BucketAddress  # with its commit
    sizes: Mapping[str, int]  # bytes of its files by their path in the folder

    @functools.cached_property
    def small_files(self) -> pathlib.Path:
        """A local folder with config, tokenizer and the other small files."""
        names = [name for name in self.sizes if _is_small(name)]
        if isinstance(self.address, HubAddress):
            return self.download(names)
        # Removed when the process ends: the next one has to see what is in the bucket then.
        folder = tempfile.TemporaryDirectory(prefix="jaxrl_llm_model_")
        atexit.register(folder.cleanup)
        for name in names:
            path = pathlib.Path(folder.name) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bucket.read_range(self.address, name, 0, self.sizes[name]))
        return pathlib.Path(folder.name)

    def download(self, names: Iterable[str]) -> pathlib.Path:
        assert isinstance(self.address, HubAddress)
        below = self.address.path
        paths = [f"{below}/{name}" if below else name for name in names]
        return hub.download(self.address, paths) / below

    @functools.cached_property
    def cached(self) -> pathlib.Path | None:
        """The folder in the hub's cache, if there is one; it may lack files."""
        if not isinstance(self.address, HubAddress):
            return None
        folder = hub.cached_folder(self.address)
        return None if folder is None else folder / self.address.path


@functools.cache
def _open_remote(text: str) -> _RemoteFolder:
    """A folder is listed once in a process, so that all of a model is of one commit."""
    address = parse_address(text, "model")
    if isinstance(address, HubAddress):
        address = hub.resolve_commit(address)
        skipped = len(address.path) + 1 if address.path else 0
        files = {file.path[skipped:]: file.num_bytes for file in hub.list_files(address)}
        return _RemoteFolder(address, files)
    assert isinstance(address, BucketAddress)
    return _RemoteFolder(address, bucket.list_files(address))


def forget_folders() -> None:
    """Lists folders again when they are used next."""
    _open_remote.cache_clear()


def _is_small(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder in ("", *_SMALL_FOLDERS) and file.endswith(_SMALL_SUFFIXES)


def _local_path(path: PathLike) -> pathlib.Path | None:
    if not isinstance(path, str):
        return pathlib.Path(path)
    address = parse_address(path, "model")
    return pathlib.Path(address.path) if isinstance(address, LocalAddress) else None


def local_folder(path: PathLike) -> pathlib.Path:
    """A folder on this machine with the files of a model but its weights.

    A local folder is returned as it is, whether it exists or not.

    Raises:
      AddressError, HubError, BucketError: If the address is not valid, or cannot be read.
    """
    return _local_path(path) or _open_remote(str(path)).small_files


def may_exist(path: PathLike) -> bool:
    """Whether a model folder is on this machine, or is elsewhere; raises AddressError."""
    local = _local_path(path)
    return local is None or local.is_dir()


def file_names(path: PathLike) -> frozenset[str]:
    """The names of the files directly in a model folder, weights included; raises as above."""
    local = _local_path(path)
    if local is not None:
        return frozenset(os.listdir(local)) if local.is_dir() else frozenset()
    return frozenset(name for name in _open_remote(str(path)).sizes if "/" not in name)


def weight_files(
    path: PathLike, names: Iterable[str], by_ranges: bool = False
) -> dict[str, WeightFile]:
    """The files of some weights by name.

    Args:
      path: A model folder, by any address; `names` are of files in it.
      by_ranges: Whether weights on the hub are read by ranges, because this process needs a part
        of them, instead of downloaded; what the cache has is read from there.

    Raises:
      AddressError, HubError, BucketError: As `local_folder`.
    """
    names, local = list(names), _local_path(path)
    if local is None:
        folder = _open_remote(str(path))
        cached = folder.cached
        if cached is not None and all((cached / name).is_file() for name in names):
            local = cached
        elif isinstance(folder.address, BucketAddress) or (by_ranges and not hub.is_offline()):
            return {name: RemoteFile(folder.address, name, folder.sizes[name]) for name in names}
        else:
            local = folder.download(names)
    return {name: local / name for name in names}


def offline_hint(path: PathLike) -> str:
    """The reason why files of a folder may seem missing; "" for none."""
    if _local_path(path) is None and hub.is_offline():
        return "; the cache lacks files, and HF_HUB_OFFLINE is set: unset it"
    return ""


def local_file(path: str) -> pathlib.Path:
    """One file on this machine: a local one, or a copy of one on the hub or in a bucket.

    Raises:
      AddressError, HubError, BucketError: If the address is not valid, or cannot be read.
    """
    address = parse_address(path)
    if isinstance(address, LocalAddress):
        return pathlib.Path(address.path)
    if isinstance(address, HubAddress):
        return hub.download(address, [address.path]) / address.path
    folder = tempfile.TemporaryDirectory(prefix="jaxrl_llm_file_")
    atexit.register(folder.cleanup)
    return bucket.copy_file(address, pathlib.Path(folder.name))


def location_name(path: PathLike) -> str:
    """A model's address for messages and captions: a local path as it is, "org/name" of a hub."""
    if not isinstance(path, str):
        return os.fspath(path)
    address = parse_address(path, "model")
    return address.name if isinstance(address, HubAddress) else address.text


def model_name(path: str) -> str:
    """The name of a model: the last part of its folder, or the name of its repository."""
    address = parse_address(path, "model")
    if isinstance(address, LocalAddress):
        return pathlib.Path(address.path).resolve().name
    if isinstance(address, HubAddress):
        return (address.path or address.repo).rpartition("/")[2]
    return address.path.rpartition("/")[2]
