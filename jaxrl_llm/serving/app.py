"""The HTTP side: paths, errors, streams. Handlers never touch files; the engine is elsewhere."""

import asyncio
import concurrent.futures
import dataclasses
import json
import reprlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import fastapi
from absl import logging
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxrl_llm.rollout.requests import Progress
from jaxrl_llm.serving import wanted as wanted_lib
from jaxrl_llm.serving.driver import (
    Driver,
    Event,
    NotServing,
    QueueFull,
    Refused,
    RequestFailed,
    Ticket,
    Unfit,
)
from jaxrl_llm.serving.limits import BodyLimit
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.protocol import ApiError, ChatBody, CompletionBody
from jaxrl_llm.serving.replies import NOTHING, ChatFormat, CompletionFormat, Piece, Samples
from jaxrl_llm.serving.transcript import TokenNames, decoder
from jaxrl_llm.serving.wanted import Served, Wanted

Format = CompletionFormat | ChatFormat

# What went wrong is in the log, which clients do not see.
_FAULT = ApiError(500, "internal error", kind="server_error")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one client may ask of the server."""

    request_s: float = 600.0  # from a request's acceptance to its last token
    body_bytes: int = 2**20
    body_s: float = 30.0  # for a request's body to arrive


def make_app(
    served: Served, driver: Driver, metrics: Metrics, limits: Limits = Limits()
) -> fastapi.FastAPI:
    """Returns the application; `driver` is to call listeners in its event loop."""
    app = fastapi.FastAPI(title="jaxrl_llm", docs_url=None, redoc_url=None)
    service = _Service(served, driver, metrics, limits)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: fastapi.Request) -> Response:
        wanted = await service.read(body.model, wanted_lib.completion, body)
        form = CompletionFormat(
            served.name, service.names, wanted.with_log_probs, wanted.num_top_log_probs
        )
        return await service.answer(request, wanted, form, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: fastapi.Request) -> Response:
        wanted = await service.read(body.model, wanted_lib.chat, body)
        form = ChatFormat(
            served.name, service.names, wanted.with_log_probs, wanted.num_top_log_probs
        )
        return await service.answer(request, wanted, form, body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card

    @app.get("/health")
    async def health() -> JSONResponse:
        state = driver.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.exception_handler(ApiError)
    async def api_error(request: fastapi.Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: fastapi.Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(_malformed(error).body, 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: fastapi.Request, error: HTTPException) -> JSONResponse:
        body = ApiError(error.status_code, str(error.detail)).body
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def fault(request: fastapi.Request, error: Exception) -> JSONResponse:
        return JSONResponse(_FAULT.body, 500)

    app.add_middleware(BodyLimit, max_bytes=limits.body_bytes, timeout_s=limits.body_s)
    app.add_middleware(_Count, metrics=metrics)
    return app


class _Service:
    """What the handlers share."""

    def __init__(self, served: Served, driver: Driver, metrics: Metrics, limits: Limits):
        self._served, self._driver, self._metrics, self._limits = served, driver, metrics, limits
        self._decode = decoder(served.tokenizer)
        self.names = TokenNames(served.tokenizer)
        # Long texts take long to tokenize; one thread, so that tokenizers need not be shared.
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "tokenizer")
        self.card = {
            "id": served.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "jaxrl_llm",
            "max_model_len": served.max_tokens,
        }

    def check_model(self, name: str) -> None:
        if name != self._served.name:
            raise ApiError(
                404,
                f"model {name[:100]!r} is not served here; use {self._served.name!r}",
                code="model_not_found",
                param="model",
            )

    async def read(self, model: str, read: Callable[[Served, Any], Wanted], body: Any) -> Wanted:
        """Returns what a body asks for, tokenized away from the event loop."""
        self.check_model(model)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, read, self._served, body)

    async def answer(
        self, request: fastapi.Request, wanted: Wanted, form: Format, body: Any
    ) -> Response:
        """Returns the reply, or the stream of it, with the engine already at work."""
        work = _Work(self._driver, self._metrics, self._limits.request_s, wanted, self._decode)
        if body.stream:
            return _Stream(_server_sent(work, form, body.include_usage), work)
        with work:
            return await _unless_disconnected(request, _whole(work, form))


class _Work:
    """One client's request in the engine: submitted when made, given up when left."""

    def __init__(self, driver: Driver, metrics: Metrics, limit_s: float, wanted: Wanted, decode):
        self._driver, self._metrics, self.wanted = driver, metrics, wanted
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._begun = time.monotonic()
        self._deadline = self._begun + limit_s
        self._limit_s = limit_s
        self._samples = Samples(decode, wanted.params, wanted.stop_strings)
        self._first_s: dict[int, float] = {}
        self.num_samples = len(wanted.params)
        self.num_tokens = 0
        self._num_unfinished = self.num_samples
        try:
            self._ticket: Ticket = driver.submit(wanted.requests, self._events.put_nowait)
        except Refused as error:
            raise _as_api_error(error) from error
        metrics.prompt_tokens.inc(wanted.num_prompt_tokens)

    def __enter__(self) -> "_Work":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the slots, if the request is not done."""
        self._driver.cancel(self._ticket)
        self._metrics.request_s.observe(time.monotonic() - self._begun)
        if self._num_unfinished:
            self._metrics.cancelled.inc()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields (sample, piece) as they come, until all samples are finished.

        Raises:
          ApiError: If the request was not served to its end, or not in time.
        """
        while self._num_unfinished:
            event = await self._next_event()
            if isinstance(event, Refused):
                self._num_unfinished = 0
                raise _as_api_error(event)
            index, progress = event
            self._observe(index, progress)
            yield index, self._samples.piece(index, progress)

    async def _next_event(self) -> Event:
        if not self._events.empty():
            return self._events.get_nowait()
        left_s = self._deadline - time.monotonic()
        try:
            return await asyncio.wait_for(self._events.get(), max(0.0, left_s))
        except TimeoutError:
            raise ApiError(
                504,
                f"not done within the {self._limit_s:g} s that a request may take;"
                " ask for fewer tokens",
                kind="timeout_error",
                code="request_timeout",
            ) from None

    def _observe(self, index: int, progress: Progress) -> None:
        now, count = time.monotonic(), len(progress.tokens)
        self.num_tokens += count
        self._metrics.generated_tokens.inc(count)
        if index not in self._first_s:
            self._first_s[index] = now
            self._metrics.first_token_s.observe(now - self._begun)
        elif count:
            self._metrics.per_token_s.observe((now - self._first_s[index]) / count)
            self._first_s[index] = now
        self._num_unfinished -= bool(progress.finish_reason)


