"""Serves a model with JetStream's gRPC server; docs/serving.md says what to install."""

import signal
import threading

from absl import logging

from jaxrl_llm import errors, program
from jaxrl_llm.commands.options import ServeJetstream
from jaxrl_llm.learner import saved
from jaxrl_llm.rollout.requests import SamplingParams, number_problem
from jaxrl_llm.serving import server


def main(options: ServeJetstream) -> None:
    if problem := number_problem("temperature", options.temperature):
        errors.refuse([("temperature", problem)])
    # Imported here so that wrong flags are reported even if JetStream is not installed.
    from jaxrl_llm.serving import jetstream

    program.keep_compilations(options.model or options.workdir)
    if options.model:
        source = saved.from_model(saved.model_config(options.model))
    else:
        source = saved.from_run(options.workdir)
    served = server.served(source, max_tokens=options.max_tokens)
    engine = jetstream.JetStreamEngine(
        server.engine(source, served, options.num_slots, chunk_steps=1, full=True),
        served,
        lambda: source.weights().params,
        SamplingParams(1, options.temperature, top_p=options.top_p, stop_tokens=served.eos_tokens),
        options.seed,
    )
    running = jetstream.run(engine, options.host, options.port)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logging.info("serving %r by JetStream on %s:%d", served.name, options.host, options.port)
    stop.wait()
    running.stop()
