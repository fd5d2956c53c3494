"""Serves a model with JetStream's gRPC server: `python launch/serve_jetstream.py --model=FOLDER`.

This is for clients that use JetStream's protocol; otherwise use `launch/serve.py`. docs/serving.md
says what to install.
"""

import signal
import threading

from absl import flags, logging

from jaxrl_llm import program
from jaxrl_llm.learner import saved
from jaxrl_llm.rollout.requests import SamplingParams, number_problem
from jaxrl_llm.serving import server

MODEL = flags.DEFINE_string("model", "", "Hugging Face folder.")
WORKDIR = flags.DEFINE_string("workdir", "", "Folder of a run.")
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; there is no access control.")
PORT = flags.DEFINE_integer("port", 9000, "Port to listen on.", 1, 65535)
SLOTS = flags.DEFINE_integer("num_slots", 16, "Samples decoded at the same time.", 1)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 0, "Prompt and reply; 0: up to 4096.", 0)
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Temperature of every reply; 0: greedy.", 0.0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Nucleus sampling: probability to keep.", 1e-6, 1.0)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the samples.", 0)


def main():
    if bool(MODEL.value) == bool(WORKDIR.value):
        program.refuse([("model", "give either --model or --workdir")])
    if problem := number_problem("temperature", TEMPERATURE.value):
        program.refuse([("temperature", problem)])
    # Imported here so that wrong flags are reported even if JetStream is not installed.
    from jaxrl_llm.serving import jetstream

    program.keep_compilations(MODEL.value or WORKDIR.value)
    if MODEL.value:
        source = saved.from_model(saved.model_config(MODEL.value))
    else:
        source = saved.from_run(WORKDIR.value)
    served = server.served(source, max_tokens=MAX_TOKENS.value)
    engine = jetstream.JetStreamEngine(
        server.engine(source, served, SLOTS.value, chunk_steps=1),
        served,
        lambda: source.weights().params,
        SamplingParams(1, TEMPERATURE.value, top_p=TOP_P.value, stop_tokens=served.eos_tokens),
        SEED.value,
    )
    running = jetstream.run(engine, HOST.value, PORT.value)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logging.info("serving %r by JetStream on %s:%d", served.name, HOST.value, PORT.value)
    stop.wait()
    running.stop()


if __name__ == "__main__":
    program.run(main)