class _Stream(StreamingResponse):
    """Server-sent events; gives the work up however it ends, even before the first event."""

    def __init__(self, events: AsyncIterator[bytes], work: _Work):
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._work:
            await super().__call__(scope, receive, send)


async def _server_sent(work: _Work, form: Format, include_usage: bool) -> AsyncIterator[bytes]:
    def event(chunk: dict[str, Any]) -> bytes:
        if include_usage:
            chunk = {"usage": None, **chunk}
        data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        return f"data: {data}\n\n".encode()

    prompt_tokens = work.wanted.num_prompt_tokens
    try:
        for index in range(work.num_samples):
            for chunk in form.opening(index):
                yield event(chunk)
        async for index, piece in work.pieces():
            # A chunk without text tells nothing, unless log-probs or the end are in it.
            if piece.text or piece.finish_reason or work.wanted.with_log_probs:
                yield event(form.chunk(index, piece))
        if include_usage:
            yield event(form.closing(prompt_tokens, work.num_tokens))
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status is sent already
        if not isinstance(error, ApiError):
            logging.exception("a stream failed")
            error = _FAULT
        yield f"data: {json.dumps(error.body)}\n\n".encode()


async def _whole(work: _Work, form: Format) -> Response:
    samples = [NOTHING] * work.num_samples
    parts: list[list[Piece]] = [[] for _ in samples]
    async for index, piece in work.pieces():
        parts[index].append(piece)
    for index, pieces in enumerate(parts):
        samples[index] = sum(pieces, NOTHING)
    return JSONResponse(form.reply(samples, work.wanted.num_prompt_tokens, work.num_tokens))


async def _unless_disconnected(request: fastapi.Request, work) -> Response:
    """Returns what `work` returns; ends it when the client leaves, who then gets no reply."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return Response(status_code=499)
        return answer.result()
    finally:
        answer.cancel()
        leaving.cancel()


def _as_api_error(error: Refused) -> ApiError:
    message = str(error)
    match error:
        case QueueFull():
            return ApiError(
                429, message, kind="rate_limit_error", code="queue_full", retry_after_s=1
            )
        case NotServing():
            return ApiError(503, message, kind="server_error", code="not_serving", retry_after_s=5)
        case Unfit():
            return ApiError(400, message)
        case RequestFailed():
            return ApiError(500, message, kind="server_error", code="request_failed")
        case _:
            return ApiError(500, message, kind="server_error", code="engine_failed")


def _malformed(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    # After "body": the field, its part, and the member of a union that was tried.
    place = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":  # inside of a field
        message = "no such field"
    given = first.get("input")
    shown = "" if isinstance(given, dict) else f"; got {reprlib.repr(given)}"
    return ApiError(
        400, f"{'.'.join(place) or 'body'}: {message}{shown}", param=place[0] if place else ""
    )


_REASONS = {
    404: "not_found",
    408: "slow_body",
    413: "body_too_large",
    422: "invalid",
    429: "queue_full",
    499: "client_left",
    503: "not_serving",
    504: "timeout",
}


class _Count:
    """Counts requests by path and status, and why some were not served."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message):
            if message["type"] == "http.response.start":
                self._count(scope, message["status"])
            await send(message)

        await self._app(scope, receive, counted)

    def _count(self, scope: Scope, status: int) -> None:
        # Paths that are no route would be a label each.
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._metrics.requests.labels(path, str(status)).inc()
        if status >= 400 and path.startswith("/v1/"):
            reason = _REASONS.get(status, "invalid" if status < 500 else "fault")
            self._metrics.rejected.labels(reason).inc()
