"""A server in this process whose tiny model follows grammars, and schemas to ask it for."""

import asyncio
import contextlib
import dataclasses
import functools

import httpx2
import openai
import serving_chat
import tiny

from jaxrl_llm.data.token_names import detokenizer
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics

MAX_TOKENS = 1024
SERVED = dataclasses.replace(serving_chat.SERVED, max_tokens=MAX_TOKENS)
# Rows of the embedding beyond the tokenizer's tokens, as models have them.
NETWORK = tiny.with_sizes(
    vocab_size=len(serving_chat.TOKENIZER) + 13, num_layers=1, max_positions=MAX_TOKENS
)
SERVED = dataclasses.replace(SERVED, vocab_size=NETWORK.shape.vocab_size)


@functools.cache
def engine_of(served=SERVED, num_slots=8):
    return Engine(
        NETWORK,
        tiny.make_mesh(),
        num_slots=num_slots,
        max_tokens=MAX_TOKENS,
        chunk_steps=8,
        decode=detokenizer(served.tokenizer),
    )


@functools.cache
def weights():
    return tiny.rollout_params(tiny.params(NETWORK, scale=1.0), tiny.make_mesh(), NETWORK)


@contextlib.asynccontextmanager
async def model_server(served=SERVED):
    """Gives an HTTP client of the server, and an `openai` client."""
    engine = engine_of()
    engine.reset()
    driver = Driver(engine, weights(), max_waiting=64)
    app = make_app(served, driver, Metrics(driver))
    driver.start(call_soon=asyncio.get_running_loop().call_soon_threadsafe)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        try:
            yield (
                http,
                openai.AsyncOpenAI(
                    base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
                ),
            )
        finally:
            driver.close()
