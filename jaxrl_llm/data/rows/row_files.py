"""Files of rows: which ones an address names, their formats, and reading compressed ones."""

import contextlib
import difflib
import glob
import io
import pathlib
from collections.abc import Iterator
from typing import IO, NamedTuple

import pyarrow

from jaxrl_llm.data.errors import DataError

SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
CODECS = {".gz": "gzip", ".zst": "zstd"}  # of all but parquet, which compresses by itself


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
    suffixes = [suffix.lower() for suffix in pathlib.PurePath(path).suffixes]
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
    whatever characters it holds.

    Raises:
      DataError: If there are none, with the nearest names.
    """
    path = pathlib.Path(address)
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
    files = [str(each) for each in sorted(below) if is_row_file(str(each)) and each.is_file()]
    if not files:
        known = ", ".join(SUFFIXES)
        raise DataError(f"{address}: no files with rows {place}; known: {known}")
    return files


def _near_files(path: pathlib.Path) -> str:
    remedy = f"give a path from {pathlib.Path.cwd()}, or a whole one"
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {str(path.with_name(near[0]))!r}?" if near else remedy


@contextlib.contextmanager
def open_file(path: str) -> Iterator[IO[bytes]]:
    """Opens a file for reading, without its compression; a compressed one cannot seek."""
    codec = file_format(path).codec
    with open(path, "rb") as file:
        if not codec:
            yield file
            return
        with pyarrow.CompressedInputStream(file, codec) as stream:
            yield io.BufferedReader(stream)


@contextlib.contextmanager
def read_errors(where: str) -> Iterator[None]:
    """Converts I/O and Arrow errors to DataErrors that begin with `where`."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{where}: cannot be read: {error}; is the file complete? Save it again"
        ) from error
