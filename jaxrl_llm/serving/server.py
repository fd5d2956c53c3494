"""A server process: model, engine, socket, signals, exit status."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from absl import logging
from starlette.types import ASGIApp

from jaxrl_llm.agents.episode import call_format
from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.config.kv_cache_sizing import SequenceLengths
from jaxrl_llm.data.encoding import Treatment, set_treatment
from jaxrl_llm.data.token_names import detokenizer
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout.engine import kv_cache
from jaxrl_llm.rollout.engine.aot_programs import Program
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.saved_policy import SavedPolicy
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.protocol import ServedModel


class ServerError(UserError):
    """The server cannot bind its address, or its engine failed."""


def served_model(
    source: SavedPolicy,
    name: str = "",
    max_tokens: int = 0,
    special_tokens_in_messages: Treatment = "text",
) -> ServedModel:
    """The served model of a policy; "" and 0 keep the name and limit of `source`.

    `special_tokens_in_messages` applies to chats, whatever setting the run was trained with.
    """
    models = source.models
    set_treatment(models.tokenizer, special_tokens_in_messages)
    if backend := getattr(models.tokenizer, "backend_tokenizer", None):
        # tokenizer.json may truncate and pad prompts. Set once: changing it between two calls would
        # block another thread's decoding.
        backend.no_truncation()
        backend.no_padding()
    image_fields: dict[str, Any] = {}
    if models.image_feature_cache is not None:
        image_fields = {
            "image_processor": models.image_processor,
            "image_inputs": models.image_feature_cache.image_inputs,
        }
    return ServedModel(
        name=name or source.name,
        tokenizer=models.tokenizer,
        eos_tokens=models.eos_tokens,
        vocab_size=models.policy.shape.vocab_size,
        max_tokens=max_tokens or source.max_tokens,
        chat_template=source.config.data.chat_template,
        call_format=call_format(source.config.agent, models.tokenizer),
        **image_fields,
    )


def make_engine(
    source: SavedPolicy,
    model: ServedModel,
    num_slots: int = 0,
    chunk_steps: int = 8,
    draft_tokens: int = 0,
    full: bool = False,
    prefix_caching: bool = False,
    network: Network | None = None,
) -> Engine:
    """An engine for serving; fewer `chunk_steps` stream more smoothly, more have less overhead.

    The default of `num_slots` is 16 on CPU and 64 elsewhere, fewer if memory is short. With `full`,
    the KV cache holds the longest reply in all slots at once. Without `prefix_caching`, layers keep
    no more than their attention windows. It is the built-in engine, whatever the run's
    `rollout.engine`. `network` is that of the policy with places for adapters, if any.
    """
    args, max_tokens = source.sampler.engine_args, model.max_tokens
    network, mesh = network or args.network, args.mesh
    max_slots, cache_tokens = 16 if source.models.platform == "cpu" else 64, 0
    if not num_slots:
        num_slots, cache_tokens = kv_cache.fitting_cache_size(
            network,
            mesh,
            SequenceLengths(max_tokens),
            max_slots,
            draft_tokens,
            window_cache=not prefix_caching,
        )
        if full:
            num_slots, cache_tokens = max(1, min(num_slots, cache_tokens // max_tokens)), 0
    return Engine(
        network,
        mesh,
        num_slots=num_slots,
        max_tokens=max_tokens,
        chunk_steps=chunk_steps,
        layout=args.layout,
        speculation=SpeculationConfig(draft_tokens=draft_tokens),
        decode=detokenizer(model.tokenizer),
        cache_tokens=cache_tokens,
        prefix_caching=prefix_caching,
        window_cache=not prefix_caching,
    )


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes any free port."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = addresses[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror}"
        raise ServerError(f"{problem}; choose another --host or --port") from error
    return listener


def http_settings(app: ASGIApp, **limits: Any) -> uvicorn.Config:
    """Settings of uvicorn that all our servers share, and `limits` of its `Config` besides."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        **limits,
    )


@contextlib.contextmanager
def local_server(app: ASGIApp, driver: Driver) -> Iterator[str]:
    """Serves on a free local port from a thread while the context lasts; gives the URL.

    Starts `driver`, and closes it at the end.
    """
    listener = bind_socket("127.0.0.1", 0)
    listener.listen(1024)  # clients may connect before the thread accepts
    server = uvicorn.Server(http_settings(app))

    async def serve() -> None:
        driver.start((), asyncio.get_running_loop().call_soon_threadsafe)
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        driver.close()
        server.should_exit = True
        thread.join()


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
    """Serves until SIGTERM or SIGINT, then rejects new requests and finishes the others.

    `programs` are compiled while idle; `reload` loads new weights on SIGHUP; running requests get
    `grace_s` seconds to finish. Raises ServerError if the engine failed.
    """

    def shut_down() -> None:
        start_s = time.monotonic()
        driver.stop_accepting()
        if not driver.drain(grace_s):
            logging.warning("%d samples did not finish in time", driver.num_unfinished)
        driver.close()
        logging.info("stopped after %.1f s", time.monotonic() - start_s)

    def reload_weights() -> None:
        try:
            driver.update_weights(reload())
            logging.info("serving the newest weights")
        except Exception:  # any error: keep serving
            logging.exception("weights were not reloaded; serving those from before")

    settings = http_settings(
        app,
        limit_concurrency=max_connections,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=10,  # to flush finished replies to their clients
    )

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, reload_weights))
        server = uvicorn.Server(settings)
        # Uvicorn's own signal handlers would close connections before requests are finished.
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
                await asyncio.wait_for(stop.wait(), 0.2)  # poll `driver.state`
        logging.info("stopping: %d samples are unfinished", driver.num_unfinished)
        await loop.run_in_executor(None, shut_down)
        server.should_exit = True
        await serving

    listener.listen(1024)
    asyncio.run(serve())
    if driver.state == "failed":
        raise ServerError("the engine failed; its error is above. Start the server again")
