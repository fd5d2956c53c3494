"""A training service over a served model: its base in training, its records, its routes."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator

import fastapi
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_llm.checkpoint import lock
from jaxrl_llm.config import ConfigError
from jaxrl_llm.errors import UserError
from jaxrl_llm.saved_policy import SavedPolicy
from jaxrl_llm.serving.adapters import AdapterPool
from jaxrl_llm.serving.driver import RequestDriver
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.training_service.records import Records
from jaxrl_llm.serving.training_service.routes import PREFIX, TrainingService, training_routes
from jaxrl_llm.serving.training_service.sample_futures import SampleFutures
from jaxrl_llm.serving.training_service.sampler_pool import SamplerPool
from jaxrl_llm.serving.training_service.training_queue import TrainingQueue
from jaxrl_llm.storage import files
from jaxrl_llm.training_api import policy_base
from jaxrl_llm.training_api.policy_base import PolicyBase

DEFAULT_PLACES = 8  # adapters that are sampled from at once
DEFAULT_RANK = 32  # as the SDK's
BODY_BYTES = 2**26  # of a request; the SDK cuts passes at about 5 MB
# Open to all also where keys are required: they tell nothing of any client.
_OPEN_PATHS = frozenset({"/health", "/metrics", f"{PREFIX}/healthz"})


class ApiKeyError(UserError, ValueError):
    """A file of API keys cannot be used."""


def load_training_base(source: SavedPolicy, max_tokens: int) -> PolicyBase:
    """The base of the clients' adapters, which are float32 whatever the dtype of the base.

    Raises:
      UserError: If the model cannot be trained, or not with the settings of `source`.
    """
    config = source.config
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, max_prompt_tokens=max_tokens - 1),
        # Clients choose targets: none may be impossible.
        rollout=dataclasses.replace(
            config.rollout, max_response_tokens=1, suppress_unused_tokens=False
        ),
        trainer=dataclasses.replace(config.trainer, prompts_per_step=1),
    )
    if source.models.policy.shape.latent:
        raise ConfigError(
            f"--train: {source.name} has latent attention (MLA), whose adapters are not sampled"
            " side by side; train it with a job"
        )
    base = policy_base.load_base(config)
    return dataclasses.replace(base, adapter_dtype="float32")


def read_api_keys(file: str) -> frozenset[str]:
    """The keys in a file, one a line; raises ApiKeyError."""
    if not file:
        return frozenset()
    try:
        keys = pathlib.Path(file).read_text().split()
    except OSError as error:
        raise ApiKeyError(f"--api_keys: {file}: {error.strerror}") from error
    if not keys or not all(key.startswith("tml-") for key in keys):
        raise ApiKeyError(f"--api_keys: {file}: one key a line, each beginning with tml-")
    return frozenset(keys)


@contextlib.contextmanager
def training_service(
    app: fastapi.FastAPI,
    served: ServedModel,
    driver: RequestDriver,
    pool: AdapterPool,
    base: PolicyBase,
    folder: str,
    *,
    tokenizer: str,
    max_resident: int = 8,
    api_keys: frozenset[str] = frozenset(),
) -> Iterator[TrainingService]:
    """Adds the routes of a training service to `app`, and trains while the context lasts.

    Args:
      app: Of `make_app`, not yet serving.
      served: The base model.
      driver: Runs the engine of `pool`.
      pool: Places for the adapters that clients sample from.
      base: The model in training.
      folder: For the records; one process at a time uses it.
      tokenizer: Folder or name that clients load the tokenizer from.
      max_resident: Clients whose training state is in memory at once.
      api_keys: Keys that are accepted; none: any. With keys, OpenAI's endpoints are closed: they
        know no clients, so that one could sample from another's model.

    Raises:
      OccupiedError: If another process uses the folder.
    """
    path = files.absolute(pathlib.Path(folder))
    with lock.exclusive_lock(path):
        records = Records(path)
        queue = TrainingQueue(base, records, max_resident)
        samples = SampleFutures(driver, served, records, SamplerPool(pool))
        service = TrainingService(
            served,
            records,
            queue,
            samples,
            max_rank=pool.rank,
            tokenizer=tokenizer,
            has_experts=base.models.policy.shape.experts is not None,
            api_keys=api_keys,
        )
        app.include_router(training_routes(service))
        pool.connect_source(samples.load_sampler)
        if api_keys:
            app.add_middleware(_close_other_paths)
        queue.start()
        try:
            yield service
        finally:
            queue.close()


def _close_other_paths(app: ASGIApp) -> ASGIApp:
    """Middleware: 403 for everything but Tinker's API."""

    async def closed_app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in _OPEN_PATHS and not path.startswith(PREFIX):
            message = "only Tinker's API is served where --api_keys are required"
            response = fastapi.responses.JSONResponse({"error": {"message": message}}, 403)
            await response(scope, receive, send)
            return
        await app(scope, receive, send)

    return closed_app
