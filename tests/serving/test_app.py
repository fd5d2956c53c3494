"""The application over an engine that can be held: full, slow, stopping, broken."""

import asyncio
import contextlib
import dataclasses
import json

import httpx
import pytest
from serving_engine import CountingEngine

from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.serving.app import make_app
from jaxrl_llm.serving.driver import Driver
from jaxrl_llm.serving.metrics import Metrics
from jaxrl_llm.serving.protocol import ServedModel

SERVED = ServedModel("m", character_tokenizer(), (1,), vocab_size=104, max_tokens=100)
BODY = {"model": "m", "prompt": "abc", "max_tokens": 5}


@contextlib.asynccontextmanager
async def running(engine, max_waiting=2, served=SERVED, **limits):
    """Gives a client of an application in this event loop, and its driver."""
    driver = Driver(engine, 0.0, max_waiting=max_waiting)
    app = make_app(served, driver, Metrics(driver), **limits)
    driver.start(call_soon=asyncio.get_running_loop().call_soon_threadsafe)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        try:
            yield client, driver
        finally:
            engine.may_step.set()
            driver.close()


async def complete(client, **fields):
    return await client.post("/v1/completions", json={**BODY, **fields})


def error_of(reply):
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["type"], error["code"]


def test_a_full_queue_is_429_and_then_served():
    async def scenario():
        engine = CountingEngine(num_slots=1)
        async with running(engine) as (client, driver):
            engine.may_step.clear()
            accepted = asyncio.create_task(complete(client, n=3))
            while driver.num_unfinished < 3:
                await asyncio.sleep(0.001)
            for stream in (False, True):
                reply = await complete(client, stream=stream)
                assert reply.status_code == 429
                assert error_of(reply) == ("rate_limit_error", "queue_full")
                assert int(reply.headers["retry-after"]) > 0
            engine.may_step.set()
            reply = await accepted
            assert [c["finish_reason"] for c in reply.json()["choices"]] == ["length"] * 3
            assert (await complete(client)).status_code == 200
            text = (await client.get("/metrics")).text
            assert 'jaxrl_llm_rejected_total{reason="queue_full"} 2.0' in text
            assert 'jaxrl_llm_requests_total{path="/v1/completions",status="200"} 2.0' in text

    asyncio.run(scenario())


def test_requests_while_stopping_get_503():
    async def scenario():
        engine = CountingEngine()
        async with running(engine) as (client, driver):
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (200, {"status": "ready"})
            engine.may_step.clear()
            accepted = asyncio.create_task(complete(client))
            while not driver.num_unfinished:
                await asyncio.sleep(0.001)
            driver.stop_accepting()
            reply = await complete(client)
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) > 0
            assert error_of(reply) == ("server_error", "not_serving")
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "stopping"})
            engine.may_step.set()
            assert (await accepted).json()["usage"]["completion_tokens"] == 5

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_504_and_given_up(stream):
    async def scenario():
        engine = CountingEngine()
        async with running(engine, request_s=0.05) as (client, driver):
            engine.may_step.clear()
            reply = await complete(client, stream=stream)
            if stream:  # the status is long sent
                assert reply.status_code == 200
                error = json.loads(reply.text.strip().removeprefix("data: "))["error"]
                assert error["code"] == "request_timeout"
            else:
                assert reply.status_code == 504
                assert error_of(reply) == ("timeout_error", "request_timeout")
            engine.may_step.set()
            while driver.num_unfinished:
                await asyncio.sleep(0.001)
            assert engine.num_active == 0

    asyncio.run(scenario())


def test_a_broken_engine_is_500_and_unhealthy():
    async def scenario():
        engine = CountingEngine(breaks=True)
        async with running(engine) as (client, _):
            reply = await complete(client)
            assert reply.status_code == 500
            assert error_of(reply) == ("server_error", "engine_failed")
            assert "device lost" not in reply.text  # details are for the log
            assert (await client.get("/health")).json() == {"status": "failed"}
            assert (await complete(client)).status_code == 503

    asyncio.run(scenario())


def test_engine_refusal_is_400():
    async def scenario():
        async with running(CountingEngine(too_long=5)) as (client, _):
            reply = await complete(client, prompt="abcdef")
            assert reply.status_code == 400
            assert "a prompt of 6 tokens" in reply.json()["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("place", ["submit", "step", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_error_of_one_request_is_its_own_500(stream, place):
    """In the engine's thread, for one of its samples; or in the event loop, making its text."""

    class Cursed:
        """A tokenizer that cannot decode the tenth token."""

        def __getattr__(self, name):
            return getattr(SERVED.tokenizer, name)

        def __call__(self, text):
            return SERVED.tokenizer(text)

        backend_tokenizer = None

        def decode(self, tokens, **kwargs):
            if 19 in list(tokens):
                raise KeyError("a defect")
            return SERVED.tokenizer.decode(tokens, **kwargs)

    async def scenario():
        engine = CountingEngine(cursed=7, fails_in=place)
        served = dataclasses.replace(SERVED, tokenizer=Cursed())
        async with running(engine, served=served, max_waiting=8) as (client, driver):
            engine.may_step.clear()
            good = [asyncio.create_task(complete(client, prompt=[5, 6])) for _ in range(3)]
            bad = {"prompt": [7, 7], "n": 2, "max_tokens": 11, "stream": stream}
            failing = asyncio.create_task(complete(client, **bad))
            while driver.num_unfinished < 5 and not failing.done():  # it may fail at once
                await asyncio.sleep(0.001)
            engine.may_step.set()
            for reply in await asyncio.gather(*good):
                assert reply.json()["usage"]["completion_tokens"] == 5
            reply = await failing
            if stream:  # the status is long sent
                last = reply.text.strip().rpartition("data: ")[2]
                error = json.loads(last)["error"]
                assert reply.status_code == 200 and "[DONE]" not in reply.text
            else:
                error = reply.json()["error"]
                assert reply.status_code == 500
            assert error["type"] == "server_error" and "a defect" not in error["message"]
            while driver.num_unfinished:
                await asyncio.sleep(0.001)
            assert engine.num_active == 0 and (await client.get("/health")).status_code == 200

    asyncio.run(scenario())


def test_a_body_that_never_arrives_is_408():
    async def body():
        yield b"{"
        await asyncio.sleep(30)

    async def scenario():
        async with running(CountingEngine(), body_s=0.05) as (client, _):
            headers = {"content-type": "application/json"}
            reply = await client.post("/v1/completions", content=body(), headers=headers)
            assert reply.status_code == 408
            assert error_of(reply)[0] == "invalid_request_error"

    asyncio.run(scenario())


def test_a_body_that_is_too_large_is_413_before_it_is_whole():
    sent = 0

    async def body():
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * 1000

    async def scenario():
        async with running(CountingEngine(), body_bytes=5000) as (client, _):
            headers = {"content-type": "application/json"}
            reply = await client.post("/v1/completions", content=body(), headers=headers)
            assert reply.status_code == 413 and sent < 10

    asyncio.run(scenario())


def test_every_chunk_of_a_stream_is_an_event():
    async def scenario():
        async with running(CountingEngine()) as (client, _):
            reply = await complete(client, stream=True, n=2, max_tokens=3)
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = reply.text.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
            texts = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == 1]
            tokenizer = character_tokenizer()
            assert texts == [tokenizer.decode([token]) for token in (10, 11, 12)]

    asyncio.run(scenario())
