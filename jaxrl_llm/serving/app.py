"""The HTTP application: routes, errors, event streams. Handlers never touch files or the engine."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import importlib.metadata
import operator
import reprlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import fastapi
import prometheus_client
from absl import logging
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl_llm.agents.tool_call_scanner import thinking_marks
from jaxrl_llm.agents.tools import special_tokens
from jaxrl_llm.data.token_names import TokenNames, detokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.engine.grammars import Grammar, GrammarError
from jaxrl_llm.rollout.structured_outputs import GrammarSource
from jaxrl_llm.serving import fields, messages_api
from jaxrl_llm.serving.adapter_api import adapter_routes
from jaxrl_llm.serving.adapters import AdapterNotFoundError, AdapterPool
from jaxrl_llm.serving.chat import ChatBody
from jaxrl_llm.serving.driver import RejectReason, RequestDriver, RequestRejected, SampleEvent
from jaxrl_llm.serving.messages_api import CountTokensBody, MessagesBody
from jaxrl_llm.serving.metrics import Metrics, count_requests
from jaxrl_llm.serving.protocol import (
    ApiError,
    CompletionBody,
    GenerationRequest,
    ServedModel,
    StreamOptions,
)
from jaxrl_llm.serving.replies import (
    ChatFormat,
    CompletionFormat,
    IncrementalDetokenizer,
    ReplyFormat,
    SampleDelta,
)
from jaxrl_llm.serving.responses_api.body import ResponseRequest, ResponsesBody
from jaxrl_llm.serving.responses_api.events import ResponsesFormat
from jaxrl_llm.serving.responses_api.fields import PATH as RESPONSES_PATH
from jaxrl_llm.serving.responses_api.store import ResponseStore, storage_routes
from jaxrl_llm.serving.tokenization import DetokenizeBody, TokenizeBody, tokenize_reply
from jaxrl_llm.serving.tool_call_stream import StreamedCall, ToolCallStream

_T = TypeVar("_T")

GRAMMAR_S = 10.0  # in which a request's grammar has to be compiled

# The reply to each reason of the driver to reject: status, OpenAI's error type and code, headers.
_REFUSALS: Mapping[RejectReason, tuple[int, str, str, Mapping[str, str]]] = {
    "queue_full": (429, "rate_limit_error", "queue_full", {"Retry-After": "1"}),
    "not_serving": (503, "server_error", "not_serving", {"Retry-After": "5"}),
    "unfit": (400, "invalid_request_error", "", {}),
    "request_failed": (500, "server_error", "request_failed", {}),
    "engine_failed": (500, "server_error", "engine_failed", {}),
}


def make_app(
    served: ServedModel,
    driver: RequestDriver,
    metrics: Metrics,
    request_s: float = 600.0,
    body_bytes: int = 2**20,
    body_s: float = 30.0,
    store_bytes: int = 2**26,
    adapters: AdapterPool | None = None,
) -> fastapi.FastAPI:
    """The ASGI application of a server; `driver` must call its listeners in the same event loop.

    Args:
      served: The model.
      driver: Runs the engine.
      metrics: Counters and histograms, served at `/metrics`.
      request_s: Time limit of a request in seconds, from acceptance to the last token.
      body_bytes: Largest request body.
      body_s: Seconds in which the body has to arrive.
      store_bytes: Memory for stored responses of the Responses API.
      adapters: LoRA adapters that requests may name as their model.
    """
    app = fastapi.FastAPI(title="jaxrl_llm", docs_url=None, redoc_url=None)
    token_names, store = TokenNames(served.tokenizer), ResponseStore(store_bytes)
    start_request = functools.partial(
        _ActiveRequest, driver, metrics, request_s, _Detokenizers(served), adapters
    )
    # Long texts take long to tokenize, which would block the event loop. One thread, because a
    # tokenizer is not thread-safe.
    tokenizer_thread = concurrent.futures.ThreadPoolExecutor(1, "tokenizer")
    # llguidance bounds its work, but a large schema takes a second. Not in the thread above: the
    # requests without a grammar do not wait.
    grammar_threads = concurrent.futures.ThreadPoolExecutor(2, "grammars")
    model_card = {"id": served.name, "object": "model", "created": int(time.time())}
    model_card |= {"owned_by": "jaxrl_llm", "max_model_len": served.max_tokens}
    model_card |= {"root": served.name, "parent": None, "permission": []}

    def card(name: str) -> dict[str, Any]:
        return (
            model_card if name == served.name else {**model_card, "id": name, "parent": served.name}
        )

    def in_tokenizer_thread(function: Callable[..., _T], *arguments: Any) -> Awaitable[_T]:
        run = contextvars.copy_context().run  # a session is a context variable
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(tokenizer_thread, run, function, *arguments)

    async def compiled_grammar(source: GrammarSource) -> Grammar:
        """The compiled constraint of a reply; an `ApiError` if there is none, or it takes long."""
        task = asyncio.get_running_loop().run_in_executor(
            grammar_threads, served.grammars.compile, source
        )
        try:
            return await asyncio.wait_for(task, GRAMMAR_S)
        except TimeoutError:
            message = f"its grammar is not compiled after {GRAMMAR_S:g} s; simplify it"
            raise ApiError(400, f"{source.setting}: {message}", param=source.setting) from None
        except GrammarError as error:
            raise ApiError(400, str(error), param=source.setting) from error

    def adapter_names() -> list[str]:
        return [adapter.name for adapter in adapters.adapters] if adapters else []

    def check_model(name: str) -> str:
        """The name of the model in replies; an `ApiError` if it is not served."""
        if name in (served.name, *adapter_names()):
            return name
        if served.answers_any_name:
            return served.name
        known = ", ".join(map(repr, (served.name, *adapter_names())))
        message = f"model {name[:100]!r} is not served here; use {known}"
        raise ApiError(404, message, code="model_not_found", param="model")

    async def answer(
        request: fastapi.Request,
        body: CompletionBody | ChatBody | MessagesBody | ResponseRequest,
        make_format: Callable[[str, GenerationRequest], ReplyFormat],
    ) -> Response:
        """The reply, or its event stream; the engine is already working on it."""
        if adapters is not None:
            try:
                await asyncio.to_thread(adapters.load_if_known, body.model)
            except UserError as error:
                raise ApiError(503, str(error), code="model_not_loaded", param="model") from error
        model = check_model(body.model)
        generation = await in_tokenizer_thread(body.generation_request, served)
        if generation.grammar_source is not None:
            grammar = await compiled_grammar(generation.grammar_source)
            generation = generation.with_grammar(grammar)
        adapter = "" if model == served.name else model
        reply_format, active = make_format(model, generation), start_request(adapter, generation)
        if body.stream:
            return _EventStream(_server_sent(active, reply_format), active)
        with active:
            return await _unless_disconnected(request, _complete_reply(active, reply_format))

    def openai_format(
        kind: type[CompletionFormat], options: StreamOptions | None
    ) -> Callable[[str, GenerationRequest], ReplyFormat]:
        include_usage = bool(options and options.include_usage)
        continuous_usage = bool(include_usage and options and options.continuous_usage_stats)
        return lambda model, generation: kind(
            model=model,
            names=token_names,
            generation=generation,
            include_usage=include_usage,
            continuous_usage=continuous_usage,
        )

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: fastapi.Request) -> Response:
        return await answer(request, body, openai_format(CompletionFormat, body.stream_options))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: fastapi.Request) -> Response:
        return await answer(request, body, openai_format(ChatFormat, body.stream_options))

    @app.post(messages_api.PATH)
    async def messages(body: MessagesBody, request: fastapi.Request) -> Response:
        return await answer(request, body, messages_api.MessagesFormat)

    @app.post(f"{messages_api.PATH}/count_tokens")
    async def count_tokens(body: CountTokensBody) -> dict[str, int]:
        check_model(body.model)
        return {"input_tokens": await in_tokenizer_thread(body.num_tokens, served)}

    @app.post(RESPONSES_PATH)
    async def responses(body: ResponsesBody, request: fastapi.Request) -> Response:
        turn = ResponseRequest.from_body(body, store)
        make_format = functools.partial(ResponsesFormat, token_names, store, turn)
        return await answer(request, turn, lambda _, generation: make_format(generation))

    @app.post(f"{RESPONSES_PATH}/input_tokens")
    async def input_tokens(body: ResponsesBody) -> dict[str, Any]:
        check_model(body.model)
        turn = ResponseRequest.from_body(body, store)
        count = await in_tokenizer_thread(turn.num_tokens, served)
        return {"object": "response.input_tokens", "input_tokens": count}

    app.include_router(storage_routes(store))
    if adapters is not None:
        app.include_router(adapter_routes(adapters))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        check_model(body.model or served.name)
        return await in_tokenizer_thread(tokenize_reply, body, served)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        check_model(body.model or served.name)
        return {"prompt": await in_tokenizer_thread(body.text, served)}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in (served.name, *adapter_names())]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(check_model(name))

    @app.get("/health")
    async def health() -> JSONResponse:
        state = driver.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": importlib.metadata.version("jaxrl_llm")}

    @app.get("/metrics")
    async def prometheus() -> Response:
        text = prometheus_client.generate_latest(metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def handle_error(request: fastapi.Request, error: Exception) -> JSONResponse:
        reply = _as_api_error(error)
        is_anthropic = request.url.path.startswith(messages_api.PATH)
        body = messages_api.error_body(reply) if is_anthropic else reply.body
        return JSONResponse(body, reply.status, reply.headers)

    for kind in (ApiError, RequestRejected, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle_error)
    app.add_middleware(_limit_body, max_bytes=body_bytes, timeout_s=body_s)
    app.add_middleware(count_requests, metrics=metrics)
    return app


def _limit_body(app: ASGIApp, max_bytes: int, timeout_s: float) -> ASGIApp:
    """Middleware: 413 for a body over `max_bytes`, 408 for one slower than `timeout_s`, at once."""

    async def app_with_limits(scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        num_bytes, is_complete = 0, False

        async def limited_receive() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # after the body, the next message is the disconnect
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                detail = f"the body did not arrive within {timeout_s:g} s"
                raise HTTPException(408, detail) from None
            is_complete = not message.get("more_body", False)
            if (num_bytes := num_bytes + len(message.get("body", b""))) > max_bytes:
                raise HTTPException(413, f"the body is over {max_bytes} bytes; send less")
            return message

        await app(scope, limited_receive if scope["type"] == "http" else receive, send)

    return app_with_limits


class _Detokenizers:
    """Makes the incremental detokenizers of the samples of a request."""

    def __init__(self, served: ServedModel):
        self._plain = detokenizer(served.tokenizer)
        self._with_special = detokenizer(served.tokenizer, skip_special_tokens=False)
        self._special = special_tokens(served.tokenizer)
        marks = thinking_marks(str(served.tokenizer.chat_template))
        self._hides_marks = any(self._special and self._special.search(mark) for mark in marks)

    def transcripts(self, generation: GenerationRequest) -> list[IncrementalDetokenizer]:
        expected = generation.expected_calls
        needs_special = expected and (expected.call_format or self._hides_marks)
        decode = self._with_special if needs_special else self._plain
        return [
            IncrementalDetokenizer(decode, p.stop_tokens, p.stop_strings, p.min_tokens)
            for p in generation.sampling_params
        ]

    def call_streams(self, generation: GenerationRequest) -> list[ToolCallStream]:
        """A parser of each sample; empty if replies are text alone."""
        return [
            ToolCallStream(generation.expected_calls, self._special)
            for _ in generation.sampling_params
            if generation.expected_calls
        ]


class _ActiveRequest:
    """A client's request in the engine: submitted by `__init__`, cancelled by `__exit__`."""

    def __init__(
        self,
        driver: RequestDriver,
        metrics: Metrics,
        limit_s: float,
        detokenizers: _Detokenizers,
        adapters: AdapterPool | None,
        adapter: str,  # its name; "": the base model
        generation: GenerationRequest,
    ):
        self._driver, self._metrics = driver, metrics
        self._limit_s, self._start_s, self._detokenizers = limit_s, time.monotonic(), detokenizers
        self._num_unfinished = len(generation.sampling_params)
        self._events: asyncio.Queue[SampleEvent] = asyncio.Queue()
        with contextlib.ExitStack() as leases:
            if adapters is not None and adapter:
                generation = generation.with_adapter(leases.enter_context(adapters.lease(adapter)))
            self.generation = generation
            self._ticket = driver.submit(generation.requests, self._events.put_nowait)
            self._leases = leases.pop_all()
        metrics.prompt_tokens.inc(generation.num_prompt_tokens)

    def __enter__(self) -> "_ActiveRequest":
        return self

    def __exit__(self, *exception: object) -> None:
        """Frees the slots of an unfinished request."""
        self._driver.cancel(self._ticket)
        self._leases.close()
        self._metrics.request_s.observe(time.monotonic() - self._start_s)
        if self._num_unfinished:
            self._metrics.cancelled.inc()

    async def pieces(self) -> AsyncIterator[tuple[int, SampleDelta]]:
        """Yields (sample index, piece) as generated; raises `RequestRejected`, or `ApiError` on
        timeout.
        """
        transcripts = self._detokenizers.transcripts(self.generation)
        call_streams = self._detokenizers.call_streams(self.generation)
        last_s: dict[int, float] = {}  # when the latest tokens of a sample arrived
        while self._num_unfinished:
            try:
                async with asyncio.timeout(self._start_s + self._limit_s - time.monotonic()):
                    event = await self._events.get()
            except TimeoutError:
                rule = f"the {self._limit_s:g} s that a request may take; ask for fewer tokens"
                timeout_error = ApiError(
                    504, f"not done within {rule}", "timeout_error", "request_timeout"
                )
                raise timeout_error from None
            if isinstance(event, RequestRejected):
                self._num_unfinished = 0
                raise event
            index, progress = event
            now, num_tokens = time.monotonic(), len(progress.tokens)
            self._metrics.generated_tokens.inc(num_tokens)
            if index not in last_s:
                self._metrics.first_token_s.observe(now - self._start_s)
            elif num_tokens:
                self._metrics.per_token_s.observe((now - last_s[index]) / num_tokens)
            if num_tokens or index not in last_s:
                last_s[index] = now
            self._num_unfinished -= bool(progress.finish_reason)
            text = transcripts[index].extend(progress.tokens, progress.finish_reason)
            offsets = tuple(transcripts[index].offsets)
            reason: str = progress.finish_reason
            reasoning = ""
            calls: tuple[StreamedCall, ...] = ()
            if call_streams:
                is_finished = bool(reason)
                text, reasoning, calls = call_streams[index].extend(
                    text, is_finished, stopped=reason == "stop"
                )
                if reason == "stop" and call_streams[index].num_calls:
                    reason = "tool_calls"
            piece = SampleDelta(
                text=text,
                tokens=progress.tokens,
                log_probs=progress.log_probs,
                top_log_probs=progress.top_log_probs,
                offsets=offsets,
                finish_reason=reason,
                calls=calls,
                reasoning=reasoning,
                stop_string=transcripts[index].stop_string,
                prompt_log_probs=(progress.prompt_log_probs,) if progress.prompt_log_probs else (),
            )
            if self.generation.is_prompt_only:
                piece = SampleDelta(finish_reason="length", prompt_log_probs=piece.prompt_log_probs)
            yield index, piece


