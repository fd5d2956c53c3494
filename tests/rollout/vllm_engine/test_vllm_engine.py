"""The engine and its worker speak the protocol, whoever dies; vLLM is stood in for."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.vllm import VllmConfig
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.rollout.engine.requests import Request, RequestError, SamplingParams
from jaxrl_llm.rollout.engine_api import ClosableEngine, EngineArgs, WeightsReceiver
from jaxrl_llm.rollout.vllm_engine import wire
from jaxrl_llm.rollout.vllm_engine.engine import VllmEngine
from jaxrl_llm.rollout.vllm_engine.worker_client import VllmError

MESH = tiny.make_mesh()
PARAMS = jax.device_put({**tiny.params(), "layers": ()}) | {
    "layers": tuple(
        jax.tree.map(lambda a, i=i: jax.numpy.asarray(a[i]), tiny.params()["layers"]["0"])
        for i in range(2)
    )
}
LATER = jax.tree.map(lambda a: a + 1, PARAMS)
SHORT = SamplingParams(max_tokens=6)


def engine_of(python, chunk_steps=2, decode=None, continuous=False, **changes):
    args = EngineArgs(
        tiny.NETWORK, MESH, num_slots=4, max_tokens=64, chunk_steps=chunk_steps, decode=decode
    )
    llm_args = {"most": "96"} | changes.pop("llm_args", {})
    config = VllmConfig(python=python, continuous=continuous, llm_args=llm_args, **changes)
    return VllmEngine(args, config)


@pytest.fixture
def make(stand_in):
    engines = []

    def make_engine(**settings):
        engines.append(engine_of(stand_in, **settings))
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


def request(*keys, prompt=(5, 6, 7), params=SHORT, **fields):
    raw = np.array([[key, key + 1] for key in keys], np.uint32)
    return Request(prompt, raw, (params,) * len(keys), **fields)


def finish(engine, *completions, params=PARAMS, version=0):
    progress = []
    while not all(each.finish_reason for each in completions):
        progress += engine.step(params, version)
    return progress


def total(params):
    """The sum of all weights, as the worker computes it."""
    return sum(float(np.asarray(leaf, np.float64).sum()) for leaf in jax.tree.leaves(params))


def test_samples_with_log_probs_and_versions_of_the_weights_that_were_handed_over(make):
    engine = make()
    assert isinstance(engine, WeightsReceiver) and isinstance(engine, ClosableEngine)
    with engine.session():
        number = engine.submit(request(1, 2))
        first, second = engine.completions(number)
        progress = engine.step(PARAMS, 3)
        assert [(p.request, p.sample, len(p.tokens)) for p in progress] == [
            (number, 0, 2),
            (number, 1, 2),
        ]
        finish(engine, first, second, params=LATER, version=4)
    assert first.versions == second.versions == [3, 3, 4, 4, 4, 4]
    assert first.finish_reason == second.finish_reason == "length"
    assert first.tokens != second.tokens and {len(first.tokens), len(second.tokens)} == {6}
    expected = [-abs(total(PARAMS))] * 2 + [-abs(total(LATER))] * 4
    np.testing.assert_allclose(first.log_probs, expected, rtol=1e-5)
    assert engine.compare_weights()["num_compared"] == 26
    statistics = engine.statistics
    assert (statistics.prefill_tokens, statistics.decode_tokens) == (3, 12)
    assert (statistics.decode_steps, statistics.slot_steps) == (6, 12)


def test_a_sample_depends_on_its_key_and_an_aborted_one_goes_on_as_it_would_have(make):
    engine = make()
    whole = engine.completions(engine.submit(request(1)))[0]
    finish(engine, whole)
    again = engine.completions(engine.submit(request(2, 1)))
    finish(engine, *again)
    assert again[1].tokens == whole.tokens != again[0].tokens
    number = engine.submit(request(1))
    engine.step(PARAMS)
    (begun,) = engine.abort(number)
    assert begun.finish_reason == "abort" and begun.tokens == whole.tokens[:2]
    assert engine.abort(number) == []
    rest = dataclasses.replace(SHORT, max_tokens=4)
    prompt = (5, 6, 7, *begun.tokens)
    resumed = engine.completions(engine.submit(request(1, prompt=prompt, params=rest)))[0]
    finish(engine, resumed)
    assert begun.tokens + resumed.tokens == whole.tokens


def test_stop_tokens_and_stop_strings(make):
    engine = make(chunk_steps=16, decode=lambda tokens: "".join(f"<{t}>" for t in tokens))
    whole = engine.completions(engine.submit(request(1)))[0]
    finish(engine, whole)
    stop = whole.tokens[3]
    by_token = dataclasses.replace(SHORT, stop_tokens=(stop,))
    by_string = dataclasses.replace(SHORT, stop_strings=(f"<{stop}>",))
    # The string begins in the part of the response that is in the prompt.
    across = dataclasses.replace(SHORT, stop_strings=(f"<7><{whole.tokens[0]}>",))
    completions = [
        engine.completions(engine.submit(each))[0]
        for each in (
            request(1, params=by_token),
            request(1, params=by_string),
            request(1, params=across, num_partial=1),
        )
    ]
    finish(engine, *completions)
    assert [each.finish_reason for each in completions] == ["stop"] * 3
    assert [each.tokens for each in completions] == [
        whole.tokens[:4],
        whole.tokens[:4],
        whole.tokens[:1],
    ]
    # What the worker has sampled after a stop string is not reported.
    later = engine.completions(engine.submit(request(9)))[0]
    assert {p.request for p in finish(engine, later)} == {3 + 1}


def test_clones_take_turns_in_one_worker_and_lose_no_token(make):
    engine = make()
    expected = engine.completions(engine.submit(request(1)))[0]
    finish(engine, expected)
    device = engine._worker.device
    other = engine.clone()
    (begun,) = engine.completions(engine.submit(request(1)))
    engine.step(PARAMS, 1)
    with other.session():
        sampled = other.completions(other.submit(request(2)))[0]
        finish(other, sampled, params=LATER, version=2)
    assert engine._worker.device == device and set(sampled.versions) == {2}
    finish(engine, begun, params=PARAMS, version=1)
    assert begun.tokens == expected.tokens and set(begun.versions) == {1}
    np.testing.assert_allclose(begun.log_probs, expected.log_probs)


def test_a_continuous_worker_decodes_between_steps(make):
    engine = make(continuous=True, llm_args={"step_s": "0.02"})
    lengthy = dataclasses.replace(SHORT, max_tokens=50)
    number = engine.submit(request(1, params=lengthy))
    (completion,) = engine.completions(number)
    engine.step(PARAMS)
    before = len(completion.tokens)
    time.sleep(0.5)
    engine.step(PARAMS)
    assert len(completion.tokens) - before >= 5
    # An abort brings the last tokens; with them the sample may have ended.
    time.sleep(0.2)
    before = len(completion.tokens)
    engine.abort(number)
    assert len(completion.tokens) > before
    short = engine.submit(request(1, params=dataclasses.replace(SHORT, max_tokens=3)))
    (completion,) = engine.completions(short)
    engine.step(PARAMS)
    time.sleep(0.3)
    engine.abort(short)
    assert completion.finish_reason == "length" and len(completion.tokens) == 3


def test_sleeps_between_sessions_and_gets_its_weights_again(make):
    engine = make(sleep_level=2)
    for version in (0, 0, 1):
        with engine.session():
            (completion,) = engine.completions(engine.submit(request(1)))
            finish(engine, completion, version=version)
        assert engine._worker._is_asleep and set(completion.versions) == {version}


@pytest.mark.parametrize(
    ("llm_args", "message"),
    [
        ({"die_at": "2"}, "the vLLM worker ended with signal SIGKILL in 'step'"),
        ({"die_at": "2", "has_child": "true"}, "the vLLM worker ended with signal SIGKILL"),
        ({"fail_at": "2"}, "vLLM failed in 'step': RuntimeError: out of blocks"),
        ({"no_start": "true"}, "vLLM failed in 'start': ValueError: no kernel image"),
        ({"other_weights": "true"}, "computes with other weights than it was given"),
        ({"hang_at": "2"}, "vllm.timeout_s: no answer to 'step' within 3 s; raise it"),
    ],
)
def test_a_worker_that_fails_says_why_and_leaves_no_process(make, llm_args, message):
    engine = make(llm_args=llm_args, timeout_s=3.0)
    with pytest.raises(VllmError, match=message) as error, engine.session():
        engine.submit(request(1))
        while True:
            engine.step(PARAMS)
    if "other" not in message:
        assert "the same command resumes the run from its last checkpoint" in str(error.value)
    engine.submit(request(2))
    with pytest.raises(VllmError, match=message):  # it is not started again
        engine.step(PARAMS)


RUN = """
import sys, time
sys.path[:0] = {paths}
import test_vllm_engine as tests
from jaxrl_llm.rollout.vllm_engine import worker_client
worker_client.WORKER_SCRIPT, worker_client._PROBE = {script!r}, ""
engine = tests.engine_of(sys.executable, llm_args={{"has_child": "true"}})
engine.submit(tests.request(1))
engine.step(tests.PARAMS)
print(engine._worker.device, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_worker_ends_with_a_run_that_is_killed(stand_in, tmp_path):
    """The run's process has no chance to end the worker and its child."""
    folder, program = pathlib.Path(__file__).parent, tmp_path / "run.py"
    paths = [str(folder), str(pathlib.Path(tiny.__file__).parent)]
    program.write_text(RUN.format(paths=paths, script=str(folder / "stand_in_worker.py")))
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    run = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment
    )
    worker = int(run.stdout.readline().split()[1])
    group = os.getsid(worker)
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 10
    while processes_of(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(group)


def processes_of(session):
    """The pids of a session of processes."""
    pids = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            pids.append(int(entry.parent.name))
    return pids


@pytest.fixture
def listening(stand_in, monkeypatch):
    """The address of a worker that runs already."""
    monkeypatch.setenv(wire.KEY_VARIABLE, "a secret")
    script = pathlib.Path(__file__).with_name("stand_in_worker.py")
    command = [sys.executable, script, "--listen=127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        yield worker.stdout.readline().split()[-1]
        worker.terminate()


def test_a_worker_at_an_address_gets_weights_over_the_connection(listening, monkeypatch):
    for _ in range(2):  # a fresh process for each run
        engine = engine_of("", address=listening)
        (completion,) = engine.completions(engine.submit(request(1)))
        finish(engine, completion)
        np.testing.assert_allclose(completion.log_probs, [-abs(total(PARAMS))] * 6, rtol=1e-5)
        engine.close()
    monkeypatch.setenv(wire.KEY_VARIABLE, "another")
    engine = engine_of("", address=listening)
    engine.submit(request(1))
    with pytest.raises(VllmError, match=r"vllm\.address: no worker answers .*digest"):
        engine.step(PARAMS)
    monkeypatch.delenv(wire.KEY_VARIABLE)
    with pytest.raises(VllmError, match=f"{wire.KEY_VARIABLE} is not set"):
        engine.step(PARAMS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (request(1, prompt=()), "a prompt of 0 tokens"),
        (request(1, params=SamplingParams(3, temperature=0.005)), "vLLM samples at 0.01 or above"),
        (request(1, params=SamplingParams(3, stop_strings=("a",))), "give the engine `decode`"),
        (
            request(1, image_inputs=ImageInputs(*[np.zeros((1, 1))] * 3)),
            "text-only|image_inputs: rollout.engine='vllm' does not",
        ),
    ],
)
def test_a_request_that_vllm_cannot_serve_is_refused(make, changed, message):
    with pytest.raises(RequestError, match=message):
        make().submit(changed)


def test_a_field_of_another_release_is_refused_unless_it_is_off(make):
    @dataclasses.dataclass(frozen=True)
    class MoreParams(SamplingParams):
        penalty: float = 0.0

    engine = make()
    engine.submit(request(1, params=MoreParams(3)))
    with pytest.raises(RequestError, match="penalty: rollout"):
        engine.submit(request(1, params=MoreParams(3, penalty=1.0)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (VllmConfig(), "rollout.vllm.python: rollout.engine='vllm' needs the Python interpreter"),
        (VllmConfig(python="/no/python"), "'/no/python' cannot be started"),
        (VllmConfig(python=sys.executable), "has no package vllm; install it there"),
    ],
)
def test_an_engine_without_vllm_is_refused_before_a_run(config, message):
    with pytest.raises(ConfigError, match=message):
        VllmEngine(EngineArgs(tiny.NETWORK, MESH, num_slots=4, max_tokens=64), config)


def test_a_network_that_no_hugging_face_config_describes_is_refused(stand_in):
    shape = dataclasses.replace(tiny.SHAPE, family="llama", qk_norm=True)
    args = EngineArgs(dataclasses.replace(tiny.NETWORK, shape=shape), MESH, 4, 64)
    with pytest.raises(ConfigError, match="vLLM reads models by their Hugging Face config"):
        VllmEngine(args, VllmConfig(python=stand_in))


def test_messages_are_json_objects():
    from multiprocessing import Pipe

    left, right = Pipe()
    wire.send(left, {"do": "step", "submit": [[1, {"tokens": [1, 2]}]]})
    assert wire.receive(right) == {"do": "step", "submit": [[1, {"tokens": [1, 2]}]]}
    left.send_bytes(json.dumps([1]).encode())
    with pytest.raises(ValueError, match="a message of type list"):
        wire.receive(right)
    left.close()
    with pytest.raises(EOFError):
        wire.receive(right)
    right.close()
