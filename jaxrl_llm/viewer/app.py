"""The viewer's web application: one page with its script, and a JSON API to the runs."""

import contextlib
import math
import pathlib
import re
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl_llm.viewer.runs import NotARunError, RecordedRun, SampleFilter, default_curves

_FILES = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}
# No third-party resources and no inline scripts: samples are untrusted model output.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:",
    "Cache-Control": "no-cache",
}


class _HeadersMiddleware:
    """Adds the security and cache headers to every response."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def make_app(runs: Sequence[RecordedRun], hosts: Sequence[str] = ("*",)) -> Starlette:
    """The ASGI application; `hosts` are the accepted values of the Host header.

    Other hosts are rejected, so that a foreign page cannot read samples by DNS rebinding.
    """

    def requested_run(request: Request) -> RecordedRun:
        try:
            return runs[path_number(request, "run")]
        except IndexError as error:
            raise HTTPException(404, "no such run") from error

    def path_number(request: Request, name: str) -> int:
        digits = request.path_params[name]
        if not re.fullmatch("[0-9]{1,15}", digits):
            raise HTTPException(404, f"no such {name}")
        return int(digits)

    def query_number(request: Request, name: str, default: float) -> float:
        try:
            value = float(request.query_params.get(name) or default)
        except ValueError as error:
            raise HTTPException(400, f"{name}: not a number") from error
        return default if math.isnan(value) else value

    def query_count(request: Request, name: str) -> int:
        return int(max(0.0, min(query_number(request, name, 0.0), 1e15)))

    def refresh_runs() -> None:
        for run in runs:
            with contextlib.suppress(NotARunError):  # keep showing the data read so far
                run.refresh()

    async def overview(_: Request) -> Response:
        await run_in_threadpool(refresh_runs)
        summaries = [
            {
                "name": run.name,
                "path": str(run.path),
                "last_step": run.last_step,
                "alerts": run.alerts(),
                "memory": run.memory(),
                "dumps": run.dumped_steps(),
                "bad_lines": run.bad_lines,
            }
            for run in runs
        ]
        names = sorted({name for run in runs for name in run.columns})
        return JSONResponse({"runs": summaries, "metrics": names, "chosen": default_curves(runs)})

    async def curves(request: Request) -> Response:
        names = request.query_params.getlist("name")[:64]
        return JSONResponse({name: [run.curve(name) for run in runs] for name in names})

    async def samples(request: Request) -> Response:
        query = request.query_params
        sample_filter = SampleFilter(
            query.get("text", ""),
            query_number(request, "min_score", -math.inf),
            query_number(request, "max_score", math.inf),
            query.get("data_source", ""),
            query.get("stopped", ""),
            query.get("order", ""),
        )
        step = query_count(request, "step") if query.get("step") else None
        first = query_count(request, "first")
        return JSONResponse(
            await run_in_threadpool(requested_run(request).search, step, sample_filter, first)
        )

    async def sample(request: Request) -> Response:
        step, row = (path_number(request, name) for name in ("step", "row"))
        content = await run_in_threadpool(requested_run(request).read_sample, step, row)
        if not content:
            raise HTTPException(404, "no such sample")
        return JSONResponse(content)

    async def file(request: Request) -> Response:
        return FileResponse(pathlib.Path(__file__).with_name(_FILES[request.url.path]))

    routes = [Route(path, file) for path in _FILES]
    routes += [
        Route("/api/runs", overview),
        Route("/api/curves", curves),
        Route("/api/runs/{run}/samples", samples),
        Route("/api/runs/{run}/samples/{step}/{row}", sample),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
        Middleware(GZipMiddleware),
        Middleware(_HeadersMiddleware),
    ]
    return Starlette(routes=routes, middleware=middleware)
