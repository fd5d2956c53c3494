"""The files of a run, in a local folder or in a bucket (`gs://`, `s3://`).

A bucket has objects instead of files: each is written whole or not at all, replaced atomically, and
neither renamed nor appended to. All functions here take both kinds of paths. Requests to a bucket
that fail are repeated with growing, random pauses, and then raise `StorageError`.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import pathlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import fsspec
from absl import logging

from jaxrl_llm.errors import EXIT_FAILED, ConfigError, UserError

PathLike = str | os.PathLike[str]
Result = TypeVar("Result")

MAX_TRIES = 8  # of a request; a client library tries several times in each of them
MAX_RETRY_S = 120.0  # no try begins later
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 10.0


class _Store(NamedTuple):
    """The packages and options of a kind of bucket."""

    package: str  # its fsspec file system
    extra: str  # of this package, which installs it
    options: Mapping[str, Any]  # defaults of the file system; a user's fsspec config has precedence


# A cached listing would hide what another host has written.
STORES = {
    "gs": _Store("gcsfs", "gcs", {"use_listings_cache": False}),
    "s3": _Store(
        "s3fs",
        "s3",
        {
            "use_listings_cache": False,
            "config_kwargs": {
                "retries": {"mode": "standard", "max_attempts": 8},
                "connect_timeout": 10,
                "read_timeout": 60,
            },
        },
    ),
}


class StorageError(UserError, OSError):
    """A bucket cannot be read or written: address, cause and remedy."""

    exit_code = EXIT_FAILED

    def __str__(self) -> str:  # OSError would show its arguments as a tuple
        return str(self.args[0])


class ObjectInfo(NamedTuple):
    """A file below a folder."""

    num_bytes: int
    checksum: str  # of the content, by the store; "" for local files


def in_bucket(path: PathLike) -> bool:
    """Whether a path is an address in a bucket.

    >>> in_bucket("s3://bucket/run"), in_bucket("runs/a")
    (True, False)
    """
    return "://" in os.fspath(path)


def run_path(workdir: PathLike) -> pathlib.Path:
    """The path of a run's folder; in a bucket an `epath.Path`, which has the same operators.

    Raises:
      ConfigError: If the kind of bucket is not known, or its package is not installed.
    """
    address = os.fspath(workdir)
    if not in_bucket(address):
        return pathlib.Path(address)
    scheme, _, rest = address.partition("://")
    if scheme not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise ConfigError(f"{address}: {scheme}:// cannot hold a run; use {known}")
    if not rest.strip("/") or rest.startswith("/"):
        raise ConfigError(f"{address}: names no bucket; write {scheme}://BUCKET/FOLDER")
    _connect(scheme)
    from etils import epath  # the command line imports this module, and needs no bucket

    return epath.Path(f"{scheme}://{rest.rstrip('/')}")


def absolute(path: pathlib.Path) -> pathlib.Path:
    """The path from the root; an address in a bucket is one."""
    return path if in_bucket(path) else path.absolute()


def folder_name(workdir: PathLike) -> str:
    """The name of a run's folder."""
    path = run_path(workdir)
    return path.name if in_bucket(path) else path.resolve().name


@functools.cache
def _connect(scheme: str) -> None:
    """Checks the package of a kind of bucket and sets its defaults, before its first use."""
    store = STORES[scheme]
    if scheme == "gs" and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
        # Asks for properties of the bucket by gRPC, which emulators do not speak.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    os.environ.setdefault("EPATH_USE_TF", "false")  # else TensorFlow reads, if it is installed
    try:
        importlib.import_module(store.package)
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs the package {store.package} ({error});"
            f" pip install 'jaxrl_llm[{store.extra}]', or use a local folder"
        ) from error
    settings = fsspec.config.conf
    settings[scheme] = {**store.options, **settings.get(scheme, {})}


def file_system(path: PathLike) -> Any:
    """The fsspec file system of a bucket."""
    scheme = os.fspath(path).partition("://")[0]
    _connect(scheme)
    return fsspec.filesystem(scheme)


def request(path: PathLike, action: str, send: Callable[[], Result]) -> Result:
    """The result of a request, repeated while it fails; `action` is for the message: "read".

    Raises:
      FileNotFoundError: If there is no such object.
      StorageError: If all tries failed.
    """
    begin = time.monotonic()
    for number in range(1, MAX_TRIES + 1):
        try:
            return send()
        except FileNotFoundError:
            raise
        except Exception as error:
            # Permissions come back seldom, but credentials that expire are renewed.
            max_tries = 3 if isinstance(error, PermissionError) else MAX_TRIES
            elapsed_s = time.monotonic() - begin
            if number >= max_tries or elapsed_s > MAX_RETRY_S:
                raise StorageError(
                    f"{os.fspath(path)}: could not be {action}, {number} tries in"
                    f" {elapsed_s:.0f} s ({type(error).__name__}: {error}); check"
                    " the network, the credentials and the permissions of the bucket, then start"
                    " again with the same --workdir"
                ) from error
            pause_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**number) * random.uniform(0.5, 1.0)
            logging.info("%s: %s fails (%s), again in %.1f s", path, action, error, pause_s)
            time.sleep(pause_s)
    raise AssertionError


