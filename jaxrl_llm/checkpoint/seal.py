"""Checksums of a complete checkpoint folder, to detect later damage.

They are written before the folder gets its final name: a visible folder is complete and sealed.
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

from jaxrl_llm.config.workdir import SEAL_FILE

_EARLY_BYTES = 1 << 20  # array files; Orbax may write smaller files twice
_POLL_S = 1.0
_TMP_SUFFIX = ocp.path.atomicity.TMP_DIR_SUFFIX
_POOL = futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1), "seal")

FileState = tuple[str, pathlib.Path, int, float]  # name in the folder, path, size, mtime


class SealedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """An Orbax folder that is completed and sealed under a temporary name, then renamed."""

    _digests: "FolderDigests | None" = None

    async def create(self) -> epath.Path:
        """Creates the folder and starts hashing its large files as they are written."""
        folder = await super().create()
        if not self._is_subfolder():
            self._digests = FolderDigests(folder)
            self._digests.watch()
        return folder

    async def finalize(self) -> None:
        """Seals the folder and renames it; a subfolder is only renamed."""
        if self._is_subfolder():
            return await super().finalize()
        final = self.get_final()
        digests = self._digests or FolderDigests(self.get())
        await asyncio.to_thread(digests.hash_large_files)
        sealed = self.get().with_name(f"{self.get().name}.sealed")
        sealed.rmtree(missing_ok=True)  # left by a killed process
        # Orbax writes files of its own until it renames the folder. So it renames to `sealed`,
        # where the checksums are added, and only that folder is renamed to the final name.
        self._final_path = sealed
        await super().finalize()
        await asyncio.to_thread(write_seal, sealed, digests)
        sealed.rename(final)
        self._final_path = final

    def _is_subfolder(self) -> bool:
        return _TMP_SUFFIX in self.get_final().parent.name


class FolderDigests:
    """Hashes the files of a folder in parallel, the large ones while others are being written."""

    def __init__(self, folder: epath.Path):
        self._folder = folder
        # By name: the file when hashing began, its digest.
        self._digest_of_file: dict[str, tuple[FileState, futures.Future[str]]] = {}
        self._complete = threading.Event()
        self._watcher = threading.Thread(target=self._poll, daemon=True)

    def watch(self) -> None:
        """Hashes large files in the background once they stop growing, until `hash_large_files`."""
        self._watcher.start()

    def _poll(self) -> None:
        before: set[FileState] = set()
        while not self._complete.wait(_POLL_S) and self._folder.exists():
            with contextlib.suppress(OSError):  # a file or the folder was renamed concurrently
                now = self._files(_EARLY_BYTES)
                self._submit(now & before)
                before = now

    def hash_large_files(self) -> None:
        """Waits until all large files are hashed; the folder may be renamed afterwards."""
        self._complete.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._submit(self._files(_EARLY_BYTES))
        futures.wait([digest for _, digest in self._digest_of_file.values()])

    def digests(self, folder: epath.Path) -> dict[str, str]:
        """{file: digest} of the complete folder at its present path."""
        self._folder = folder
        files = self._files(0)
        self._submit(files)
        return {name: self._digest_of_file[name][1].result() for name, *_ in sorted(files)}

    def _files(self, min_bytes: int) -> set[FileState]:
        files = set()
        for path in pathlib.Path(self._folder).rglob("*"):
            # Subfolders, too, have temporary names while they are written.
            name = os.path.relpath(path, self._folder).replace(_TMP_SUFFIX, "")
            stat = path.stat()
            if path.is_file() and name != SEAL_FILE and stat.st_size >= min_bytes:
                files.add((name, path, stat.st_size, stat.st_mtime))
        return files

    def _submit(self, files: Iterable[FileState]) -> None:
        """Starts hashing files that were not hashed before or have changed since."""
        for file in files:
            name, path, *_ = file
            before, digest = self._digest_of_file.get(name, (None, None))
            failed = digest and digest.done() and digest.exception()  # renamed while hashed
            if before is None or before[2:] != file[2:] or failed:
                self._digest_of_file[name] = file, _POOL.submit(_digest, path)


def _digest(path: os.PathLike[str]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_seal(folder: epath.Path, digests: FolderDigests) -> None:
    """Writes the digests of all files of a complete folder into its `SEAL_FILE`."""
    (folder / SEAL_FILE).write_text(json.dumps(digests.digests(folder), indent=1))


def damage(folder: epath.Path) -> str:
    """The first damage found in a sealed folder, or "" if it is intact."""
    try:
        digests = json.loads((folder / SEAL_FILE).read_text())
    except FileNotFoundError:
        return f"{SEAL_FILE} is missing"
    except ValueError as error:
        return f"{SEAL_FILE} is not JSON ({error})"
    current_digests = {name: _POOL.submit(_digest, folder / name) for name in digests}
    for name, digest in digests.items():
        try:
            if current_digests[name].result() != digest:
                length = (folder / name).stat().length
                return f"{name} differs from its checksum ({length} bytes now)"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return ""
