"""One client's model in training: its requests in order, its state, and both on disk.

Every request is written to the journal before it is answered. The state is written after each
operation that changes weights, in one atomic step with the number of the next request. So after a
kill an update is done or not; the gradients of passes after the last state are computed again from
the journal, each in its place in the batch that it was computed in: bit for bit.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
from typing import Literal, NamedTuple

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.serving.training_service import wire
from jaxrl_llm.serving.training_service.records import Json
from jaxrl_llm.storage import files
from jaxrl_llm.training_api import adapter_batch, state_file
from jaxrl_llm.training_api.adapter_batch import BlockPlace, SessionPass
from jaxrl_llm.training_api.loss_functions import resolve_loss
from jaxrl_llm.training_api.policy_base import PolicyBase
from jaxrl_llm.training_api.training_session import TrainingSession

# Results kept for clients that ask again; those after the last state are all kept.
NUM_RESULTS = 64
PASS = "pass"  # kind of the requests whose body is protobuf, not JSON


# Operations after which the state is saved: those that change weights or the optimizer.
CHANGES_STATE = frozenset({"create_model", "load_weights", "optim_step"})


class TrainingOperation(NamedTuple):
    """A request of a client."""

    kind: str  # "pass", or the endpoint
    body: bytes  # protobuf of a pass, else JSON


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a request: protobuf or JSON, or why there is none."""

    kind: Literal["protobuf", "json", "failed"]
    content: bytes
    place: BlockPlace | None = None  # of a pass in a batch with others'

    @classmethod
    def from_json(cls, value: Json) -> "Outcome":
        return cls("json", json.dumps(value).encode())

    @classmethod
    def failure(cls, message: str, category: Literal["user", "server"]) -> "Outcome":
        return cls("failed", json.dumps({"error": message, "category": category}).encode())


def lora_config(shapes: Json) -> LoraConfig:
    """The shapes of adapters as a record has them."""
    return LoraConfig(**{**shapes, "targets": tuple(shapes["targets"])})


def _numbers(folder: pathlib.Path) -> set[int]:
    """The sequence numbers that are names in a folder."""
    return {int(name) for name in files.names(folder) if name.isdecimal()}


def session_pass(session: TrainingSession, request: wire.PassRequest) -> SessionPass:
    """A pass of a request; raises LossError."""
    loss = resolve_loss(request.loss, session.config.algorithm)
    return SessionPass(session, request.data, loss, request.settings)


