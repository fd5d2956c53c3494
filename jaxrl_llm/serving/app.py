"""The HTTP side: paths, errors, streams. Handlers never touch files or the engine."""

import asyncio
import concurrent.futures
import functools
import json
import operator
import reprlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import fastapi
import prometheus_client
from absl import logging
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl_llm.agents.tools import special_tokens
from jaxrl_llm.serving import fields, replies
from jaxrl_llm.serving.chat import ChatBody
from jaxrl_llm.serving.driver import Driver, Event, Reason, Refused
from jaxrl_llm.serving.metrics import Metrics, count
from jaxrl_llm.serving.protocol import ApiError, CompletionBody, Served, Wanted
from jaxrl_llm.serving.replies import ChatFormat, CompletionFormat, Piece, TokenNames, Transcript
from jaxrl_llm.serving.tool_call_stream import StreamedCall, ToolCallStream

# How it is told why the driver refuses: status, OpenAI's type and code, headers.
_REFUSALS: Mapping[Reason, tuple[int, str, str, Mapping[str, str]]] = {
    "queue_full": (429, "rate_limit_error", "queue_full", {"Retry-After": "1"}),
    "not_serving": (503, "server_error", "not_serving", {"Retry-After": "5"}),
    "unfit": (400, "invalid_request_error", "", {}),
    "request_failed": (500, "server_error", "request_failed", {}),
    "engine_failed": (500, "server_error", "engine_failed", {}),
}


