"""Files in buckets and other stores that fsspec knows, read by byte ranges."""

import logging
import pathlib
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import files
from jaxrl_llm.storage.address import BucketAddress

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Seconds before each further attempt of a request, after those of the store's own library.
RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_COPY_BYTES = 1 << 26  # of one request while a file is copied


class BucketError(UserError):
    """A folder or file in a bucket that cannot be read, with the remedy."""


def list_files(address: BucketAddress) -> dict[str, int]:
    """Bytes of all files below a folder, by their path in it.

    Raises:
      BucketError: If there is no such folder, or it cannot be read.
    """
    system = file_system(address)
    root = system._strip_protocol(address.text).rstrip("/")
    # `find` of a web server would follow all links.
    entries = _retried(address, lambda: system.find(root, maxdepth=2, detail=True))
    sizes = {name.removeprefix(root).lstrip("/"): info["size"] for name, info in entries.items()}
    sizes.pop("", None)
    if not sizes:
        raise BucketError(f"{address.text}: no such folder, or it is empty; check the address")
    return sizes


def read_range(address: BucketAddress, name: str, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a file in a folder, by one request.

    Raises:
      BucketError: If the file is missing, shorter, or cannot be read.
    """
    if end <= begin:
        return b""
    path = f"{address.text}/{name}" if name else address.text
    system = file_system(address)
    data = _retried(address, lambda: system.cat_file(path, start=begin, end=end), name)
    if len(data) != end - begin:
        raise BucketError(
            f"{path}: {len(data)} bytes came for the range {begin} to {end}; the file is cut short,"
            " or was replaced while it was read: start again"
        )
    return data


def copy_file(address: BucketAddress, folder: pathlib.Path) -> pathlib.Path:
    """Copies a file into a local folder; raises BucketError."""
    system = file_system(address)
    num_bytes = _retried(address, lambda: system.info(address.text))["size"]
    target = folder / address.path.rpartition("/")[2]
    with target.open("wb") as file:
        for begin in range(0, num_bytes, _COPY_BYTES):
            file.write(read_range(address, "", begin, min(begin + _COPY_BYTES, num_bytes)))
    return target


def file_system(address: BucketAddress) -> Any:
    """The file system of an address; raises ConfigError if its package is missing."""
    try:
        if address.protocol in files.STORES:
            return files.file_system(address.text)
        return fsspec.filesystem(address.protocol)
    except ImportError as error:
        raise BucketError(
            f"{address.text}: {address.protocol}:// needs a package that is missing ({error});"
            " install it, or use a local folder"
        ) from error
    except UserError:
        raise
    except Exception as error:  # each store has errors of its own, for credentials among others
        raise BucketError(f"{address.text}: {type(error).__name__}: {error}") from error


def _retried(address: BucketAddress, request: Callable[[], T], name: str = "") -> T:
    """The result of a request that is repeated while the store fails."""
    path = f"{address.text}/{name}".rstrip("/")
    for attempt in range(len(RETRY_DELAYS_S) + 1):
        try:
            return request()
        except FileNotFoundError as error:
            raise BucketError(f"{path}: no such file or folder; check the address") from error
        except Exception as error:
            if attempt == len(RETRY_DELAYS_S) or isinstance(error, PermissionError):
                raise BucketError(
                    f"{path}: cannot be read after {attempt + 1} attempts ({type(error).__name__}:"
                    f" {error}); check the network, the credentials and the rights of the bucket"
                ) from error
            delay = RETRY_DELAYS_S[attempt] * random.uniform(0.75, 1.25)
            logger.warning(
                "%s: %s: %s; tries again in %.1f s", path, type(error).__name__, error, delay
            )
            time.sleep(delay)
    raise AssertionError
