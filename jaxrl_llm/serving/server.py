"""A serving process from its first request to its last: sockets, signals, exit status."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence

import uvicorn
from absl import logging
from starlette.types import ASGIApp

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.jitted import Program
from jaxrl_llm.serving.driver import Driver

_FLUSH_S = 10  # for finished replies to reach their clients, before the process ends
_LOOK_S = 0.2  # between two checks whether to end


class ServerError(UserError):
    """The server cannot listen, or its engine broke."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address; port 0 is any that is free."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ServerError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    return listener


def run(
    app: ASGIApp,
    driver: Driver,
    listener: socket.socket,
    *,
    programs: Sequence[Program],
    reload: Callable[[], Params],
    grace_s: float,
    max_connections: int,
) -> None:
    """Serves until SIGTERM or SIGINT; then refuses new requests, finishes others in `grace_s`.

    `programs` are compiled while there are no requests; `reload` reads weights when SIGHUP comes.
    """

    def finish() -> None:
        begun = time.monotonic()
        driver.refuse()
        if not driver.drain(grace_s):
            logging.warning("%d samples did not finish in time", driver.num_unfinished)
        driver.close()
        logging.info("stopped after %.1f s", time.monotonic() - begun)

    def renew() -> None:
        try:
            driver.use(reload())
            logging.info("serving the newest weights")
        except Exception:  # whatever it is, serving goes on
            logging.exception("weights were not reloaded; serving those from before")

    settings = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_FLUSH_S,
    )

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, renew))
        server = uvicorn.Server(settings)
        # Its own handlers of signals would end connections before the work is done.
        server.capture_signals = contextlib.nullcontext  # type: ignore
        driver.start(programs, loop.call_soon_threadsafe)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.001)
        logging.info("ready, serving on http://%s:%d", *listener.getsockname()[:2])
        if programs:
            logging.info("%d programs are compiled while there are no requests", len(programs))
        while not (stop.is_set() or serving.done() or driver.state == "failed"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_S)
        logging.info("stopping: %d samples are unfinished", driver.num_unfinished)
        await loop.run_in_executor(None, finish)
        server.should_exit = True
        await serving

    listener.listen(1024)
    asyncio.run(serve())
    if driver.state == "failed":
        raise ServerError("the engine failed; its error is above. Start the server again")
