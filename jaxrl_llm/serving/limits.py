"""Bodies that are too large or too slow are refused before they are held in memory."""

import asyncio
import time

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware: 413 for a body over `max_bytes`, 408 for one slower than `timeout_s`."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float):
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        deadline = time.monotonic() + self._timeout_s
        num_bytes, arrived = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, arrived
            if arrived:  # what follows the body is the client's leaving, whenever that is
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
