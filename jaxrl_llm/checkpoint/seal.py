"""The checksums of a folder that is complete, so that damage done to it later is found.

They are written before the folder gets its name: what can be seen is whole and sealed.
"""

import asyncio
import hashlib
import json
import os

import orbax.checkpoint as ocp
from etils import epath

SEAL = "sha256.json"  # within the folder: {file: digest} of all the others
_READ_BYTES = 1 << 24


class SealedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A folder that Orbax writes: complete and sealed under another name, then renamed."""

    async def finalize(self) -> None:
        """Seals the folder and gives it its name; a part of such a folder only its name."""
        final = self.get_final()
        if ocp.path.atomicity.TMP_DIR_SUFFIX in final.parent.name:
            return await super().finalize()
        sealed = self.get().with_name(f"{self.get().name}.sealed")
        sealed.rmtree(missing_ok=True)  # of a process that was killed
        # Orbax writes files of its own up to its renaming; that one leads to `sealed`.
        self._final_path = sealed
        await super().finalize()
        await asyncio.to_thread(write, sealed)
        sealed.rename(final)
        self._final_path = final


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
    """Writes the digests of all files of a complete folder into it, but for their own."""
    files = (path for path in _files(folder) if path != folder / SEAL)
    digests = {os.path.relpath(path, folder): _digest(path) for path in files}
    (folder / SEAL).write_text(json.dumps(digests, indent=1))


def damage(folder: epath.Path) -> str:
    """Returns what is wrong with the files of a sealed folder; "" if nothing."""
    try:
        digests = json.loads((folder / SEAL).read_text())
    except FileNotFoundError:
        return f"{SEAL} is missing"
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