class _EventStream(StreamingResponse):
    """Server-sent events; cancels the request however the stream ends, even before it begins."""

    def __init__(self, events: AsyncIterator[bytes], request: _ActiveRequest):
        super().__init__(events, 200, {"Cache-Control": "no-cache"}, "text/event-stream")
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._request:
            await super().__call__(scope, receive, send)


async def _server_sent(request: _ActiveRequest, reply_format: ReplyFormat) -> AsyncIterator[bytes]:
    """Yields the server-sent events of a reply."""
    num_tokens = 0
    try:
        for event in reply_format.opening_events():
            yield event
        async for index, piece in request.pieces():
            num_tokens += len(piece.tokens)
            for event in reply_format.events(index, piece, num_tokens):
                yield event
        for event in reply_format.closing_events(num_tokens):
            yield event
    except Exception as error:  # the status is sent already
        if not isinstance(error, ApiError | RequestRejected):
            logging.exception("a stream failed")
        yield reply_format.error_event(_as_api_error(error))


async def _complete_reply(request: _ActiveRequest, reply_format: ReplyFormat) -> Response:
    samples = [SampleDelta()] * len(request.generation.sampling_params)
    async for index, piece in request.pieces():
        samples[index] = SampleDelta(*map(operator.add, samples[index], piece))
    return JSONResponse(reply_format.reply(samples))


