"""What stands before the handlers: limits on bodies, and the count of replies."""

import asyncio
import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl_llm.serving.metrics import Metrics


class BodyLimit:
    """413 for a body over `max_bytes`, 408 for one slower than `timeout_s`, before it is whole."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float):
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        deadline = time.monotonic() + self._timeout_s
        num_bytes, arrived = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, arrived
            if arrived:  # after the body, the next message says that the client left
                return await receive()
            try:
                left_s = max(0.0, deadline - time.monotonic())
                message = await asyncio.wait_for(receive(), left_s)
            except TimeoutError:
                raise HTTPException(
                    408, f"the body did not arrive within {self._timeout_s:g} s"
                ) from None
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                arrived = not message.get("more_body", False)
                if num_bytes > self._max_bytes:
                    raise HTTPException(413, f"the body is over {self._max_bytes} bytes; send less")
            return message

        await self._app(scope, limited, send)


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


class Count:
    """Counts requests by path and status, and why some were not served."""

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # Each label is kept for ever: paths that are no route share one.
                path = getattr(scope.get("route"), "path", "other")
                status = message["status"]
                self._metrics.requests.labels(path, str(status)).inc()
                if status >= 400 and path.startswith("/v1/"):
                    reason = _REASONS.get(status, "invalid" if status < 500 else "fault")
                    self._metrics.rejected.labels(reason).inc()
            await send(message)

        await self._app(scope, receive, counted)