def exists(path: pathlib.Path) -> bool:
    """Whether there is a file, or a folder with files."""
    if not in_bucket(path):
        return path.exists()
    return bool(_object_type(path))


def is_file(path: pathlib.Path) -> bool:
    """Whether there is a file."""
    if not in_bucket(path):
        return path.is_file()
    return _object_type(path) == "file"


def _object_type(path: pathlib.Path) -> str:
    """ "file", "directory" or ""; fsspec's `exists` takes a failing store for a missing file."""
    try:
        return request(path, "read", lambda: file_system(path).info(os.fspath(path))["type"])
    except FileNotFoundError:
        return ""


def read_bytes(path: pathlib.Path, start: int = 0) -> bytes:
    """The content of a file from byte `start` on; raises FileNotFoundError or another OSError."""
    if in_bucket(path):
        return request(
            path,
            "read",
            lambda: file_system(path).cat_file(os.fspath(path), start=start or None),
        )
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def read_text(path: pathlib.Path) -> str:
    """The content of a file in UTF-8."""
    return read_bytes(path).decode("utf-8")


@contextlib.contextmanager
def naming_file(path: pathlib.Path) -> Iterator[None]:
    """Adds `path` to an OSError raised inside; a failed write alone names no file."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes `path` atomically: a reader sees the old or the new file, never a part of it."""
    replace_bytes(path, text.encode("utf-8", errors="replace"))  # lone surrogates: "?"


def replace_bytes(path: pathlib.Path, content: bytes) -> None:
    """Writes `path` atomically, as `replace_text` does."""
    if in_bucket(path):
        try:
            request(path, "written", lambda: file_system(path).pipe_file(os.fspath(path), content))
        except FileNotFoundError as error:
            raise StorageError(f"{path}: could not be written: no such bucket ({error})") from error
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.tmp")  # one process writes; a kill leaves one at most
    try:
        with naming_file(path):
            partial.write_bytes(content)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def names(folder: pathlib.Path) -> list[str]:
    """The sorted names of files and folders directly in a folder; none if it is missing."""
    if not in_bucket(folder):
        return sorted(os.listdir(folder)) if folder.is_dir() else []
    return sorted(_entries(folder))


def sizes(folder: pathlib.Path) -> dict[str, int]:
    """Name and bytes of the files directly in a folder in a bucket."""
    return {
        name: entry["size"] for name, entry in _entries(folder).items() if entry["type"] == "file"
    }


def _entries(folder: pathlib.Path) -> dict[str, Mapping[str, Any]]:
    """The entries that fsspec lists directly in a folder in a bucket, by name."""
    address = os.fspath(folder)
    try:
        entries = request(folder, "listed", lambda: file_system(folder).ls(address, detail=True))
    except FileNotFoundError:
        return {}
    prefix = address.partition("://")[2] + "/"
    names = ((entry["name"].rstrip("/").removeprefix(prefix), entry) for entry in entries)
    return {name: entry for name, entry in names if name and "/" not in name}


def files_below(folder: pathlib.Path) -> dict[str, ObjectInfo]:
    """All files below a folder, by their path relative to it."""
    if not in_bucket(folder):
        root = pathlib.Path(folder)  # an `epath.Path` has no `rglob`
        paths = [path for path in root.rglob("*") if path.is_file()]
        return {
            path.relative_to(root).as_posix(): ObjectInfo(path.stat().st_size, "") for path in paths
        }
    address = os.fspath(folder)
    entries = request(folder, "listed", lambda: file_system(folder).find(address, detail=True))
    prefix = address.partition("://")[2] + "/"
    return {
        name.removeprefix(prefix): ObjectInfo(info["size"], _checksum(info))
        for name, info in entries.items()
        if name.startswith(prefix) and info["type"] == "file"
    }


def _checksum(info: Mapping[str, Any]) -> str:
    return str(info.get("crc32c") or info.get("md5Hash") or info.get("ETag") or "").strip('"')


def remove(path: pathlib.Path) -> None:
    """Removes a file, if there is one."""
    if not in_bucket(path):
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):
        request(path, "removed", lambda: file_system(path).rm_file(os.fspath(path)))


def remove_tree(folder: pathlib.Path) -> None:
    """Removes a folder with all below, if there is one."""
    if not in_bucket(folder):
        shutil.rmtree(folder, ignore_errors=not folder.exists())
        return
    with contextlib.suppress(FileNotFoundError):
        request(
            folder, "removed", lambda: file_system(folder).rm(os.fspath(folder), recursive=True)
        )


def sha256(path: pathlib.Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    if in_bucket(path):
        return hashlib.sha256(read_bytes(path)).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