async def _unless_disconnected(
    request: fastapi.Request, reply: Coroutine[Any, Any, Response]
) -> Response:
    """The result of `reply`, cancelled when the client disconnects (499, which nobody receives)."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reply_task, disconnect_task = (
        asyncio.create_task(reply),
        asyncio.create_task(wait_for_disconnect()),
    )
    try:
        await asyncio.wait((reply_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        return reply_task.result() if reply_task.done() else Response(status_code=499)
    finally:
        reply_task.cancel()
        disconnect_task.cancel()


def _as_api_error(error: Exception) -> ApiError:
    """The error reply for an exception raised by a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestRejected):
        status, kind, code, headers = _REFUSALS[error.reason]
        return ApiError(status, str(error), kind, code, headers=headers)
    if isinstance(error, AdapterNotFoundError):  # unloaded since the request arrived
        return ApiError(404, str(error), code="model_not_found", param="model")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    if not isinstance(error, RequestValidationError):
        # Details go to the log, not to clients.
        return ApiError(500, "internal error", kind="server_error")
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        reason = errors[0].get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {reason}")
    # Pydantic reports an error for each member of a union; the deepest is the one that was meant.
    furthest = max(
        (each for each in errors if each["loc"][:2] == errors[0]["loc"][:2]), key=_error_depth
    )
    keys = [str(part) for part in furthest["loc"][1:]]
    if furthest["loc"][0] == "body":
        keys = _body_keys(error.body, furthest["loc"][1:], furthest["type"] == "missing")
    is_unknown = furthest["type"] == "extra_forbidden"  # within a nested object
    message = "no such field" if is_unknown else furthest["msg"].removeprefix("Value error, ")
    value = furthest.get("input")
    suffix = "" if isinstance(value, dict) else f"; got {reprlib.repr(value)}"
    message = f"{'.'.join(keys) or 'body'}: {message}{suffix}"
    code = fields.UNSUPPORTED if furthest["type"] == fields.UNSUPPORTED else ""
    return ApiError(400, message, code=code, param=keys[0] if keys else "")


def _error_depth(error: Mapping[str, Any]) -> tuple[int, bool]:
    return len(error["loc"]), error["type"] == fields.UNSUPPORTED


def _body_keys(body: Any, location: Sequence[str | int], with_last: bool) -> list[str]:
    """The JSON keys in an error location of pydantic, which also names the members of unions."""
    keys: list[str] = []
    for number, part in enumerate(location):
        is_index = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_index or (isinstance(body, dict) and part in body):
            body = body[part]
        elif not (with_last and number == len(location) - 1):
            continue
        keys.append(str(part))
    return keys
