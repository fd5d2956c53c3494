"""The viewer's web application: one page, its script, and JSON about the runs."""

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

from jaxrl_llm.viewer.runs import Filter, NotARun, Run, chosen_curves

_FILES = {"/": "page.html", "/page.js": "page.js", "/page.css": "page.css"}
# Nothing from elsewhere, no script in the page: samples are texts of a model.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:",
    "Cache-Control": "no-cache",
}


class _Headers:
    """Adds headers to every answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)


def make_app(runs: Sequence[Run], hosts: Sequence[str] = ("*",)) -> Starlette:
    """Returns the application; `hosts` are the names that browsers may call it by.

    Other names are refused, so that a page from elsewhere cannot read samples (DNS rebinding).
    """

    def run_of(request: Request) -> Run:
        try:
            return runs[path_number(request, "run")]
        except IndexError as error:
            raise HTTPException(404, "no such run") from error

    def path_number(request: Request, name: str) -> int:
        digits = request.path_params[name]
        if not re.fullmatch("[0-9]{1,15}", digits):
            raise HTTPException(404, f"no such {name}")
        return int(digits)

    def number(request: Request, name: str, default: float) -> float:
        try:
            found = float(request.query_params.get(name) or default)
        except ValueError as error:
            raise HTTPException(400, f"{name}: not a number") from error
        return default if math.isnan(found) else found

    def count(request: Request, name: str) -> int:
        return int(max(0.0, min(number(request, name, 0.0), 1e15)))

    def refreshed() -> None:
        for run in runs:
            with contextlib.suppress(NotARun):  # it shows what it has
                run.refresh()

    async def about(_: Request) -> Response:
        await run_in_threadpool(refreshed)
        found = [
            {
                "name": run.name,
                "path": str(run.path),
                "last_step": run.last_step,
                "alerts": run.alerts(),
                "memory": run.memory(),
                "dumps": run.steps(),
                "bad_lines": run.bad_lines,
            }
            for run in runs
        ]
        names = sorted({name for run in runs for name in run.columns})
        return JSONResponse({"runs": found, "metrics": names, "chosen": chosen_curves(runs)})

    async def curves(request: Request) -> Response:
        names = request.query_params.getlist("name")[:64]
        return JSONResponse({name: [run.curve(name) for run in runs] for name in names})

    async def samples(request: Request) -> Response:
        asked = request.query_params
        wanted = Filter(
            asked.get("text", ""),
            number(request, "min_score", -math.inf),
            number(request, "max_score", math.inf),
            asked.get("data_source", ""),
            asked.get("stopped", ""),
            asked.get("order", ""),
        )
        step = count(request, "step") if asked.get("step") else None
        first = count(request, "first")
        return JSONResponse(await run_in_threadpool(run_of(request).found, step, wanted, first))

    async def sample(request: Request) -> Response:
        step, row = (path_number(request, name) for name in ("step", "row"))
        found = await run_in_threadpool(run_of(request).sample, step, row)
        if not found:
            raise HTTPException(404, "no such sample")
        return JSONResponse(found)

    async def file(request: Request) -> Response:
        return FileResponse(pathlib.Path(__file__).with_name(_FILES[request.url.path]))

    routes = [Route(path, file) for path in _FILES]
    routes += [
        Route("/api/runs", about),
        Route("/api/curves", curves),
        Route("/api/runs/{run}/samples", samples),
        Route("/api/runs/{run}/samples/{step}/{row}", sample),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
        Middleware(GZipMiddleware),
        Middleware(_Headers),
    ]
    return Starlette(routes=routes, middleware=middleware)
