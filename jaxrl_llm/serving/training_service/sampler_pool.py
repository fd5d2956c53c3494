"""Samples of saved adapters and of the base model, by the engine that serves them side by side."""

import asyncio
import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.engine.requests import (
    AdapterSlot,
    Completion,
    PromptLogProbs,
    Request,
    SamplingParams,
)
from jaxrl_llm.serving.adapters import AdapterNotFoundError, AdapterPool, NoPlaceError
from jaxrl_llm.serving.driver import RequestDriver, RequestRejected, SampleEvent
from jaxrl_llm.serving.protocol import ServedModel, random_keys
from jaxrl_llm.serving.training_service import wire
from jaxrl_llm.serving.training_service.bodies import SampleBody


class SampleError(UserError, ValueError):
    """A request for samples that this server does not support, or that does not fit."""


class SamplersBusyError(UserError, RuntimeError):
    """All places for adapters are used by requests that run."""


class SamplerPool:
    """Adapters in the places of the engine: those that were used longest ago make way."""

    def __init__(self, pool: AdapterPool):
        self._pool = pool
        self._loaded: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def lease(self, name: str, folder: str) -> Iterator[AdapterSlot]:
        """The place of an adapter, which is loaded if it is not. May take long.

        Raises:
          SamplersBusyError: If every place is used by requests that run.
          UserError: If the folder cannot be loaded.
        """
        with contextlib.ExitStack() as stack:
            with self._lock:
                slot = stack.enter_context(self._load(name, folder))
            yield slot

    def _load(self, name: str, folder: str) -> contextlib.AbstractContextManager[AdapterSlot]:
        if name not in self._loaded:
            self._load_in_free_place(name, folder)
            self._loaded[name] = None
        self._loaded.move_to_end(name)
        return self._pool.lease(name)

    def _load_in_free_place(self, name: str, folder: str) -> None:
        """Loads an adapter, after it has unloaded others until a place is free."""
        while True:
            try:
                self._pool.load(name, folder)
                return
            except NoPlaceError as error:
                if not self._loaded:
                    raise SamplersBusyError(f"sampler {name!r}: {error}") from error
                oldest, _ = self._loaded.popitem(last=False)
                with contextlib.suppress(AdapterNotFoundError):
                    self._pool.unload(oldest)


def engine_request(body: SampleBody, served: ServedModel, adapter: AdapterSlot | None) -> Request:
    """The request of the engine for a body; raises SampleError."""
    tokens = body.tokens()
    room = served.max_tokens - len(tokens)
    if room < 1:
        raise SampleError(
            f"prompt: {len(tokens)} tokens; this server takes at most {served.max_tokens - 1}"
        )
    if unknown := [token for token in tokens if not 0 <= token < served.vocab_size]:
        raise SampleError(
            f"prompt: {unknown[0]} is not a token; the model has 0 to {served.vocab_size - 1}"
        )
    asked = body.sampling_params
    max_tokens = room if asked.max_tokens is None else asked.max_tokens
    if max_tokens > room:
        raise SampleError(
            f"sampling_params.max_tokens: {max_tokens} after a prompt of {len(tokens)} tokens;"
            f" this server takes {served.max_tokens} together"
        )
    stop_tokens, stop_strings = asked.stops(served.eos_tokens)
    params = SamplingParams(
        max_tokens,
        temperature=asked.temperature,
        top_k=max(0, asked.top_k),
        top_p=asked.top_p,
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        num_top_log_probs=body.topk_sample_logprobs,
    )
    keys = random_keys(asked.seed, 1, body.num_samples)[0]
    needs_prompt = bool(body.prompt_logprobs) or body.topk_prompt_logprobs > 0
    return Request(
        tuple(tokens),
        keys,
        (params,) * body.num_samples,
        num_prompt_top=body.topk_prompt_logprobs if needs_prompt else None,
        adapter=adapter,
    )


class SampleRun:
    """A request for samples that the engine works on."""

    def __init__(self, driver: RequestDriver, request: Request, body: SampleBody):
        """Submits the request; raises `RequestRejected`."""
        self._driver, self._body = driver, body
        self._completions = [Completion() for _ in request.params]
        self._prompt: list[PromptLogProbs] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ticket = driver.submit([request], self._listen)

    def _listen(self, event: SampleEvent) -> None:
        if self._done.done():
            return
        if isinstance(event, RequestRejected):
            self._done.set_exception(event)
            return
        index, progress = event
        completion = self._completions[index]
        completion.tokens += progress.tokens
        completion.log_probs += progress.log_probs
        completion.top_log_probs += progress.top_log_probs
        completion.finish_reason = progress.finish_reason
        if progress.prompt_log_probs is not None and not self._prompt:
            self._prompt.append(progress.prompt_log_probs)
        if all(each.finish_reason for each in self._completions):
            self._done.set_result(None)

    async def result(self) -> bytes:
        """The samples as a protobuf `SampleResponse`.

        Cancelled, it ends the work of the engine. Raises `RequestRejected`.
        """
        try:
            await self._done
        except asyncio.CancelledError:
            self._driver.cancel(self._ticket)
            raise
        samples = [
            wire.FinishedSample(c.tokens, c.log_probs, c.finish_reason, c.top_log_probs)
            for c in self._completions
        ]
        return wire.encode_samples(samples, _sampled_prompt(self._prompt, self._body))


def _sampled_prompt(prompt: list[PromptLogProbs], body: SampleBody) -> wire.SampledPrompt | None:
    if not prompt:
        return None
    values: Any = [np.array(array, copy=True) for array in prompt[0]]
    log_probs, _, top_tokens, top_log_probs = values
    unscored = 1  # nothing precedes the first token
    if body.prompt_logprobs_last_n is not None:
        unscored = max(1, len(log_probs) - body.prompt_logprobs_last_n)
    log_probs = log_probs.astype(np.float32)
    log_probs[:unscored] = np.nan
    top_log_probs = top_log_probs.astype(np.float32)
    top_log_probs[:unscored] = np.nan
    return wire.SampledPrompt(log_probs, top_tokens, top_log_probs)
