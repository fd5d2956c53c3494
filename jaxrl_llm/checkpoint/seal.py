"""The checksums of a complete folder, which find damage done to it later.

They are written before the folder gets its name: what can be seen is whole and sealed.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from concurrent import futures

import orbax.checkpoint as ocp
from etils import epath

SEAL = "sha256.json"  # within the folder: {file: digest} of all the others
_READ_BYTES = 1 << 24
_EARLY_BYTES = 1 << 20  # arrays; Orbax may write its smaller files twice
_LOOK_S = 1.0
_UNNAMED = ocp.path.atomicity.TMP_DIR_SUFFIX
_POOL = futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1), "seal")

State = tuple[int, int]  # size, time of the last change


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
        """Seals the folder and gives it its name; a part of such a folder only its name."""
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
        """Hashes nothing yet."""
        self._folder = folder
        self._found: dict[str, tuple[State, futures.Future[str]]] = {}
        self._complete = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def watch(self) -> None:
        """Hashes large files once they stop growing, until `complete` or the folder is gone."""
        self._watch.start()

    def _look(self) -> None:
        before: dict[str, tuple[epath.Path, State]] = {}
        while not self._complete.wait(_LOOK_S) and self._folder.exists():
            with contextlib.suppress(OSError):  # a file or the folder was renamed meanwhile
                now = self._files(_EARLY_BYTES)
                self._begin(dict(now.items() & before.items()))
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
        return {name: self._found[name][1].result() for name in files}

    def _files(self, min_bytes: int) -> dict[str, tuple[epath.Path, State]]:
        found = {}
        for path in _files(self._folder):
            # Parts of the folder, too, have other names while they are written.
            name = os.path.relpath(path, self._folder).replace(_UNNAMED, "")
            if name != SEAL and (stat := path.stat()).length >= min_bytes:
                found[name] = path, (stat.length, stat.mtime)
        return found

    def _begin(self, files: Mapping[str, tuple[epath.Path, State]]) -> None:
        """Hashes files, but for those that were hashed and have not changed since."""
        for name, (path, state) in files.items():
            before, digest = self._found.get(name, (None, None))
            failed = digest and digest.done() and digest.exception()  # it was renamed
            if before != state or failed:
                self._found[name] = state, _POOL.submit(_digest, path)


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
