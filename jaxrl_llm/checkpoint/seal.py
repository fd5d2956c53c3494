"""The checksums of a complete folder, which find damage done to it later.

They are written before the folder gets its name: a folder that can be seen is complete and sealed.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import pathlib
import threading
from collections.abc import Iterable
from concurrent import futures

import orbax.checkpoint as ocp
from etils import epath

from jaxrl_llm.config.folder import SEAL  # within the folder: {file: digest} of all the others

_EARLY_BYTES = 1 << 20  # arrays; Orbax may write its smaller files twice
_LOOK_S = 1.0
_UNNAMED = ocp.path.atomicity.TMP_DIR_SUFFIX
_POOL = futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1), "seal")

File = tuple[str, pathlib.Path, int, float]  # name in the folder, path, size, last change


class SealedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A folder that Orbax writes: complete and sealed under another name, then renamed."""

    _digests: "Digests | None" = None

    async def create(self) -> epath.Path:
        """Makes the folder; its large files are hashed as soon as each is written."""
        folder = await super().create()
        if not self._is_part():
            self._digests = Digests(folder)
            self._digests.watch()
        return folder

    async def finalize(self) -> None:
        """Seals the folder and renames it; a folder inside of it is only renamed."""
        if self._is_part():
            return await super().finalize()
        final = self.get_final()
        digests = self._digests or Digests(self.get())
        await asyncio.to_thread(digests.complete)
        sealed = self.get().with_name(f"{self.get().name}.sealed")
        sealed.rmtree(missing_ok=True)  # of a process that was killed
        # Orbax writes files of its own until it renames the folder: here to `sealed`.
        self._final_path = sealed
        await super().finalize()
        await asyncio.to_thread(write, sealed, digests)
        sealed.rename(final)
        self._final_path = final

    def _is_part(self) -> bool:
        return _UNNAMED in self.get_final().parent.name


class Digests:
    """Hashes several files of a folder at one time, the large ones while others are written."""

    def __init__(self, folder: epath.Path):
        self._folder = folder
        # By name: the file when its hashing began, and its digest.
        self._found: dict[str, tuple[File, futures.Future[str]]] = {}
        self._complete = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def watch(self) -> None:
        """Hashes large files once they stop growing, until `complete` or the folder is gone."""
        self._watch.start()

    def _look(self) -> None:
        before: set[File] = set()
        while not self._complete.wait(_LOOK_S) and self._folder.exists():
            with contextlib.suppress(OSError):  # a file or the folder was renamed meanwhile
                now = self._files(_EARLY_BYTES)
                self._begin(now & before)
                before = now

    def complete(self) -> None:
        """Returns when all large files are hashed; the folder may be renamed after that."""
        self._complete.set()
        if self._watch.is_alive():
            self._watch.join()
        self._begin(self._files(_EARLY_BYTES))
        futures.wait([digest for _, digest in self._found.values()])

    def of(self, folder: epath.Path) -> dict[str, str]:
        """Returns {file: digest} of the complete folder, under the name that it has now."""
        self._folder = folder
        files = self._files(0)
        self._begin(files)
        return {name: self._found[name][1].result() for name, *_ in sorted(files)}

    def _files(self, min_bytes: int) -> set[File]:
        found = set()
        for path in pathlib.Path(self._folder).rglob("*"):
            # Folders inside have other names, too, while they are written.
            name = os.path.relpath(path, self._folder).replace(_UNNAMED, "")
            stat = path.stat()
            if path.is_file() and name != SEAL and stat.st_size >= min_bytes:
                found.add((name, path, stat.st_size, stat.st_mtime))
        return found

    def _begin(self, files: Iterable[File]) -> None:
        """Hashes the files that were not hashed, or have changed since."""
        for file in files:
            name, path, *_ = file
            before, digest = self._found.get(name, (None, None))
            failed = digest and digest.done() and digest.exception()  # it was renamed
            if before is None or before[2:] != file[2:] or failed:
                self._found[name] = file, _POOL.submit(_digest, path)


def _digest(path: os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: epath.Path, digests: Digests) -> None:
    """Writes the digests of all files of a complete folder into it."""
    (folder / SEAL).write_text(json.dumps(digests.of(folder), indent=1))


def damage(folder: epath.Path) -> str:
    """Returns what is wrong with the files of a sealed folder; "" if nothing."""
    try:
        digests = json.loads((folder / SEAL).read_text())
    except FileNotFoundError:
        return f"{SEAL} is missing"
    except ValueError as error:
        return f"{SEAL} is not JSON ({error})"
    found = {name: _POOL.submit(_digest, folder / name) for name in digests}
    for name, digest in digests.items():
        try:
            if found[name].result() != digest:
                length = (folder / name).stat().length
                return f"{name} differs from its checksum ({length} bytes now)"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return ""