class TrainedModel:
    """A model and its requests. Requests come under a lock; the training thread does the rest."""

    def __init__(self, model_id: str, folder: pathlib.Path, record: Json):
        """Reads what an earlier process has left in the folder."""
        self.id, self.folder, self.record = model_id, folder, record
        self.session: TrainingSession | None = None  # None: not in memory
        # Sequence numbers: of the next request to do, and of that after the state on disk.
        self.next_seq = self.saved_seq = 0
        self.snapshot = ""  # file of the state
        self.futures: dict[int, concurrent.futures.Future[Outcome]] = {}
        self.pending: dict[int, TrainingOperation] = {}
        if (current := folder / "current.json").is_file():
            values = json.loads(current.read_text())
            self.next_seq = self.saved_seq = values["next_seq"]
            self.snapshot = values["snapshot"]
        journal, results = (_numbers(folder / name) for name in ("journal", "results"))
        while self.next_seq in journal & results and not self._changes_state(self.next_seq):
            self.next_seq += 1
        for seq in journal:
            if seq >= self.next_seq:
                self._queue(seq, self._read_operation(seq))
        for seq in results:
            if seq < self.next_seq:
                self._future(seq).set_result(self._read_result(seq))

    def _changes_state(self, seq: int) -> bool:
        """Whether a request is done with the state after it, not with its result."""
        return self._read_operation(seq).kind in CHANGES_STATE

    @property
    def owner(self) -> str:
        return self.record["owner"]

    @property
    def lora(self) -> LoraConfig:
        """The shapes of its adapters."""
        return lora_config(self.record["lora"])

    @property
    def is_runnable(self) -> bool:
        """Whether the next request has come."""
        return self.next_seq in self.pending

    @property
    def next_operation(self) -> TrainingOperation:
        """The next request, which has come."""
        return self.pending[self.next_seq]

    def submit(self, seq: int, operation: TrainingOperation) -> None:
        """Accepts a request; one that came before is not done again."""
        if seq >= self.next_seq and seq not in self.pending:
            line = operation.kind.encode() + b"\n" + operation.body
            files.replace_bytes(self.folder / "journal" / str(seq), line)
            self._queue(seq, operation)

    def _queue(self, seq: int, operation: TrainingOperation) -> None:
        self.pending[seq] = operation
        self._future(seq)

    def _future(self, seq: int) -> "concurrent.futures.Future[Outcome]":
        return self.futures.setdefault(seq, concurrent.futures.Future())

    def kind_of(self, seq: int) -> str:
        """The kind of a request that is not yet done; "" if it is done, or has not come."""
        return self.pending[seq].kind if seq in self.pending else ""

    def _read_operation(self, seq: int) -> TrainingOperation:
        kind, _, body = (self.folder / "journal" / str(seq)).read_bytes().partition(b"\n")
        return TrainingOperation(kind.decode(), body)

    def _read_result(self, seq: int) -> Outcome:
        head, _, content = (self.folder / "results" / str(seq)).read_bytes().partition(b"\n")
        kind, _, place = head.decode().partition(" ")
        return Outcome(
            kind,  # type: ignore[arg-type]
            content,
            BlockPlace.from_json(json.loads(place)) if place else None,
        )

    # Of the training thread:

    def load_session(self, base: PolicyBase) -> TrainingSession:
        """The model in memory: its last state, and the passes whose gradients it had."""
        if self.session is None:
            session = TrainingSession(base, self.lora, self.record["seed"])
            if self.snapshot:
                state_file.read_state(session, self.folder / "snapshots" / self.snapshot)
            for seq in range(self.saved_seq, self.next_seq):
                operation, outcome = self._read_operation(seq), self._read_result(seq)
                if operation.kind == PASS and outcome.kind == "protobuf":
                    self._repeat(session, wire.decode_pass(operation.body), outcome.place)
            self.session = session
        return self.session

    def _repeat(
        self, session: TrainingSession, request: wire.PassRequest, place: BlockPlace | None
    ) -> None:
        """Adds the gradient of a pass that was computed before."""
        if request.forward_only:
            return
        if place is None:
            session.forward_backward(request.data, request.loss, request.settings)
        else:
            adapter_batch.forward_backward_at(session_pass(session, request), place)

    def write_outcome(self, seq: int, outcome: Outcome, *, saves_state: bool) -> None:
        """Writes the result of the next request, and the state if it has changed."""
        place = f" {json.dumps(outcome.place.to_json())}" if outcome.place else ""
        content = f"{outcome.kind}{place}\n".encode() + outcome.content
        files.replace_bytes(self.folder / "results" / str(seq), content)
        if not saves_state:
            return
        assert self.session is not None
        old = self.snapshot
        state_file.write_state(self.session, self.folder / "snapshots" / str(seq))
        # From here the operation is done: a restarted process begins with the next one.
        values = {"next_seq": seq + 1, "snapshot": str(seq)}
        files.replace_text(self.folder / "current.json", json.dumps(values))
        self.saved_seq, self.snapshot = seq + 1, str(seq)
        self._prune(old)

    def finish(self, seq: int, outcome: Outcome) -> None:
        """Hands over the result of a request, which is written."""
        self.next_seq = seq + 1
        del self.pending[seq]
        self._future(seq).set_result(outcome)

    def _prune(self, old_snapshot: str) -> None:
        """Deletes what is older than the state; a kill in between leaves files without effect."""
        if old_snapshot and old_snapshot != self.snapshot:
            files.remove(self.folder / "snapshots" / old_snapshot)
        for name in files.names(self.folder / "journal"):
            if name.isdecimal() and int(name) < self.saved_seq:
                files.remove(self.folder / "journal" / name)
        for name in files.names(self.folder / "results"):
            if name.isdecimal() and int(name) < self.saved_seq - NUM_RESULTS:
                files.remove(self.folder / "results" / name)
                self.futures.pop(int(name), None)
