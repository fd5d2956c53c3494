"""The routes of Tinker's API, as its SDK 0.38 calls them."""

import asyncio
import concurrent.futures
import datetime
import hashlib
import secrets
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import fastapi
import pydantic
from fastapi.responses import FileResponse, JSONResponse, Response

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.serving.protocol import ApiError, ServedModel
from jaxrl_llm.serving.training_service import bodies, wire
from jaxrl_llm.serving.training_service.records import (
    CHECKPOINT_TYPES,
    CheckpointPath,
    Json,
    RecordNotFoundError,
    Records,
    utc_time,
)
from jaxrl_llm.serving.training_service.sample_futures import SampleFutures, sampler_path
from jaxrl_llm.serving.training_service.sampler_pool import SamplersBusyError
from jaxrl_llm.serving.training_service.trained_model import (
    PASS,
    Outcome,
    TrainedModel,
    TrainingOperation,
    lora_config,
)
from jaxrl_llm.serving.training_service.training_queue import QueueFullError, TrainingQueue

PREFIX = "/api/v1"
LORA_ALPHA = 32.0  # of every adapter, as Tinker's
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")
_HOLD_S = 25.0  # for which a request for a result waits; the SDK gives up after 45
_DOWNLOAD_S = 3600.0
_PROTOBUF = "application/x-protobuf"
_STATUS: Mapping[type[Exception], int] = {
    RecordNotFoundError: 404,
    QueueFullError: 429,
    SamplersBusyError: 429,
}
_FULL_FINE_TUNING = (
    "lora_config.rank: 0, or none; clients share the base, so this server trains adapters alone."
    " Train all weights with jaxrl_llm.training_session or a job"
)
_UNEMBED_WARNING = (
    "train_unembed is ignored: this server has no adapters of the unembedding. It trains those of"
    " attention and MLP."
)

_Body = TypeVar("_Body", bound=pydantic.BaseModel)


class TrainingService:
    """The state behind the routes."""

    def __init__(
        self,
        served: ServedModel,
        records: Records,
        queue: TrainingQueue,
        samples: SampleFutures,
        *,
        max_rank: int,
        tokenizer: str,
        has_experts: bool,
        api_keys: frozenset[str] = frozenset(),
    ):
        """Args:
        max_rank: The highest rank of an adapter that can be sampled.
        tokenizer: Folder or name that clients load the tokenizer from.
        has_experts: Whether the MLP is of experts, whose adapters cannot be sampled.
        api_keys: Those that are accepted; none: any, each with models of its own.
        """
        self.served, self.records, self.queue, self.samples = served, records, queue, samples
        self.max_rank, self.tokenizer, self.has_experts = max_rank, tokenizer, has_experts
        self._api_keys = api_keys
        self.downloads: dict[str, tuple[CheckpointPath, datetime.datetime]] = {}

    def owner(self, request: fastapi.Request) -> str:
        """The client that a request comes from, by its key; an ApiError without a valid one."""
        key = request.headers.get("x-api-key", "")
        if not key or (self._api_keys and key not in self._api_keys):
            raise ApiError(401, "X-API-Key: missing, or not one of this server")
        return hashlib.sha256(key.encode()).hexdigest()[:32]

    def lora(self, body: bodies.CreateModelBody) -> LoraConfig:
        """The shapes of a new model's adapters; an ApiError with what cannot be trained."""
        if body.base_model != self.served.name:
            raise ApiError(
                400,
                f"base_model: {body.base_model[:100]!r} is not trained here; use"
                f" {self.served.name!r}",
            )
        if body.optimizer_config.type != "adamw":
            raise ApiError(
                400,
                f"optimizer_config: {body.optimizer_config.type[:100]!r}; this server has adamw",
            )
        config = body.lora_config
        if config is None or not config.rank:
            raise ApiError(400, _FULL_FINE_TUNING)
        if not 1 <= config.rank <= self.max_rank:
            raise ApiError(
                400,
                f"lora_config.rank: {config.rank}; use 1 to {self.max_rank}, or start the server"
                " with a higher --max_adapter_rank",
            )
        if config.train_mlp and self.has_experts:
            raise ApiError(
                400, "lora_config.train_mlp: adapters of experts cannot be sampled here; set False"
            )
        targets = ATTENTION * config.train_attn + MLP * config.train_mlp
        if not targets:
            raise ApiError(400, f"lora_config: {_UNEMBED_WARNING}")
        return LoraConfig(rank=config.rank, alpha=LORA_ALPHA, targets=targets)


