"""The operations of a training client on its model."""

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.adamw import AdamWParams
from jaxrl_llm.serving.training_service import bodies, wire
from jaxrl_llm.serving.training_service.records import (
    CheckpointKind,
    CheckpointPath,
    Json,
    RecordError,
    Records,
    checked_name,
    folder_bytes,
    utc_time,
)
from jaxrl_llm.serving.training_service.trained_model import (
    CHANGES_STATE,
    PASS,
    Outcome,
    TrainedModel,
    TrainingOperation,
)
from jaxrl_llm.storage import files
from jaxrl_llm.training_api.policy_base import PolicyBase

# Tinker's losses that this server does not have; ours of one of these names is another.
_OTHER_LOSSES = frozenset({"gspo", "stable_reinforce", "custom"})
_MAX_JOURNAL = 128  # requests after which the state is saved anyway, unless it has gradients


class UnsupportedError(UserError, ValueError):
    """A part of Tinker's API that this server does not have."""


def checked_loss(request: wire.PassRequest) -> str:
    """The name of the loss of a pass; raises UnsupportedError for one that is not ours."""
    if request.loss in _OTHER_LOSSES:
        raise UnsupportedError(f"loss_fn: {request.loss!r} is not supported by this server")
    return request.loss


class ModelOperations:
    """Runs operations on models. For the training thread alone."""

    def __init__(self, base: PolicyBase, records: Records):
        self._base, self._records = base, records
        self._operations: Mapping[str, tuple[Any, Callable[..., Json]]] = {
            "create_model": (bodies.CreateModelBody, self._create),
            "load_weights": (bodies.LoadWeightsBody, self._load),
            "optim_step": (bodies.OptimStepBody, self._optim_step),
            "save_weights": (bodies.SaveBody, self._save),
            "save_weights_for_sampler": (bodies.SaveForSamplerBody, self._save_for_sampler),
            "save_weights_external": (bodies.SaveExternalBody, self._save_external),
        }

    def run(
        self, model: TrainedModel, operation: TrainingOperation, seq: int
    ) -> tuple[Outcome, bool]:
        """The result of an operation, and whether the model's state has to be saved.

        Raises:
          UserError, ValidationError: If the client can do better; nothing has changed.
        """
        session = model.load_session(self._base)
        if operation.kind == PASS:
            request = wire.decode_pass(operation.body)
            checked_loss(request)
            run = session.forward if request.forward_only else session.forward_backward
            result = run(request.data, request.loss, request.settings)
            outcome = Outcome("protobuf", wire.encode_pass_result(result))
            # The journal of a client that only evaluates does not grow without end.
            is_long = seq - model.saved_seq >= _MAX_JOURNAL and not session.has_gradients
            return outcome, is_long
        kind, run_operation = self._operations[operation.kind]
        body = kind.model_validate_json(operation.body)
        values = run_operation(model, body, seq)
        return Outcome.from_json(values), operation.kind in CHANGES_STATE

    def _create(self, model: TrainedModel, body: bodies.CreateModelBody, seq: int) -> Json:
        return {"model_id": model.id, "type": "create_model"}

    def _load(self, model: TrainedModel, body: bodies.LoadWeightsBody, seq: int) -> Json:
        if body.weights_access_token:
            raise UnsupportedError("weights_access_token: not supported by this server")
        path = CheckpointPath.parse(body.path)
        if path.kind != "weights":
            raise RecordError(f"path {str(path)!r}: is for sampling; load one of save_state")
        record = self._records.checkpoint(model.owner, path)
        if record["lora"] != model.record["lora"]:
            raise RecordError(
                f"path {str(path)!r}: has adapters {record['lora']}, this model has"
                f" {model.record['lora']}; create a training client from the state"
            )
        assert model.session is not None
        folder = self._records.checkpoint_folder(path) / "state"
        model.session.load(folder, optimizer=body.optimizer)
        return {"path": str(path), "model_id": model.id, "type": "load_weights"}

    def _optim_step(self, model: TrainedModel, body: bodies.OptimStepBody, seq: int) -> Json:
        assert model.session is not None
        if body.adam_params is None:
            raise UnsupportedError("optim_step: this server has AdamW alone; give AdamParams")
        values = body.adam_params.model_dump()
        clip = values.pop("grad_clip_norm")
        params = AdamWParams(**values, max_grad_norm=clip if clip > 0 else float("inf"))
        return {"metrics": model.session.optim_step(params)}

    def _save(self, model: TrainedModel, body: bodies.SaveBody, seq: int) -> Json:
        name = body.path or f"{seq:06d}"
        path = self._write(model, body, seq, "weights", name, body.overwrite)
        return {"path": str(path), "type": "save_weights"}

    def _save_for_sampler(
        self, model: TrainedModel, body: bodies.SaveForSamplerBody, seq: int
    ) -> Json:
        if body.kind == "inflight":
            raise UnsupportedError("kind='inflight': not supported by this server; use 'snapshot'")
        if not body.path and body.sampling_session_seq_id is None:
            raise RecordError("path: give a name, or sampling_session_seq_id for a sampler")
        name = body.path or f"sampler-{seq:06d}"
        path = self._write(model, body, seq, "sampler_weights", name)
        if body.path:
            return {"path": str(path), "type": "save_weights_for_sampler"}
        sampler_id = f"{model.record['session_id']}:sample:{body.sampling_session_seq_id}"
        sampler = {"base_model": model.record["base_model"], "model_path": str(path)}
        self._records.write_sampler(sampler_id, {"owner": model.owner, **sampler})
        return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

    def _save_external(self, model: TrainedModel, body: bodies.SaveExternalBody, seq: int) -> Json:
        if body.age_encryption_recipients:
            raise UnsupportedError("age_encryption_recipients: not supported by this server")
        path = self._write(model, body, seq, "external_weights", body.path)
        size = self._records.checkpoint(model.owner, path)["size_bytes"]
        return {"path": str(path), "size_bytes": size, "type": "save_weights_external"}

    def _write(
        self,
        model: TrainedModel,
        body: bodies.SaveBody | bodies.SaveForSamplerBody | bodies.SaveExternalBody,
        seq: int,
        kind: CheckpointKind,
        name: str,
        overwrite: bool = False,
    ) -> CheckpointPath:
        """Writes a checkpoint; one that this request has written before stays."""
        assert model.session is not None
        path = CheckpointPath(model.id, kind, checked_name(name))
        folder = self._records.checkpoint_folder(path)
        if (folder / "meta.json").is_file():
            if json.loads((folder / "meta.json").read_text())["seq_id"] == seq:
                return path
            if not overwrite:
                raise RecordError(
                    f"name {name!r}: {str(path)!r} exists; choose another, or delete it"
                )
            self._records.delete_checkpoint(path)
        files.remove_tree(folder)  # left by a killed process
        folder.mkdir(parents=True)
        if kind == "weights":
            model.session.save(folder / "state")
        else:
            model.session.export_adapters(folder / "adapters")
        self._records.write_checkpoint(
            path, self._checkpoint_record(model, body.model_dump(), seq, path)
        )
        return path

    def _checkpoint_record(
        self, model: TrainedModel, body: Json, seq: int, path: CheckpointPath
    ) -> Json:
        record: dict[str, Any] = {
            name: model.record[name] for name in ("owner", "base_model", "lora")
        }
        expires = None
        if body.get("ttl_seconds"):
            lifetime = datetime.timedelta(seconds=body["ttl_seconds"])
            expires = (datetime.datetime.now(datetime.UTC) + lifetime).isoformat()
        return {
            **record,
            "seq_id": seq,
            "time": utc_time(),
            "size_bytes": folder_bytes(self._records.checkpoint_folder(path)),
            "user_metadata": body.get("user_metadata"),
            "expires_at": expires,
        }