def make_app(
    served: Served,
    driver: Driver,
    metrics: Metrics,
    request_s: float = 600.0,
    body_bytes: int = 2**20,
    body_s: float = 30.0,
) -> fastapi.FastAPI:
    """Returns the application; `driver` must call listeners in its event loop.

    A request may take `request_s` from its acceptance to its last token; its body may have
    `body_bytes` and take `body_s` to arrive.
    """
    app = fastapi.FastAPI(title="jaxrl_llm", docs_url=None, redoc_url=None)
    names = TokenNames(served.tokenizer)
    work_on = functools.partial(_Work, driver, metrics, request_s, _Texts(served))
    # Long texts take long to tokenize; one thread, so that tokenizers need not be shared.
    reader = concurrent.futures.ThreadPoolExecutor(1, "tokenizer")
    card = {"id": served.name, "object": "model", "created": int(time.time())}
    card |= {"owned_by": "jaxrl_llm", "max_model_len": served.max_tokens}

    def check_model(name: str) -> None:
        if name != served.name:
            message = f"model {name[:100]!r} is not served here; use {served.name!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def answer(
        request: fastapi.Request, body: CompletionBody | ChatBody, kind: type[CompletionFormat]
    ) -> Response:
        """Returns the reply, or the stream of it, with the engine already at work."""
        check_model(body.model)
        wanted = await asyncio.get_running_loop().run_in_executor(reader, body.wanted, served)
        form, work = kind(served.name, names, wanted), work_on(wanted)
        if body.stream:
            options = body.stream_options
            counts = bool(options and options.include_usage)
            always = bool(counts and options and options.continuous_usage_stats)
            return _Stream(_server_sent(work, form, counts, always), work)
        with work:
            return await _unless_disconnected(request, _whole(work, form))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: fastapi.Request) -> Response:
        return await answer(request, body, CompletionFormat)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: fastapi.Request) -> Response:
        return await answer(request, body, ChatFormat)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return card

    @app.get("/health")
    async def health() -> JSONResponse:
        state = driver.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        text = prometheus_client.generate_latest(metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def failed(request: fastapi.Request, error: Exception) -> JSONResponse:
        reply = _as_api_error(error)
        return JSONResponse(reply.body, reply.status, reply.headers)

    for kind in (ApiError, Refused, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, failed)
    app.add_middleware(_body_limit, max_bytes=body_bytes, timeout_s=body_s)
    app.add_middleware(count, metrics=metrics)
    return app


def _body_limit(app: ASGIApp, max_bytes: int, timeout_s: float) -> ASGIApp:
    """413 for a body over `max_bytes`, 408 for one slower than `timeout_s`, before it is whole."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        num_bytes, arrived = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, arrived
            if arrived:  # after the body, the next message says that the client left
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                detail = f"the body did not arrive within {timeout_s:g} s"
                raise HTTPException(408, detail) from None
            arrived = not message.get("more_body", False)
            if (num_bytes := num_bytes + len(message.get("body", b""))) > max_bytes:
                raise HTTPException(413, f"the body is over {max_bytes} bytes; send less")
            return message

        await app(scope, limited if scope["type"] == "http" else receive, send)

    return checked


class _Texts:
    """What makes text of tokens, for each sample."""

    def __init__(self, served: Served):
        self._plain = replies.decoder(served.tokenizer)
        self._with_special = replies.decoder(served.tokenizer, skip_special_tokens=False)
        self._special = special_tokens(served.tokenizer)

    def transcripts(self, wanted: Wanted) -> list[Transcript]:
        decode = self._plain if wanted.calls is None else self._with_special
        return [Transcript(decode, p.stop_tokens, p.stop_strings) for p in wanted.params]

    def call_streams(self, wanted: Wanted) -> list[ToolCallStream]:
        """One splitter of text and calls for each sample; empty if the client has no tools."""
        return [ToolCallStream(wanted.calls, self._special) for _ in wanted.params if wanted.calls]


class _Work:
    """One client's request in the engine: submitted when made, given up when left."""

    def __init__(
        self,
        driver: Driver,
        metrics: Metrics,
        limit_s: float,
        texts: _Texts,
        wanted: Wanted,
    ):
        self._driver, self._metrics, self.wanted = driver, metrics, wanted
        self._limit_s, self._begun, self._texts = limit_s, time.monotonic(), texts
        self._num_unfinished = len(wanted.params)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ticket = driver.submit(wanted.requests, self._events.put_nowait)
        metrics.prompt_tokens.inc(wanted.num_prompt_tokens)

    def __enter__(self) -> "_Work":
        return self

    def __exit__(self, *exception: object) -> None:
        """Frees the slots, if the request is not done."""
        self._driver.cancel(self._ticket)
        self._metrics.request_s.observe(time.monotonic() - self._begun)
        if self._num_unfinished:
            self._metrics.cancelled.inc()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields (sample, piece) as they come; raises `Refused`, or an `ApiError` if it is late."""
        transcripts = self._texts.transcripts(self.wanted)
        call_streams = self._texts.call_streams(self.wanted)
        last_s: dict[int, float] = {}  # when a sample's latest tokens came
        while self._num_unfinished:
            try:
                async with asyncio.timeout(self._begun + self._limit_s - time.monotonic()):
                    event = await self._events.get()
            except TimeoutError:
                rule = f"the {self._limit_s:g} s that a request may take; ask for fewer tokens"
                late = ApiError(504, f"not done within {rule}", "timeout_error", "request_timeout")
                raise late from None
            if isinstance(event, Refused):
                self._num_unfinished = 0
                raise event
            index, p = event
            now, num_tokens = time.monotonic(), len(p.tokens)
            self._metrics.generated_tokens.inc(num_tokens)
            if index not in last_s:
                self._metrics.first_token_s.observe(now - self._begun)
            elif num_tokens:
                self._metrics.per_token_s.observe((now - last_s[index]) / num_tokens)
            if num_tokens or index not in last_s:
                last_s[index] = now
            self._num_unfinished -= bool(p.finish_reason)
            text = transcripts[index].extend(p.tokens, p.finish_reason)
            certain = p.tokens, p.log_probs, p.top_log_probs, tuple(transcripts[index].offsets)
            reason: str = p.finish_reason
            calls: tuple[StreamedCall, ...] = ()
            if call_streams:
                ended = bool(reason)
                text, calls = call_streams[index].extend(text, ended, stopped=reason == "stop")
                if reason == "stop" and call_streams[index].num_calls:
                    reason = "tool_calls"
            yield index, Piece(text, *certain, reason, calls)


class _Stream(StreamingResponse):
    """Server-sent events; gives the work up however it ends, even before the first event."""

    def __init__(self, events: AsyncIterator[bytes], work: _Work):
        super().__init__(events, 200, {"Cache-Control": "no-cache"}, "text/event-stream")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._work:
            await super().__call__(scope, receive, send)


async def _server_sent(
    work: _Work, form: CompletionFormat, include_usage: bool, continuous_usage: bool
) -> AsyncIterator[bytes]:
    """Yields the events of a stream.

    The counts of tokens follow in a chunk of their own, or are in every chunk, as they are then.
    """

    def event(chunk: dict[str, Any]) -> bytes:
        if include_usage:
            usage = form.usage(num_tokens) if continuous_usage else None
            chunk = {"usage": usage, **chunk}
        data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        return f"data: {data}\n\n".encode()

    num_tokens = 0
    try:
        for chunk in form.openings():
            yield event(chunk)
        async for index, piece in work.pieces():
            num_tokens += len(piece.tokens)
            # A chunk without text tells nothing, unless log-probs or the end are in it.
            if piece.text or piece.calls or piece.finish_reason or work.wanted.with_log_probs:
                yield event(form.chunk(index, piece))
        if include_usage:
            yield event(form.closing(num_tokens))
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status is sent already
        if not isinstance(error, ApiError | Refused):
            logging.exception("a stream failed")
        yield f"data: {json.dumps(_as_api_error(error).body)}\n\n".encode()


async def _whole(work: _Work, form: CompletionFormat) -> Response:
    samples = [Piece()] * len(work.wanted.params)
    async for index, piece in work.pieces():
        samples[index] = Piece(*map(operator.add, samples[index], piece))
    return JSONResponse(form.reply(samples))


async def _unless_disconnected(
    request: fastapi.Request, work: Coroutine[Any, Any, Response]
) -> Response:
    """Returns what `work` returns; ends it when the client leaves, who then gets no reply."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, leaving = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else Response(status_code=499)
    finally:
        answer.cancel()
        leaving.cancel()


def _as_api_error(error: Exception) -> ApiError:
    """Returns the reply to a request that raised an error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Refused):
        status, kind, code, headers = _REFUSALS[error.reason]
        return ApiError(status, str(error), kind, code, headers=headers)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if not isinstance(error, RequestValidationError):
        # What went wrong is in the log, which clients do not see.
        return ApiError(500, "internal error", kind="server_error")
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        reason = found[0].get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {reason}")
    # Of the members of a union that were tried in a field, the one that got furthest is meant.
    first = max((each for each in found if each["loc"][:2] == found[0]["loc"][:2]), key=_depth)
    place = _keys(error.body, first["loc"][1:], first["type"] == "missing")
    unknown = first["type"] == "extra_forbidden"  # inside of a field
    message = "no such field" if unknown else first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    shown = "" if isinstance(given, dict) else f"; got {reprlib.repr(given)}"
    message = f"{'.'.join(place) or 'body'}: {message}{shown}"
    code = fields.UNSUPPORTED if first["type"] == fields.UNSUPPORTED else ""
    return ApiError(400, message, code=code, param=place[0] if place else "")


def _depth(error: Mapping[str, Any]) -> tuple[int, bool]:
    return len(error["loc"]), error["type"] == fields.UNSUPPORTED


def _keys(body: Any, place: Sequence[str | int], with_last: bool) -> list[str]:
    """The keys of a JSON body among a place of pydantic's, which also names members of unions."""
    keys: list[str] = []
    for number, part in enumerate(place):
        of_list = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if of_list or (isinstance(body, dict) and part in body):
            body = body[part]
        elif not (with_last and number == len(place) - 1):
            continue
        keys.append(str(part))
    return keys