def training_routes(service: TrainingService) -> fastapi.APIRouter:
    """The routes of a training service."""
    router = fastapi.APIRouter(prefix=PREFIX)
    records, queue, samples, served = (
        service.records,
        service.queue,
        service.samples,
        service.served,
    )

    async def parse_body(request: fastapi.Request, kind: type[_Body]) -> _Body:
        try:
            return kind.model_validate_json(await request.body())
        except pydantic.ValidationError as error:
            raise ApiError(400, bodies.validation_problem(error)) from error

    async def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function that touches files, in a thread; its errors as HTTP's."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(None, function, *arguments)
        except UserError as error:
            raise _as_api_error(error) from error

    # Server and sessions.

    @router.get("/healthz")
    async def healthz() -> Json:
        return {"status": "ok"}

    @router.get("/get_server_capabilities")
    async def capabilities(request: fastapi.Request) -> Json:
        service.owner(request)
        model = {
            "model_name": served.name,
            "max_context_length": served.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    @router.post("/client/config")
    async def client_config(request: fastapi.Request) -> Json:
        service.owner(request)
        return {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True}

    @router.post("/client/dynamic_config")
    async def client_dynamic_config(request: fastapi.Request) -> Json:
        service.owner(request)
        return {"sample_cancel_enabled": True}

    @router.post("/telemetry")
    async def telemetry(request: fastapi.Request) -> Json:
        service.owner(request)
        return {"status": "accepted"}

    @router.post("/create_session")
    async def create_session(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.SessionBody)
        session_id = uuid.uuid4().hex
        record = {"owner": owner, "created": utc_time(), **body.model_dump()}
        await guarded(records.write_session, session_id, record)
        reply = {"type": "create_session", "session_id": session_id}
        return {**reply, "warning_message": _UNEMBED_WARNING}  # train_unembed is the SDK's default

    @router.post("/session_heartbeat")
    async def session_heartbeat(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.HeartbeatBody)
        await guarded(records.session, owner, body.session_id)
        return {"type": "session_heartbeat"}

    @router.post("/sessions/{session_id}/finish")
    async def finish_session(request: fastapi.Request, session_id: str) -> Json:
        await guarded(records.session, service.owner(request), session_id)
        return {}

    @router.get("/sessions/{session_id}")
    async def get_session(request: fastapi.Request, session_id: str) -> Json:
        owner = service.owner(request)
        record = await guarded(records.session, owner, session_id)
        models = [model.id for model in queue.models(owner)]
        return {
            "training_run_ids": [each for each in models if each.startswith(f"{session_id}:")],
            "sampler_ids": await guarded(records.sampler_ids, session_id),
            "user_metadata": record["user_metadata"],
            "display_name": record["display_name"],
        }

    @router.get("/sessions")
    async def list_sessions(request: fastapi.Request, limit: int = 20, offset: int = 0) -> Json:
        ids = await guarded(records.session_ids, service.owner(request))
        return {"sessions": ids[offset : offset + limit]}

    # Models.

    @router.post("/create_model")
    async def create_model(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.CreateModelBody)
        lora = service.lora(body)
        assert body.lora_config is not None
        seed = secrets.randbits(31) if body.lora_config.seed is None else body.lora_config.seed
        return await created(
            owner, body.session_id, body.model_seq_id, lora, seed, body, "create_model"
        )

    async def created(
        owner: str,
        session_id: str,
        number: int,
        lora: LoraConfig,
        seed: int,
        body: bodies.CreateModelBody | bodies.LoadWeightsBody,
        kind: str,
    ) -> Json:
        """Adds a model to a session, and queues its first operation."""
        await guarded(records.session, owner, session_id)
        model_id = f"{session_id}:train:{number}"
        shapes = {"rank": lora.rank, "alpha": lora.alpha, "targets": list(lora.targets)}
        record = {
            "owner": owner,
            "session_id": session_id,
            "base_model": served.name,
            "lora": shapes,
            "seed": seed,
            "created": utc_time(),
            "user_metadata": body.user_metadata,
        }
        operation = TrainingOperation(kind, body.model_dump_json().encode())
        await guarded(queue.create, model_id, record, operation)
        return {"request_id": f"{model_id}:0", "model_id": model_id}

    @router.post("/get_info")
    async def get_info(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.ModelBody)
        model = await guarded(queue.model, owner, body.model_id)
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": served.name,
            "model_data": {
                "arch": "transformer",
                "model_name": served.name,
                "tokenizer_id": service.tokenizer,
            },
            "is_lora": True,
            "lora_rank": model.lora.rank,
        }

    @router.post("/forward_backward")
    async def forward_backward(request: fastapi.Request) -> Json:
        owner = service.owner(request)
        if request.headers.get("content-type", "") != _PROTOBUF:
            raise ApiError(415, f"content-type: this server reads {_PROTOBUF}, as SDK 0.38 sends")
        if request.headers.get("content-encoding"):
            raise ApiError(415, "content-encoding: not supported by this server; send none")
        body = await request.body()
        model_id, seq = await guarded(wire.request_address, body)
        request_id = await guarded(
            queue.submit, owner, model_id, seq, TrainingOperation(PASS, body)
        )
        return {"request_id": request_id, "model_id": model_id}

    async def submit(request: fastapi.Request, kind: str) -> Json:
        """Queues an operation. Its body is read in its turn: an error takes its number too."""
        owner, body = service.owner(request), await parse_body(request, _Address)
        operation = TrainingOperation(kind, await request.body())
        request_id = await guarded(queue.submit, owner, body.model_id, body.seq_id, operation)
        return {"request_id": request_id, "model_id": body.model_id}

    for kind in ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external"):

        def add(kind: str) -> None:
            @router.post(f"/{kind}", name=kind)
            async def run(request: fastapi.Request) -> Json:
                return await submit(request, kind)

        add(kind)

    @router.post("/load_weights")
    async def load_weights(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.LoadWeightsBody)
        if body.model_id is not None:
            return await submit(request, "load_weights")
        if body.session_id is None or body.model_seq_id is None:
            raise ApiError(
                400, "load_weights: give model_id and seq_id, or session_id and model_seq_id"
            )
        if body.base_model not in (None, served.name):
            raise ApiError(400, f"base_model: use {served.name!r}")
        record = await guarded(_checkpoint, records, owner, body.path)
        lora = lora_config(record["lora"])
        return await created(
            owner, body.session_id, body.model_seq_id, lora, 0, body, "load_weights"
        )

    # Samplers.

    @router.post("/create_sampling_session")
    async def create_sampling_session(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.SamplingSessionBody)
        await guarded(records.session, owner, body.session_id)
        if body.base_model not in (None, served.name):
            raise ApiError(
                400, f"base_model: {body.base_model[:100]!r} is not here; use {served.name!r}"
            )
        path = None
        if body.model_path:
            path = await guarded(sampler_path, records, owner, body.model_path)
        sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        sampler = {"owner": owner, "base_model": served.name, "model_path": path}
        await guarded(records.write_sampler, sampler_id, sampler)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    @router.get("/samplers/{sampler_id}")
    async def get_sampler(request: fastapi.Request, sampler_id: str) -> Json:
        record = await guarded(records.sampler, service.owner(request), sampler_id)
        return {
            "sampler_id": sampler_id,
            "base_model": record["base_model"],
            "model_path": record["model_path"],
        }

    @router.post("/asample")
    async def asample(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.SampleBody)
        try:
            request_id, count = await samples.start(owner, body)
        except UserError as error:
            raise _as_api_error(error) from error
        ids = [f"{request_id}:{i}" for i in range(count)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    @router.post("/cancel_future")
    async def cancel_future(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.FutureBody)
        try:
            samples.cancel(owner, body.request_id)
        except UserError as error:
            raise _as_api_error(error) from error
        return {}

    # Results.

    @router.post("/retrieve_future")
    async def retrieve_future(request: fastapi.Request) -> Response:
        owner, body = service.owner(request), await parse_body(request, bodies.FutureBody)
        is_sample = ":sample:" in body.request_id
        find: Any = samples.future if is_sample else queue.future
        try:
            future = find(owner, body.request_id)
        except UserError as error:
            raise _as_api_error(error) from error
        if future is None:  # the SDK then begins the request again, where that is possible
            raise ApiError(410, f"request {body.request_id!r}: its result is no longer kept")
        if isinstance(future, concurrent.futures.Future):
            future = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({future}, timeout=_HOLD_S)
        if not done:
            return JSONResponse(
                {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, 408
            )
        if future.cancelled():
            raise ApiError(410, f"request {body.request_id!r}: cancelled")
        return _reply(future.result())

    # Checkpoints.

    @router.get("/training_runs")
    async def training_runs(request: fastapi.Request, limit: int = 20, offset: int = 0) -> Json:
        owner = service.owner(request)
        models = sorted(queue.models(owner), key=lambda m: m.record["created"], reverse=True)
        chosen = models[max(0, offset) : max(0, offset) + max(0, limit)]
        runs = [await guarded(_training_run, records, model) for model in chosen]
        cursor = {"offset": offset, "limit": limit, "total_count": len(models)}
        return {"training_runs": runs, "cursor": cursor}

    @router.get("/training_runs/{model_id}")
    async def training_run(request: fastapi.Request, model_id: str) -> Json:
        model = await guarded(queue.model, service.owner(request), model_id)
        return await guarded(_training_run, records, model)

    @router.get("/training_runs/{model_id}/checkpoints")
    async def model_checkpoints(request: fastapi.Request, model_id: str) -> Json:
        owner = service.owner(request)
        await guarded(queue.model, owner, model_id)
        checkpoints = await guarded(records.checkpoints, owner, model_id)
        return {"checkpoints": [_checkpoint_card(*each) for each in checkpoints]}

    @router.get("/checkpoints")
    async def checkpoints(request: fastapi.Request, limit: int = 100, offset: int = 0) -> Json:
        checkpoints = await guarded(records.checkpoints, service.owner(request))
        checkpoints.reverse()
        cards = [_checkpoint_card(*each) for each in checkpoints[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(checkpoints)}
        return {"checkpoints": cards, "cursor": cursor}

    @router.post("/weights_info")
    async def weights_info(request: fastapi.Request) -> Json:
        owner, body = service.owner(request), await parse_body(request, bodies.WeightsInfoBody)
        record = await guarded(_checkpoint, records, owner, body.tinker_path)
        targets = record["lora"]["targets"]
        return {
            "base_model": record["base_model"],
            "is_lora": True,
            "lora_rank": record["lora"]["rank"],
            "train_unembed": False,
            "train_mlp": MLP[0] in targets,
            "train_attn": ATTENTION[0] in targets,
        }

    @router.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}")
    async def delete_checkpoint(
        request: fastapi.Request, model_id: str, kind: str, name: str
    ) -> Json:
        owner, address = service.owner(request), f"tinker://{model_id}/{kind}/{name}"
        await guarded(_checkpoint, records, owner, address)
        await guarded(records.delete_checkpoint, CheckpointPath.parse(address))
        return {}

    @router.get("/training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def external_weights_urls(
        request: fastapi.Request, model_id: str, kind: str, name: str
    ) -> Json:
        owner, address = service.owner(request), f"tinker://{model_id}/{kind}/{name}"
        await guarded(_checkpoint, records, owner, address)
        path, token = CheckpointPath.parse(address), secrets.token_urlsafe(24)
        expires = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=_DOWNLOAD_S)
        service.downloads[token] = path, expires
        folder = records.checkpoint_folder(path) / "adapters"
        root = str(request.base_url).rstrip("/") + f"{PREFIX}/external_weights/{token}"
        urls = {file.name: f"{root}/{file.name}" for file in sorted(folder.iterdir())}
        return {"urls": urls, "expires": expires.isoformat()}

    @router.get("/external_weights/{token}/{file}")
    async def external_weights(token: str, file: str) -> Response:
        path, expires = service.downloads.get(token, (None, None))
        if path is None or expires is None or expires < datetime.datetime.now(datetime.UTC):
            raise ApiError(404, "this address is not known, or has expired; ask for another")
        folder = records.checkpoint_folder(path) / "adapters"
        known = {each.name: each for each in folder.iterdir()} if folder.is_dir() else {}
        if file not in known:
            raise ApiError(404, f"{file[:100]!r}: no such file")
        return FileResponse(known[file])

    methods = ["GET", "POST", "PUT", "DELETE", "PATCH"]

    @router.api_route("/{path:path}", methods=methods)
    async def unsupported(path: str) -> Response:
        # Not 501: the SDK would ask again for minutes.
        raise ApiError(400, f"{path[:200]}: not supported by this server")

    return router


class _Address(pydantic.BaseModel):
    """The fields that every operation on a model has."""

    model_config = pydantic.ConfigDict(extra="ignore", protected_namespaces=())
    model_id: str = pydantic.Field(max_length=160)
    seq_id: int


def _as_api_error(error: UserError) -> ApiError:
    kind = next((kind for kind in _STATUS if isinstance(error, kind)), None)
    return ApiError(400 if kind is None else _STATUS[kind], str(error))


def _checkpoint(records: Records, owner: str, address: str) -> Json:
    return records.checkpoint(owner, CheckpointPath.parse(address))


def _checkpoint_card(path: CheckpointPath, record: Json) -> Json:
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": CHECKPOINT_TYPES[path.kind],
        "time": record["time"],
        "tinker_path": str(path),
        "size_bytes": record["size_bytes"],
        "user_metadata": record["user_metadata"],
        "expires_at": record["expires_at"],
    }


def _training_run(records: Records, model: TrainedModel) -> Json:
    cards = [_checkpoint_card(*each) for each in records.checkpoints(model.owner, model.id)]
    newest = {card["checkpoint_type"]: card for card in cards}
    return {
        "training_run_id": model.id,
        "base_model": model.record["base_model"],
        "model_owner": model.owner,
        "is_lora": True,
        "lora_rank": model.lora.rank,
        "last_request_time": model.record["created"],
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": model.record["user_metadata"],
    }


def _reply(outcome: Outcome) -> Response:
    media_type = _PROTOBUF if outcome.kind == "protobuf" else "application/json"
    return Response(outcome.content, media_type=media_type)
