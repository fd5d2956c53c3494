"""A run that is served while it is trained further."""

import json
import signal
import time

import openai
import pytest
import runs
import serving_model

pytestmark = pytest.mark.slow
QUESTION = "3+4+2="
FEW = {
    "warm_start.num_steps": 2,
    "evaluation.every": 100,
    "checkpoint.every": 1,
    # So few steps find no reward: it is the decay that moves the weights, and visibly.
    "trainer.optimizer.learning_rate": 0.05,
    "trainer.optimizer.weight_decay": 1.0,
    "trainer.optimizer.warmup_steps": 0,
    "trainer.optimizer.schedule": "constant",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache):
    """Returns a function that trains a run up to a step, and its folder."""
    workdir = tmp_path_factory.mktemp("grpo") / "run"

    def train(num_steps):
        settings = {**FEW, "trainer.num_steps": num_steps}
        flags = runs.flags("grpo_tiny", settings)
        runs.launch("train", [*flags, f"--workdir={workdir}"], cache)

    train(2)
    return train, workdir


def generated(workdir, cache):
    """Returns the text and the log-prob of the run's own answer."""
    flags = [f"--workdir={workdir}", f"--prompt={QUESTION}", "--max_tokens=16"]
    said = runs.launch("generate", flags, cache)
    line = json.loads(said)
    return line["output"], pytest.approx(line["log_prob"], abs=1e-3)


def answered(client):
    reply = client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        logprobs=True,
        max_tokens=16,
    )
    (choice,) = reply.choices
    return choice.message.content, sum(entry.logprob for entry in choice.logprobs.content)


def test_a_run_is_served_and_its_newer_weights_after_a_signal(run, cache):
    train, workdir = run
    server = serving_model.Server(
        "launch/serve.py", f"--workdir={workdir}", "--name=policy", "--port=0", "--num_slots=4"
    )
    try:
        url = server.address("serving on ")
        server.wait_ready(url)
        with openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
            first = answered(client)
            assert first == generated(workdir, cache)
            train(4)
            assert answered(client) == first
            server.process.send_signal(signal.SIGHUP)
            newer = generated(workdir, cache)
            end = time.monotonic() + serving_model.HANGS_S
            while answered(client) != newer:
                assert time.monotonic() < end and server.process.poll() is None
                time.sleep(0.1)
            assert answered(client) != first
        server.terminate()
        assert server.wait() == 0
    finally:
        server.kill()
