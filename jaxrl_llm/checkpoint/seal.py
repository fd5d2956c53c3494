"""Checksums of a complete checkpoint folder, to detect later damage.

Locally they are written before the folder gets its final name: a visible folder is complete and
sealed. A bucket has no names to change: there the file of checksums is written last, and a folder
without it is incomplete. Its entries are the sizes and checksums that the store keeps: to read
everything again would double the traffic of a save.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures

import orbax.checkpoint as ocp
from etils import epath

from jaxrl_llm.checkpoint import bucket_arrays
from jaxrl_llm.config.workdir import SEAL_FILE
from jaxrl_llm.storage import files

_EARLY_BYTES = 1 << 20  # array files; Orbax may write smaller files twice
_POLL_S = 1.0
_TMP_SUFFIX = ocp.path.atomicity.TMP_DIR_SUFFIX
_POOL = futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1), "seal")

_ITEMS = ("arrays", "meta")  # the subfolders of a checkpoint

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


class SealedObjects(ocp.path.atomicity.CommitFileTemporaryPath):
    """An Orbax folder in a bucket, complete once its seal is written."""

    check_owner: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    async def validate(cls, temporary_path: epath.Path) -> None:
        """Raises ValidationError if the folder is complete."""
        if await asyncio.to_thread(files.is_file, temporary_path / SEAL_FILE):
            raise ocp.path.atomicity.ValidationError(f"{temporary_path} is complete")

    @classmethod
    async def validate_final(cls, final_path: epath.Path) -> None:
        """Raises ValidationError if the folder is incomplete."""
        if not await asyncio.to_thread(files.is_file, final_path / SEAL_FILE):
            raise ocp.path.atomicity.ValidationError(f"{final_path} has no {SEAL_FILE}")

    async def finalize(self) -> None:
        """Completes the folder; a subfolder gets no seal of its own."""
        await super().finalize()
        if self.get_final().name not in _ITEMS:
            self.check_owner()
            await asyncio.to_thread(write_seal, self.get_final(), ObjectDigests())


class ObjectDigests:
    """Sizes and checksums of the objects of a folder, as their store has them."""

    def digests(self, folder: epath.Path) -> dict[str, str]:
        """{file: "BYTES:CHECKSUM"} of the complete folder."""
        objects = files.files_below(folder)
        return {
            name: f"{info.num_bytes}:{info.checksum}"
            for name, info in sorted(objects.items())
            if name != SEAL_FILE
        }


def path_class(
    folder: epath.Path, check_owner: Callable[[], None] = lambda: None
) -> type[ocp.path.atomicity.TemporaryPathBase]:
    """The class by which Orbax completes checkpoints in a folder; `check_owner` as in `Saver`."""
    if not files.in_bucket(folder):
        return SealedPath
    bucket_arrays.support_s3()
    return type("OwnedObjects", (SealedObjects,), {"check_owner": staticmethod(check_owner)})


def steps(folder: epath.Path) -> list[int]:
    """The numbers of the complete steps in a folder of checkpoints, for readers."""
    if not files.in_bucket(folder):
        return list(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []
    bucket_arrays.support_s3()
    numbers = [int(name) for name in files.names(folder) if name.isdecimal()]
    return [step for step in numbers if files.is_file(folder / str(step) / SEAL_FILE)]


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


def _digest(path: pathlib.Path) -> str:
    return files.sha256(path)


def write_seal(folder: epath.Path, digests: FolderDigests | ObjectDigests) -> None:
    """Writes the digests of all files of a complete folder into its `SEAL_FILE`."""
    text = json.dumps(digests.digests(folder), indent=1)
    if files.in_bucket(folder):
        files.replace_text(folder / SEAL_FILE, text)
    else:
        (folder / SEAL_FILE).write_text(text)


def damage(folder: epath.Path) -> str:
    """The first damage found in a sealed folder, or "" if it is intact."""
    try:
        digests = json.loads(files.read_text(folder / SEAL_FILE))
    except FileNotFoundError:
        return f"{SEAL_FILE} is missing"
    except ValueError as error:
        return f"{SEAL_FILE} is not JSON ({error})"
    try:
        # A bucket's entries were made by the store; those of a folder that was copied to another
        # place, or from one, are compared as far as that place allows.
        of_store = {name: digest for name, digest in digests.items() if ":" in digest}
        if of_store and (damage := _object_damage(folder, of_store)):
            return damage
    except OSError as error:
        return f"it cannot be listed ({error})"
    digests = {name: digest for name, digest in digests.items() if name not in of_store}
    current_digests = {name: _POOL.submit(_digest, folder / name) for name in digests}
    for name, digest in digests.items():
        try:
            if current_digests[name].result() != digest:
                length = (folder / name).stat().length
                return f"{name} differs from its checksum ({length} bytes now)"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return ""


def _object_damage(folder: epath.Path, digests: Mapping[str, str]) -> str:
    """The first file that differs from its "BYTES:CHECKSUM", or ""."""
    current = files.files_below(folder)
    for name, digest in digests.items():
        num_bytes, _, checksum = digest.partition(":")
        if name not in current:
            return f"{name} is missing"
        info = current[name]
        if str(info.num_bytes) != num_bytes or (info.checksum and info.checksum != checksum):
            return f"{name} differs from its checksum ({info.num_bytes} bytes now)"
    return ""
