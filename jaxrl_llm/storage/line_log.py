"""A file of lines that grows, in a local folder or in a bucket, which has no append.

In a bucket the log `NAME` is kept in parts, the objects `NAME`, `NAME.1`, `NAME.2`, ... The last
one is replaced as lines are added, until it has `PART_BYTES`; then the next one is begun.
"""

import contextlib
import pathlib
import threading
from collections.abc import Callable

from jaxrl_llm.storage import files

PART_BYTES = 1 << 20
FLUSH_S = 20.0  # time until a line is in the bucket


def _part_number(name: str, log_name: str) -> int:
    """The number of a part by its name, -1 for other files."""
    if name == log_name:
        return 0
    digits = name.removeprefix(f"{log_name}.")
    return int(digits) if digits != name and digits.isdecimal() and digits[0] != "0" else -1


def _parts(path: pathlib.Path) -> list[tuple[pathlib.Path, int]]:
    """Path and size of the parts of a log in a bucket, in order."""
    sizes = {
        number: size
        for name, size in files.sizes(path.parent).items()
        if (number := _part_number(name, path.name)) >= 0
    }
    return [(_part_path(path, number), sizes[number]) for number in sorted(sizes)]


def _part_path(path: pathlib.Path, number: int) -> pathlib.Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def read_log(path: pathlib.Path, start: int = 0) -> bytes:
    """The content of a log from byte `start` on; raises FileNotFoundError if there is none."""
    if not files.in_bucket(path):
        return files.read_bytes(path, start)
    parts = _parts(path)
    if not parts:
        raise FileNotFoundError(f"{path}: no such file")
    content = []
    for part, size in parts:
        if start < size:
            content.append(files.read_bytes(part, max(0, start)))
        start -= size
    return b"".join(content)


def replace_log(path: pathlib.Path, content: bytes) -> None:
    """Replaces the content of a log, whose beginning must stay as it is up to the new end.

    A kill in between leaves old lines behind the new end, never a gap within the kept ones.
    """
    if not files.in_bucket(path):
        files.replace_bytes(path, content)
        return
    old = _parts(path)
    pieces = [content[i : i + PART_BYTES] for i in range(0, len(content), PART_BYTES)] or [b""]
    for part, _ in reversed(old[len(pieces) :]):
        files.remove(part)
    for number, piece in enumerate(pieces):
        if number >= len(old) or files.read_bytes(old[number][0]) != piece:
            files.replace_bytes(_part_path(path, number), piece)


def append_line(path: pathlib.Path, line: str) -> None:
    """Appends a line that is in the file or bucket on return; mends a last one without its end."""
    if not files.in_bucket(path):
        is_truncated = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # by a kill
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * is_truncated + line + "\n")
        return
    with contextlib.closing(BucketLog(path, flush_s=None)) as log:
        log.append(line.encode() + b"\n")


class BucketLog:
    """A log in a bucket, open for appending; lines are there `flush_s` later, or after `flush`."""

    def __init__(
        self,
        path: pathlib.Path,
        check_owner: Callable[[], None] = lambda: None,
        flush_s: float | None = FLUSH_S,
    ):
        """`check_owner` raises if this process may not write any more; None: no thread writes."""
        parts = _parts(path)
        self._path, self._check_owner, self._flush_s = path, check_owner, flush_s
        self.num_bytes = sum(size for _, size in parts)
        self._number = max(0, len(parts) - 1)  # of the last part
        self._last_part = files.read_bytes(parts[-1][0]) if parts else b""
        self._unwritten: dict[int, bytes] = {}  # parts by number
        self._lock = threading.Lock()  # held briefly
        self._flush_lock = threading.Lock()  # held while a store may be slow
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._flush_regularly, daemon=True)
        if flush_s is not None:
            self._thread.start()

    def append(self, lines: bytes) -> None:
        """Adds whole lines; does not wait for the store."""
        with self._lock:
            if len(self._last_part) >= PART_BYTES:
                self._number, self._last_part = self._number + 1, b""
            self._last_part += lines
            self.num_bytes += len(lines)
            self._unwritten[self._number] = self._last_part

    def flush(self) -> None:
        """Writes all lines to the bucket; raises OSError if that fails, and keeps them."""
        with self._flush_lock:
            with self._lock:
                unwritten = sorted(self._unwritten.items())
            for number, part in unwritten:
                self._check_owner()
                files.replace_bytes(_part_path(self._path, number), part)
                with self._lock:
                    if self._unwritten[number] is part:
                        del self._unwritten[number]

    def close(self) -> None:
        """Flushes and ends the thread; raises as `flush`."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self.flush()

    def _flush_regularly(self) -> None:
        while not self._closed.wait(self._flush_s):
            # The run reports a failure when it flushes before a checkpoint.
            with contextlib.suppress(Exception):
                self.flush()
