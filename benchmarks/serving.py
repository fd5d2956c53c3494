"""Compares requests over HTTP with the engine alone, in one run on one machine.

`python benchmarks/serving.py` prints a table: tokens per second of the engine, which gets all
requests at once, and of a server with twice as many clients as slots. It also prints what the
clients measured: time to the first token and time between tokens. The model is random; flags set
its size. Both compile before they are timed. They run in turns, and the table shows medians.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

import httpx
import jax
import numpy as np

from jaxrl_llm import saved_policy
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.serving import server

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAX_TOKENS = 512


def make_model(folder: pathlib.Path, hidden: int, layers: int) -> None:
    """Writes a random model with the character tokenizer."""
    tokenizer = character_tokenizer()
    network = Network(
        Architecture(
            family="qwen2",
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            num_layers=layers,
            num_heads=hidden // 32,
            num_kv_heads=max(1, hidden // 64),
            head_size=32,
            mlp_size=4 * hidden,
            max_positions=MAX_TOKENS,
            qkv_bias=True,
        )
    )
    params = jax.jit(network.init)(jax.random.key(0))
    checkpoint.save(folder, network, params, tokenizer)


def workload(count: int) -> list[tuple[str, int]]:
    """Returns prompts of 8 to 100 characters, and lengths of 20 to 200 tokens."""
    choose = random.Random(0)
    return [("x" * choose.randint(8, 100), choose.randint(20, 200)) for _ in range(count)]


class Alone:
    """The engine in this process."""

    def __init__(self, folder: pathlib.Path, num_slots: int, chunk_steps: int):
        source = saved_policy.policy_from_model(saved_policy.sampling_config(str(folder)))
        self._served = server.served_model(source)
        self._engine = server.make_engine(source, self._served, num_slots, chunk_steps)
        self._params = source.weights().params

    def run(self, work: list[tuple[str, int]]) -> float:
        """Returns seconds."""
        requests = [
            Request(
                tuple(self._served.tokenizer(prompt)["input_ids"]),
                np.array([[0, i]], np.uint32),
                (SamplingParams(length),),
            )
            for i, (prompt, length) in enumerate(work)
        ]
        begun = time.perf_counter()
        self._engine.generate(self._params, requests)
        return time.perf_counter() - begun


class Clients:
    """Clients of a server, each with one request at a time."""

    def __init__(self, url: str, name: str, count: int):
        self._url, self._name, self._count = url, name, count
        self.first_s: list[float] = []
        self.between_s: list[float] = []

    def run(self, work: list[tuple[str, int]], stream: bool) -> float:
        """Returns seconds."""
        begun = time.perf_counter()
        asyncio.run(self._run(work, stream))
        return time.perf_counter() - begun

    async def _run(self, work: list[tuple[str, int]], stream: bool) -> None:
        left = list(enumerate(work))[::-1]
        limits = httpx.Limits(max_connections=self._count)
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=600) as client:

            async def one() -> None:
                while left:
                    seed, (prompt, length) = left.pop()
                    body = {
                        "model": self._name,
                        "prompt": prompt,
                        "max_tokens": length,
                        "seed": seed,
                        "ignore_eos": True,
                        "stream": stream,
                    }
                    await (self._stream if stream else self._whole)(client, body)

            await asyncio.gather(*(one() for _ in range(self._count)))

    async def _whole(self, client: httpx.AsyncClient, body: dict) -> None:
        reply = await client.post("/v1/completions", json=body)
        assert reply.json()["usage"]["completion_tokens"] == body["max_tokens"]

    async def _stream(self, client: httpx.AsyncClient, body: dict) -> None:
        begun, times = time.perf_counter(), []
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        self.first_s.append(times[0] - begun)
        if body["max_tokens"] > 1:
            self.between_s.append((times[-1] - times[0]) / (body["max_tokens"] - 1))


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    p50, p95 = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
    return f"{1000 * p50:.0f} / {1000 * p95:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--num_slots", type=int, default=16)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--chunk_steps", type=int, default=8)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    work = workload(options.requests)
    tokens = sum(length for _, length in work)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name, "random")
        make_model(folder, options.hidden, options.layers)
        server = subprocess.Popen(
            [
                sys.executable,
                str(ROOT / "launch" / "serve.py"),
                f"--model={folder}",
                "--port=0",
                f"--num_slots={options.num_slots}",
                f"--chunk_steps={options.chunk_steps}",
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            assert server.stderr is not None
            url = next(
                line.rpartition(" on ")[2].strip()
                for line in server.stderr
                if "serving on " in line
            )
            while "jaxrl_llm_warm_up_programs 0.0" not in httpx.get(url + "/metrics").text:
                time.sleep(0.1)
            alone = Alone(folder, options.num_slots, options.chunk_steps)
            clients = Clients(url, "random", options.clients)
            seconds: dict[str, list[float]] = {"engine": [], "HTTP": [], "HTTP, streamed": []}
            for attempt in range(options.rounds + 1):  # the first compiles
                found = {
                    "engine": alone.run(work),
                    "HTTP": clients.run(work, stream=False),
                    "HTTP, streamed": clients.run(work, stream=True),
                }
                if attempt == 0:
                    clients.first_s.clear()
                    clients.between_s.clear()
                    continue
                for side, value in found.items():
                    seconds[side].append(value)
        finally:
            server.terminate()
            server.communicate()
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    print("| path | tokens/s | relative to the engine alone |")
    print("|---|---|---|")
    for side, value in medians.items():
        print(f"| {side} | {tokens / value:.0f} | {medians['engine'] / value:.2f} |")
    print(f"\ntime to first token, ms (median / 95 %): {percentiles(clients.first_s)}")
    print(f"time between tokens, ms (median / 95 %): {percentiles(clients.between_s)}")
    print(json.dumps({"seconds": seconds, "tokens": tokens, **vars(options)}))


if __name__ == "__main__":
    main()
