"""Requests for samples: started once each, kept until their results are no longer asked for."""

import asyncio
import collections
import contextlib

from absl import logging

from jaxrl_llm.errors import UserError
from jaxrl_llm.serving.driver import RequestDriver, RequestRejected
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.training_service.bodies import SampleBody
from jaxrl_llm.serving.training_service.operations import UnsupportedError
from jaxrl_llm.serving.training_service.records import (
    CheckpointPath,
    RecordError,
    RecordNotFoundError,
    Records,
)
from jaxrl_llm.serving.training_service.sampler_pool import (
    SampleError,
    SamplerPool,
    SampleRun,
    engine_request,
)
from jaxrl_llm.serving.training_service.trained_model import Outcome

# Finished requests whose results are kept. They are lost with the process: clients sample again.
_NUM_RESULTS = 4096


class SampleFutures:
    """The requests for samples of all clients. For the event loop alone."""

    def __init__(
        self, driver: RequestDriver, served: ServedModel, records: Records, pool: SamplerPool
    ):
        self._driver, self._served, self._records, self._pool = driver, served, records, pool
        self._tasks: collections.OrderedDict[str, tuple[str, asyncio.Task[Outcome]]] = (
            collections.OrderedDict()
        )

    def load_sampler(self, name: str) -> None:
        """Loads saved weights that OpenAI's endpoints name as a model, if they are there.

        Raises:
          SamplersBusyError: If every place is used by requests that run.
        """
        try:
            path = CheckpointPath.parse(name)
            self._records.checkpoint_of_anyone(path)
        except (RecordError, RecordNotFoundError):
            return
        if path.kind == "sampler_weights":
            folder = self._records.checkpoint_folder(path) / "adapters"
            with self._pool.lease(name, str(folder)):
                return

    async def start(self, owner: str, body: SampleBody) -> tuple[str, int]:
        """Starts a request; returns its id and the number of samples. A retry starts nothing.

        Raises:
          UserError, RequestRejected: If it cannot be sampled, or not now.
        """
        if what := body.unsupported():
            raise UnsupportedError(f"{what}: not supported by this server")
        if body.sampling_session_id is None or body.seq_id is None:
            raise SampleError("sampling_session_id and seq_id: required; create a sampling client")
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        sampler = self._records.sampler(owner, body.sampling_session_id)
        if request_id not in self._tasks:
            started = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._run(owner, sampler.get("model_path"), body, started))
            self._tasks[request_id] = owner, task
            try:
                await asyncio.shield(started)  # a client that leaves may ask again
            except Exception:
                self._tasks.pop(request_id, None)
                raise
            self._drop_oldest()
        return request_id, body.num_samples

    def _drop_oldest(self) -> None:
        surplus = len(self._tasks) - _NUM_RESULTS
        for request_id in [k for k, (_, task) in self._tasks.items() if task.done()]:
            if surplus <= 0:
                return
            del self._tasks[request_id]
            surplus -= 1

    async def _run(
        self,
        owner: str,
        model_path: str | None,
        body: SampleBody,
        started: "asyncio.Future[None]",
    ) -> Outcome:
        """The result of a request; an error before the engine has it goes to `started`."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            try:
                slot = None
                if model_path:
                    path = CheckpointPath.parse(model_path)
                    self._records.checkpoint(owner, path)
                    folder = str(self._records.checkpoint_folder(path) / "adapters")
                    lease = self._pool.lease(model_path, folder)
                    slot = await loop.run_in_executor(None, stack.enter_context, lease)
                run = SampleRun(self._driver, engine_request(body, self._served, slot), body)
            except Exception as error:
                started.set_exception(error)
                return Outcome.failure("not started", "server")
            started.set_result(None)
            try:
                return Outcome("protobuf", await run.result())
            except RequestRejected as error:
                return Outcome.failure(str(error), "user" if error.reason == "unfit" else "server")
            except UserError as error:
                return Outcome.failure(str(error), "user")
            except Exception as error:
                logging.exception("a request for samples failed")
                return Outcome.failure(f"asample: {type(error).__name__}", "server")

    def future(self, owner: str, request_id: str) -> "asyncio.Task[Outcome] | None":
        """The future of a request; None if its result is no longer kept.

        Raises:
          RecordNotFoundError: If it is of no sampler of this owner.
        """
        sampler_id, _, _ = request_id.rpartition(":")
        self._records.sampler(owner, sampler_id)
        entry = self._tasks.get(request_id)
        return entry[1] if entry is not None and entry[0] == owner else None

    def cancel(self, owner: str, request_id: str) -> None:
        """Ends the work on a request. No-op if it has ended."""
        task = self.future(owner, request_id)
        if task is not None:
            task.cancel()
            del self._tasks[request_id]


def sampler_path(records: Records, owner: str, model_path: str) -> str:
    """Checks the weights of a new sampler; raises RecordError, RecordNotFoundError."""
    path = CheckpointPath.parse(model_path)
    if path.kind != "sampler_weights":
        raise RecordError(
            f"model_path {model_path[:200]!r}: is not for sampling; save_weights_for_sampler"
            " writes such weights"
        )
    records.checkpoint(owner, path)
    return str(path)
