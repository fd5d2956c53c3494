"""The files of a training service: sessions, models, samplers, checkpoints.

    sessions/ID.json  samplers/ID.json
    models/ID/        model.json, current.json, snapshots/SEQ, journal/SEQ, results/SEQ
    checkpoints/ID/KIND/NAME/   meta.json, written last, and the content

Names on disk are ids with ":" as "~". A file is replaced as a whole, so that a killed process
leaves the old one or the new one.
"""

import dataclasses
import datetime
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import files

Json = dict[str, Any]
CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
# What Tinker's API calls them in lists.
CHECKPOINT_TYPES: Mapping[str, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_SCHEME = "tinker://"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,159}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class RecordNotFoundError(UserError, LookupError):
    """There is no such record, or it is another client's."""


class RecordError(UserError, ValueError):
    """A name or a path has another form."""


def utc_time() -> str:
    """The time in UTC, as JSON has it."""
    return datetime.datetime.now(datetime.UTC).isoformat()


def checked_name(name: str) -> str:
    """A name of a checkpoint; raises RecordError if it is not one."""
    if not _NAME.fullmatch(name):
        raise RecordError(
            f"name {name[:100]!r}: use 1 to 128 letters, digits, dots, dashes and underscores, the"
            " first a letter or digit"
        )
    return name


@dataclasses.dataclass(frozen=True)
class CheckpointPath:
    """The address of a checkpoint, `tinker://MODEL/KIND/NAME`."""

    model_id: str
    kind: CheckpointKind
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @classmethod
    def parse(cls, path: str) -> "CheckpointPath":
        """Parses an address; raises RecordError if it is not one."""
        parts = path.removeprefix(_SCHEME).split("/")
        if not path.startswith(_SCHEME) or len(parts) != 3 or parts[1] not in CHECKPOINT_TYPES:
            kinds = ", ".join(CHECKPOINT_TYPES)
            raise RecordError(
                f"path {path[:200]!r}: expected tinker://MODEL/KIND/NAME, KIND one of {kinds}"
            )
        if not _ID.fullmatch(parts[0]):
            raise RecordError(f"path {path[:200]!r}: {parts[0][:100]!r} is not the id of a model")
        return cls(parts[0], parts[1], checked_name(parts[2]))  # type: ignore[arg-type]


class Records:
    """The records below a folder. Of several threads, each writes records of its own."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def path(self, *parts: str) -> pathlib.Path:
        return self.folder.joinpath(*(part.replace(":", "~") for part in parts))

    def write(self, record: Json, *parts: str) -> None:
        files.replace_text(self.path(*parts), json.dumps(record))

    def read(self, what: str, owner: str, kind: str, identifier: str, *rest: str) -> Json:
        """A record of this owner.

        Raises:
          RecordNotFoundError: If there is none, or it is another owner's: the same answer.
        """
        record: Json = {}
        if _ID.fullmatch(identifier):
            path = self.path(kind, identifier, *rest)
            path = path if rest else path.with_name(f"{path.name}.json")
            if path.is_file():
                record = json.loads(path.read_text())
        if record.get("owner") != owner:
            raise RecordNotFoundError(f"{what} {identifier[:160]!r}: not found")
        return record

    def write_session(self, session_id: str, record: Json) -> None:
        self.write(record, "sessions", f"{session_id}.json")

    def session(self, owner: str, session_id: str) -> Json:
        return self.read("session", owner, "sessions", session_id)

    def session_ids(self, owner: str) -> list[str]:
        """The sessions of an owner."""
        ids = [name.removesuffix(".json") for name in files.names(self.path("sessions"))]
        return [each for each in ids if self._owner(self.path("sessions", f"{each}.json")) == owner]

    def write_sampler(self, sampler_id: str, record: Json) -> None:
        self.write(record, "samplers", f"{sampler_id}.json")

    def sampler(self, owner: str, sampler_id: str) -> Json:
        return self.read("sampler", owner, "samplers", sampler_id)

    def sampler_ids(self, session_id: str) -> list[str]:
        """The samplers of a session."""
        ids = [name.removesuffix(".json") for name in files.names(self.path("samplers"))]
        ids = [each.replace("~", ":") for each in ids]
        return [each for each in ids if each.startswith(f"{session_id}:")]

    def model(self, owner: str, model_id: str) -> Json:
        return self.read("model", owner, "models", model_id, "model.json")

    def model_ids(self) -> list[str]:
        """All models, of every owner."""
        return [name.replace("~", ":") for name in files.names(self.path("models"))]

    def checkpoint_folder(self, path: CheckpointPath) -> pathlib.Path:
        return self.path("checkpoints", path.model_id, path.kind, path.name)

    def checkpoint(self, owner: str, path: CheckpointPath) -> Json:
        """The record of an owner's checkpoint; raises RecordNotFoundError."""
        record = self.checkpoint_of_anyone(path)
        if record["owner"] != owner:
            raise RecordNotFoundError(f"checkpoint {str(path)!r}: not found")
        return record

    def checkpoint_of_anyone(self, path: CheckpointPath) -> Json:
        """The record of a checkpoint; raises RecordNotFoundError."""
        file = self.checkpoint_folder(path) / "meta.json"
        record = json.loads(file.read_text()) if file.is_file() else {}
        if not record or _is_expired(record):
            raise RecordNotFoundError(f"checkpoint {str(path)!r}: not found")
        return record

    def write_checkpoint(self, path: CheckpointPath, record: Json) -> None:
        """Completes a checkpoint, whose content is written."""
        files.replace_text(self.checkpoint_folder(path) / "meta.json", json.dumps(record))

    def delete_checkpoint(self, path: CheckpointPath) -> None:
        folder = self.checkpoint_folder(path)
        (folder / "meta.json").unlink(missing_ok=True)  # first: without it there is no checkpoint
        files.remove_tree(folder)

    def checkpoints(self, owner: str, model_id: str = "") -> list[tuple[CheckpointPath, Json]]:
        """The checkpoints of an owner, or of one model, oldest first."""
        found = []
        models = [model_id] if model_id else files.names(self.path("checkpoints"))
        for model in models:
            for kind in CHECKPOINT_TYPES:
                for name in files.names(self.path("checkpoints", model, kind)):
                    path = CheckpointPath(model.replace("~", ":"), kind, name)  # type: ignore
                    try:
                        found.append((path, self.checkpoint(owner, path)))
                    except RecordNotFoundError:
                        continue
        return sorted(found, key=lambda each: each[1]["time"])

    def _owner(self, path: pathlib.Path) -> str:
        return json.loads(path.read_text())["owner"]


def _is_expired(record: Json) -> bool:
    if not (expires := record.get("expires_at")):
        return False
    return datetime.datetime.fromisoformat(expires) < datetime.datetime.now(datetime.UTC)


def folder_bytes(folder: pathlib.Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
