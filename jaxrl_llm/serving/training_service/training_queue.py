"""The thread that trains: one operation after another, the clients in turn."""

import collections
import concurrent.futures
import json
import threading
import time
from collections.abc import Sequence

import pydantic
from absl import logging

from jaxrl_llm.errors import UserError
from jaxrl_llm.serving.training_service.bodies import validation_problem
from jaxrl_llm.serving.training_service.operations import ModelOperations
from jaxrl_llm.serving.training_service.pass_batches import PassBatch, PassBatcher
from jaxrl_llm.serving.training_service.records import Json, RecordNotFoundError, Records
from jaxrl_llm.serving.training_service.trained_model import (
    PASS,
    Outcome,
    TrainedModel,
    TrainingOperation,
)
from jaxrl_llm.training_api.policy_base import PolicyBase

MAX_PENDING = 1024  # requests of a model that wait
# The longest wait for the clients of the last batch, in seconds, and as a share of its time.
_MAX_GATHER_S, _GATHER_SHARE = 0.05, 0.5
_RETRY_S = 5.0  # between two attempts to write a result


class QueueFullError(UserError, RuntimeError):
    """A model has too many requests that wait."""


class SequenceError(UserError, ValueError):
    """Two different requests have the same number."""


class TrainingQueue:
    """The models of all clients, and the order of their requests.

    A model's requests are done by their numbers. Of the models whose next request has come, the one
    that has waited longest since its last is next: no client waits for more than one request of
    each other one. A pass takes passes of other models with it that fit into its batch.
    """

    def __init__(self, base: PolicyBase, records: Records, max_resident: int):
        """Reads the models that an earlier process has left; does not start the thread."""
        self._base, self._records, self._max_resident = base, records, max_resident
        self._operations = ModelOperations(base, records)
        self._batcher = PassBatcher(base, max_resident)
        self._last_batch: list[TrainedModel] = []  # of the last pass or passes
        self._last_batch_s = 0.0
        self._changed = threading.Condition()
        self._turns: collections.OrderedDict[str, TrainedModel] = collections.OrderedDict()
        for model_id in records.model_ids():
            if records.path("models", model_id, "model.json").is_file():
                self._turns[model_id] = self._read_model(model_id)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    def _read_model(self, model_id: str) -> TrainedModel:
        folder = self._records.path("models", model_id)
        return TrainedModel(model_id, folder, json.loads((folder / "model.json").read_text()))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its current operation; what waits is done after a restart."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def create(self, model_id: str, record: Json, operation: TrainingOperation) -> None:
        """Adds a model, whose first request is `operation`; no-op if it exists."""
        with self._changed:
            if model_id not in self._turns:
                self._records.write(record, "models", model_id, "model.json")
                self._turns[model_id] = self._read_model(model_id)
        self.submit(record["owner"], model_id, 0, operation)

    def model(self, owner: str, model_id: str) -> TrainedModel:
        """A model of this owner; raises RecordNotFoundError."""
        model = self._turns.get(model_id)
        if model is None or model.owner != owner:
            raise RecordNotFoundError(f"model {model_id[:160]!r}: not found")
        return model

    def models(self, owner: str) -> list[TrainedModel]:
        """The models of an owner."""
        with self._changed:
            return [model for model in self._turns.values() if model.owner == owner]

    def submit(self, owner: str, model_id: str, seq: int, operation: TrainingOperation) -> str:
        """Accepts a request; returns its id, which is the same for a retry.

        Raises:
          RecordNotFoundError: If there is no such model.
          SequenceError: If the number is that of another kind of request.
          QueueFullError: If too many wait.
        """
        with self._changed:
            model = self.model(owner, model_id)
            if seq < 0:
                raise SequenceError(f"seq_id: {seq} is below 0")
            if (kind := model.kind_of(seq)) and kind != operation.kind:
                raise SequenceError(f"seq_id: {seq} is that of a {kind} request; use the next one")
            if len(model.pending) >= MAX_PENDING and seq not in model.pending:
                raise QueueFullError(f"model {model_id!r}: {MAX_PENDING} requests wait; try later")
            model.submit(seq, operation)
            self._changed.notify_all()
        return f"{model_id}:{seq}"

    def future(self, owner: str, request_id: str) -> "concurrent.futures.Future[Outcome] | None":
        """The future of a request; None if its result is no longer kept.

        Raises:
          RecordNotFoundError: If there was no such request.
        """
        model_id, _, seq = request_id.rpartition(":")
        with self._changed:
            model = self.model(owner, model_id)
            if not seq.isdecimal() or not (int(seq) in model.futures or int(seq) < model.next_seq):
                raise RecordNotFoundError(f"request {request_id[:160]!r}: not found")
            return model.futures.get(int(seq))

    def _run(self) -> None:
        while models := self._runnable_models():
            if batch := self._batcher.choose(models):
                self._take_turns([each.model for each in batch.passes])
                self._do_batch(batch)
            else:
                if models[0].next_operation.kind == PASS:
                    self._last_batch = models[:1]
                self._take_turns(models[:1])
                self._do_next(models[0])

    def _runnable_models(self) -> list[TrainedModel]:
        """Waits for models with a request to do, those that wait longest first; [] once closed."""
        with self._changed:
            while True:
                if self._is_closed:
                    return []
                if models := [model for model in self._turns.values() if model.is_runnable]:
                    self._gather(models[0])
                    return [model for model in self._turns.values() if model.is_runnable]
                self._changed.wait()

    def _gather(self, first: TrainedModel) -> None:
        """Waits shortly before a pass for the models that shared the last batch with its own.

        Their clients have their results since the same moment and send the next passes within
        milliseconds. Without the wait the first to come would be computed alone, and then the rest:
        two programs in the place of one.
        """
        if first.next_operation.kind != PASS or first not in self._last_batch:
            return
        limit_s = min(_MAX_GATHER_S, _GATHER_SHARE * self._last_batch_s)
        self._changed.wait_for(
            lambda: self._is_closed or all(model.is_runnable for model in self._last_batch), limit_s
        )

    def _take_turns(self, models: Sequence[TrainedModel]) -> None:
        """Puts models behind all others, and frees memory for them."""
        with self._changed:
            for model in models:
                self._turns.move_to_end(model.id)
        self._evict(models)

    def _do_batch(self, batch: PassBatch) -> None:
        """Passes of several models in one program. None of them changes weights."""
        models = [each.model for each in batch.passes]
        start_s = time.monotonic()
        try:
            outcomes = self._batcher.run(batch)
        except UserError:
            for model in models:  # one of them is at fault: alone, it is told so
                self._do_next(model)
            return
        except Exception as error:
            outcomes = [self._server_failure(model, error) for model in models]
        self._last_batch, self._last_batch_s = models, time.monotonic() - start_s
        for model, outcome in zip(models, outcomes, strict=True):
            self._finish(model, outcome, saves_state=False)

    def _server_failure(self, model: TrainedModel, error: Exception) -> Outcome:
        """The outcome of an operation that has failed for reasons which are not the client's."""
        kind = model.next_operation.kind
        logging.error("%s of %s failed", kind, model.id, exc_info=error)
        # What it has left undone is not known: the state is read again.
        model.session = None
        return Outcome.failure(f"{kind}: {type(error).__name__}", "server")

    def _do_next(self, model: TrainedModel) -> None:
        operation = model.next_operation
        saves_state = False
        try:
            outcome, saves_state = self._operations.run(model, operation, model.next_seq)
        except UserError as error:
            outcome = Outcome.failure(str(error), "user")
        except pydantic.ValidationError as error:
            outcome = Outcome.failure(f"{operation.kind}: {validation_problem(error)}", "user")
        except Exception as error:  # whatever it is, the client must be told
            outcome = self._server_failure(model, error)
        self._finish(model, outcome, saves_state=saves_state)

    def _finish(self, model: TrainedModel, outcome: Outcome, *, saves_state: bool) -> None:
        """Writes and hands over the result of a model's next request."""
        seq = model.next_seq
        while not self._is_written(model, seq, outcome, saves_state):
            with self._changed:  # the disk may be full: nothing is answered before it is written
                self._changed.wait_for(lambda: self._is_closed, _RETRY_S)
                if self._is_closed:
                    return
        with self._changed:
            model.finish(seq, outcome)

    def _is_written(
        self, model: TrainedModel, seq: int, outcome: Outcome, saves_state: bool
    ) -> bool:
        """Writes a result; false, with a log, if that failed."""
        try:
            model.write_outcome(seq, outcome, saves_state=saves_state)
        except Exception:
            logging.exception("request %d of %s is not written; tried again", seq, model.id)
            return False
        return True

    def _evict(self, wanted: Sequence[TrainedModel]) -> None:
        """Frees the memory of models that were used longest ago; their states are on disk."""
        with self._changed:
            models = list(self._turns.values())
        resident = [model for model in models if model.session is not None and model not in wanted]
        for model in resident[: max(0, len(resident) + len(wanted) - self._max_resident)]:
            model.session = None
