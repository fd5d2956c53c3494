"""JetStream's own orchestrator and gRPC server over the engine; a process of its own, for it may
kill itself."""

import concurrent.futures
import contextlib
import socket

import numpy as np
import pytest
import serving_model
import tiny

from jaxrl_llm.data.token_names import detokenizer
from jaxrl_llm.data.tokenizer import load_tokenizer
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

pytestmark = pytest.mark.slow
LIMIT = 128
TEXTS = ("The quick", "brown", "In the beginning", "你好", "Übung", "fox jumps over", "a", "world")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("jetstream") / "tiny-model"
    serving_model.make_folder(path)
    return path


@contextlib.contextmanager
def jetstream(folder, *flags):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = serving_model.Server(
        *("launch/serve_jetstream.py", f"--model={folder}", f"--port={port}"),
        *(f"--max_tokens={LIMIT}", "--num_slots=4", *flags),
    )
    try:
        yield server, server.address(" by JetStream on ")
    finally:
        server.kill()


@pytest.fixture(scope="module")
def running(folder):
    with jetstream(folder) as server:
        yield server


@pytest.fixture(scope="module")
def stub(running):
    import grpc
    from jetstream.core.proto import jetstream_pb2_grpc

    with grpc.insecure_channel(running[1]) as channel:
        yield jetstream_pb2_grpc.OrchestratorStub(channel)


def ask(stub, max_tokens, text=None, tokens=None, **fields):
    """Returns the text and the tokens of a reply."""
    from jetstream.core.proto import jetstream_pb2

    kind = jetstream_pb2.DecodeRequest
    if text is not None:
        fields["text_content"] = kind.TextContent(text=text)
    if tokens is not None:
        fields["token_content"] = kind.TokenContent(token_ids=tokens)
    request = kind(max_tokens=max_tokens, **fields)
    samples = [r.stream_content.samples[0] for r in stub.Decode(request, timeout=60)]
    return "".join(s.text for s in samples), [t for s in samples for t in s.token_ids]


@pytest.fixture(scope="module")
def expected(folder, tokenizer):
    """Returns our engine's greedy tokens for a prompt, without the end of sequence."""
    net, mesh = serving_model.network(tokenizer), tiny.make_mesh()
    engine = Engine(net, mesh, num_slots=4, max_tokens=LIMIT)
    weights = tiny.rollout_params(checkpoint.load(folder, net), mesh, net)

    def expected(tokens, max_tokens):
        params = SamplingParams(max_tokens, 0.0, stop_tokens=(tokenizer.eos_token_id,))
        request = Request(tuple(tokens), np.zeros((1, 2), np.uint32), (params,))
        (((completion),),) = engine.generate(weights, [request])
        return completion.tokens[: -1 if completion.is_stopped else None]

    return expected


def test_replies_are_the_engines(stub, expected, tokenizer):
    # Twice as many as slots, of two lengths, as text and as token ids.
    wanted = [
        (text, 12 + 9 * (i % 2), expected(tokenizer(text)["input_ids"], 12 + 9 * (i % 2)))
        for i, text in enumerate(TEXTS)
    ]

    def reply(case):
        text, limit, _ = case
        return ask(stub, limit, text=text), ask(stub, limit, tokens=tokenizer(text)["input_ids"])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(reply, wanted))
    for (_, _, tokens), ((text, from_text), (_, from_tokens)) in zip(wanted, replies, strict=True):
        assert from_tokens == tokens
        # JetStream keeps the bytes of a character back that never comes.
        assert from_text == tokens[: len(from_text)]
        if len(from_text) == len(tokens):
            assert text == detokenizer(tokenizer)(tokens)


def test_a_reply_may_fill_the_cache(stub, expected):
    prompt = [70] * 100
    assert ask(stub, LIMIT - 100, tokens=prompt)[1] == expected(prompt, LIMIT - 100)


@pytest.mark.parametrize(
    "case, message",
    [
        ({"max_tokens": 4, "tokens": [5] * LIMIT}, "a prompt of 128 tokens"),
        ({"max_tokens": LIMIT, "tokens": [5]}, "between 1 and 127"),
        ({"max_tokens": 0, "tokens": [5]}, "between 1 and 127"),
        ({"max_tokens": 4, "tokens": [320]}, "outside the vocabulary of 320"),
        ({"max_tokens": 4, "tokens": []}, "a prompt of 0 tokens"),
        ({"max_tokens": 4, "text": "x", "session_cache": "y"}, "session_cache is not supported"),
        ({"max_tokens": 4}, "neither text_content nor token_content"),
    ],
)
def test_requests_that_would_kill_the_server_are_refused(stub, running, case, message):
    import grpc

    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, **case)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in caught.value.details()
    assert running[0].process.poll() is None


def test_server_becomes_live_and_stops_cleanly(folder, running, stub):
    import grpc
    from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=30).is_live
    with jetstream(folder, "--temperature=1") as (server, address):
        with grpc.insecure_channel(address) as channel:
            sampler = jetstream_pb2_grpc.OrchestratorStub(channel)
            one, two = (ask(sampler, 20, tokens=[70, 71])[1] for _ in range(2))
        assert one != two  # each insertion has random numbers of its own
        server.terminate()
        assert server.wait() == 0
