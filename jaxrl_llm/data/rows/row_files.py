"""Files of rows: which ones an address names, their formats, and reading compressed ones.

Files of the hub are downloaded into the cache of `huggingface_hub`; those in buckets, and all
others that fsspec knows, are read where they are, by ranges.
"""

import contextlib
import difflib
import glob
import io
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

import fsspec
import pyarrow
from pyarrow import parquet

from jaxrl_llm.config.datasets.slices import split_slice
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.rows import hub_datasets
from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import files, hub
from jaxrl_llm.storage.address import BucketAddress, HubAddress, LocalAddress, parse_address

SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
CODECS = {".gz": "gzip", ".zst": "zstd"}  # of all but parquet, which compresses by itself
# How names of files of rows end.
_ENDS = (*SUFFIXES, *(f"{suffix}{codec}" for suffix in SUFFIXES[:-1] for codec in CODECS))


class FileFormat(NamedTuple):
    """The format of a file by its name."""

    suffix: str  # of SUFFIXES
    codec: str  # of CODECS, "" for a file that is not compressed


def file_format(path: str) -> FileFormat:
    """The format of a file of rows by its suffixes, in any case.

    >>> file_format("a/rows.JSONL.gz")
    FileFormat(suffix='.jsonl', codec='gzip')

    Raises:
      DataError: If it is none of SUFFIXES.
    """
    name = re.sub("#[0-9a-f]{40}$", "", path)  # a commit of the hub
    suffixes = [suffix.lower() for suffix in pathlib.PurePosixPath(name).suffixes]
    codec = CODECS.get(suffixes[-1], "") if suffixes else ""
    suffix = "".join(suffixes[-2:-1] if codec else suffixes[-1:])
    if suffix in SUFFIXES and not (codec and suffix == ".parquet"):
        return FileFormat(suffix, codec)
    known = f"{', '.join(SUFFIXES)}, all but the last also as {' or '.join(CODECS)}"
    whole = "".join(suffixes[-2:]) if codec else suffix
    raise DataError(f"{path}: unsupported suffix {whole!r}; known: {known}")


def is_row_file(path: str) -> bool:
    """Whether a file has the name of a file of rows."""
    try:
        return bool(file_format(path))
    except DataError:
        return False


def listed_files(address: str) -> list[str]:
    """The files of a path, a folder (recursively) or a glob, those of the last two by name.

    In folders and globs, files with other suffixes are passed over. A path that exists is itself,
    whatever characters it holds. Others may be on the hub (`hf://datasets/org/name/file`,
    `org/name:config:split`, see `hub_datasets`), in a bucket or elsewhere that fsspec reads.

    Raises:
      DataError: If there are none, with the nearest names.
      UserError: If the address is none, or the hub or the bucket cannot be read.
    """
    if not os.path.exists(address):
        if data := hub_datasets.parse_data(address, _is_path(address)):
            return hub_datasets.dataset_files(data, _ENDS)
        location = parse_address(address)
        if isinstance(location, BucketAddress):
            return _bucket_files(location)
        address = location.path if isinstance(location, LocalAddress) else address
    return _local_files(address)


def _is_path(address: str) -> bool:
    """Whether an address without a scheme is a path, by its end or as a glob."""
    return is_row_file(address) or glob.has_magic(address)


def pinned_entry(entry: str, saved: tuple[str, ...] = ()) -> str:
    """An entry of `train_files` that names a commit if it is on the hub.

    That is the commit of an equal entry in `saved`, the entries of the run to be resumed, or else
    the newest one.

    Raises:
      UserError: If the address is none, or the hub cannot be read.
    """
    address = split_slice(entry)[0]
    if os.path.exists(address):
        return entry
    return hub_datasets.pinned_entry(entry, _is_path(address), saved)


def _bucket_files(address: BucketAddress) -> list[str]:
    """The files of rows at an address that fsspec reads: a file, all below a folder, or a glob."""
    with _remote_errors(address.text):
        system = _file_system(address)
        path = system._strip_protocol(address.text)
        if glob.has_magic(address.path):
            names = system.glob(path)
        elif system.isfile(path):
            file_format(path)
            names = [path]
        else:
            names = system.find(path)
    names = sorted(name for name in names if is_row_file(name))
    if not names:
        known = ", ".join(SUFFIXES)
        raise DataError(f"{address.text}: no files with rows at this address; known: {known}")
    if address.protocol in ("http", "https"):  # names are whole addresses
        return names
    return [f"{address.protocol}://{name.lstrip('/')}" for name in names]


def _file_system(address: BucketAddress) -> Any:
    if address.protocol in files.STORES:
        return files.file_system(address.text)
    return fsspec.filesystem(address.protocol)


def _local_files(address: str) -> list[str]:
    path = pathlib.Path(address)
    below: Iterable[pathlib.Path]
    if path.is_dir():
        below, place = path.rglob("*"), "in this folder"
    elif path.is_file() or not glob.has_magic(address):
        file_format(address)
        if not path.is_file():
            raise DataError(f"{address}: no such file; {_near_files(path)}")
        return [address]
    else:
        below = map(pathlib.Path, glob.iglob(address, recursive=True))
        place = "match this pattern"
    paths = [str(each) for each in sorted(below) if is_row_file(str(each)) and each.is_file()]
    if not paths:
        known = ", ".join(SUFFIXES)
        raise DataError(f"{address}: no files with rows {place}; known: {known}")
    return paths


def _near_files(path: pathlib.Path) -> str:
    remedy = f"give a path from {pathlib.Path.cwd()}, or a whole one"
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {str(path.with_name(near[0]))!r}?" if near else remedy


@contextlib.contextmanager
def open_file(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading, without its compression; a compressed one cannot seek."""
    codec = file_format(path).codec
    with _remote_errors(path), _binary_file(path) as file:
        if not codec:
            yield file
            return
        with pyarrow.CompressedInputStream(file, codec) as stream:
            yield io.BufferedReader(stream)


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[parquet.ParquetFile]:
    """Opens a parquet file; of one in a bucket only the parts that are asked for are read."""
    with _remote_errors(path), _binary_file(path) as file:
        # By its name Arrow reads a local file without Python.
        source = file.name if isinstance(file, io.BufferedReader) else file
        with parquet.ParquetFile(source) as table:
            yield table


def _binary_file(path: str) -> Any:
    """The file behind an address, which may seek."""
    location = LocalAddress(path) if os.path.exists(path) else parse_address(path)
    if isinstance(location, BucketAddress):
        return _file_system(location).open(location.text, "rb")
    if isinstance(location, HubAddress):
        path = str(hub.download(location, [location.path]) / location.path)
    return open(path, "rb")


@contextlib.contextmanager
def _remote_errors(where: str) -> Iterator[None]:
    """Converts the many kinds of errors of fsspec's stores to DataErrors."""
    try:
        yield
    except (UserError, pyarrow.ArrowException):
        raise
    except ImportError as error:
        raise DataError(
            f"{where}: needs a package that is missing ({error}); install it, or use local files"
        ) from error
    except FileNotFoundError as error:
        raise DataError(f"{where}: no such file or folder; check the address") from error
    except Exception as error:
        if "://" not in where:
            raise
        raise DataError(
            f"{where}: cannot be read ({type(error).__name__}: {error}); check the network, the"
            " credentials and the permissions"
        ) from error


@contextlib.contextmanager
def read_errors(where: str) -> Iterator[None]:
    """Converts I/O and Arrow errors to DataErrors that begin with `where`."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{where}: cannot be read: {error}; is the file complete? Save it again"
        ) from error
