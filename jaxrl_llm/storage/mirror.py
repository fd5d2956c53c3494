"""A local folder for libraries that write files themselves, copied to a folder in a bucket."""

import contextlib
import pathlib
import tempfile
import threading
from collections.abc import Iterator

from absl import logging

from jaxrl_llm.storage import files

COPY_S = 20.0  # time between two copies


@contextlib.contextmanager
def mirrored_folder(folder: pathlib.Path, copy_s: float = COPY_S) -> Iterator[pathlib.Path]:
    """A local folder for `folder`, which it is if that is local.

    Changed files are copied to a bucket every `copy_s` seconds and at the end; a copy that fails is
    logged and tried again. What lies in the bucket already is not read.
    """
    if not files.in_bucket(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm_") as name:
        local = pathlib.Path(name)
        copied: dict[pathlib.Path, tuple[int, int]] = {}  # size and time of what was copied
        closed = threading.Event()

        def copy_changes() -> None:
            for path in sorted(each for each in local.rglob("*") if each.is_file()):
                state = path.stat().st_size, path.stat().st_mtime_ns
                if copied.get(path) == state:
                    continue
                try:
                    target = folder / path.relative_to(local).as_posix()
                    files.replace_bytes(target, path.read_bytes())
                    copied[path] = state
                except OSError as error:
                    logging.warning("%s", error)
                    return

        def copy_regularly() -> None:
            while not closed.wait(copy_s):
                copy_changes()

        thread = threading.Thread(target=copy_regularly, daemon=True)
        thread.start()
        try:
            yield local
        finally:
            closed.set()
            thread.join()
            copy_changes()
