"""A serving process: the policy that it serves, its engine, sockets, signals, exit status."""

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from absl import logging
from starlette.types import ASGIApp

from jaxrl_llm.agents.episode import call_format
from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.room import Lengths
from jaxrl_llm.data.encoding import Treatment, set_treatment
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.saved import SavedPolicy
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import cache
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.jitted import Program
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.protocol import Served
from jaxrl_llm.serving.replies import decoder


class ServerError(UserError):
    """The server cannot listen, or its engine broke."""


def served(
    source: SavedPolicy,
    name: str = "",
    max_tokens: int = 0,
    special_tokens_in_messages: Treatment = "text",
) -> Served:
    """Returns what clients may know of a policy; "" and 0 stand for the source's own values.

    `special_tokens_in_messages` is of chats, whatever the run was trained with.
    """
    models = source.models
    set_treatment(models.tokenizer, special_tokens_in_messages)
    if backend := getattr(models.tokenizer, "backend_tokenizer", None):
        # tokenizer.json may cut and pad prompts. To change that between two calls would keep
        # another thread from decoding.
        backend.no_truncation()
        backend.no_padding()
    reads: dict[str, Any] = {}
    if models.gallery is not None:
        reads = {"pictures": models.pictures, "see": models.gallery.sights}
    return Served(
        name=name or source.name,
        tokenizer=models.tokenizer,
        eos_tokens=models.eos_tokens,
        vocab_size=models.policy.shape.vocab_size,
        max_tokens=max_tokens or source.max_tokens,
        chat_template=source.config.data.chat_template,
        call_format=call_format(source.config.agent, models.tokenizer),
        **reads,
    )


def engine(
    source: SavedPolicy,
    model: Served,
    num_slots: int = 0,
    chunk_steps: int = 8,
    draft_tokens: int = 0,
    full: bool = False,
) -> Engine:
    """Returns an engine for serving; fewer `chunk_steps` make streams smoother, more cost less.

    Without `num_slots` it has 16 on CPU, 64 elsewhere, fewer where memory is short. With `full`,
    all of them may hold the longest reply at one time.
    """
    own, max_tokens = source.sampler.engine, model.max_tokens
    network, mesh = own.network, own.mesh
    most, cache_tokens = 16 if source.models.platform == "cpu" else 64, 0
    if not num_slots:
        sizes = Lengths(max_tokens), most, draft_tokens
        num_slots, cache_tokens = cache.fitting(network, mesh, *sizes)
        if full:
            num_slots, cache_tokens = max(1, min(num_slots, cache_tokens // max_tokens)), 0
    return Engine(
        network,
        mesh,
        num_slots=num_slots,
        max_tokens=max_tokens,
        chunk_steps=chunk_steps,
        layout=own.layout,
        speculation=SpeculationConfig(draft_tokens=draft_tokens),
        decode=decoder(model.tokenizer),
        cache_tokens=cache_tokens,
    )


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket bound to an address; port 0 is any that is free."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror}"
        raise ServerError(f"{problem}; choose another --host or --port") from error
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
        timeout_graceful_shutdown=10,  # for finished replies to reach their clients
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
                await asyncio.wait_for(stop.wait(), 0.2)  # until the state is looked at again
        logging.info("stopping: %d samples are unfinished", driver.num_unfinished)
        await loop.run_in_executor(None, finish)
        server.should_exit = True
        await serving

    listener.listen(1024)
    asyncio.run(serve())
    if driver.state == "failed":
        raise ServerError("the engine failed; its error is above. Start the server again")
