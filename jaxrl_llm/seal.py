"""The checksums of a folder that is complete, so that damage done to it later is found.

What a folder holds and when it is complete is known to who writes it.
"""

import hashlib
import json
import os

from absl import logging
from etils import epath

SEAL = "sha256.json"  # within the folder: {file: digest} of all the others
_READ_BYTES = 1 << 24


def _files(folder: epath.Path) -> list[epath.Path]:
    found = []
    for path in sorted(folder.iterdir()):
        found.extend(_files(path) if path.is_dir() else [path])
    return found


def _digest(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def write(folder: epath.Path) -> None:
    """Writes the digests of all files of a complete step into it."""
    partial = folder / f"{SEAL}.tmp"
    digests = {
        os.path.relpath(path, folder): _digest(path)
        for path in _files(folder)
        if path.name not in (SEAL, partial.name)
    }
    partial.write_text(json.dumps(digests, indent=1))
    partial.rename(folder / SEAL)


def damage(folder: epath.Path) -> str:
    """Returns what is wrong with the files of a complete step; "" if nothing."""
    try:
        digests = json.loads((folder / SEAL).read_text())
    except FileNotFoundError:
        logging.warning(
            "%s: complete, but the process ended before its checksums were written;"
            " restored without them",
            folder,
        )
        return ""
    except ValueError as error:
        return f"{SEAL} is not JSON ({error})"
    for name, digest in digests.items():
        path = folder / name
        try:
            if _digest(path) != digest:
                return f"{name} differs from its checksum ({path.stat().length} bytes now)"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return ""
