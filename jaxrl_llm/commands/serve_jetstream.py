"""Serves a model with JetStream's gRPC server; docs/serving.md says what to install."""

import signal
import threading

from absl import logging

from jaxrl_llm import errors, program, saved_policy
from jaxrl_llm.commands.options import ServeJetstreamOptions
from jaxrl_llm.rollout.engine.requests import SamplingParams, number_problem
from jaxrl_llm.serving import server


def main(options: ServeJetstreamOptions) -> None:
    if problem := number_problem("temperature", options.temperature):
        errors.raise_flag_problems([("temperature", problem)])
    # Imported here so that invalid flags are reported even if JetStream is not installed.
    from jaxrl_llm.serving import jetstream

    program.enable_compilation_cache(options.workdir, options.model)
    if options.model:
        source = saved_policy.policy_from_model(saved_policy.sampling_config(options.model))
    else:
        source = saved_policy.policy_from_run(options.workdir)
    served = server.served_model(source, max_tokens=options.max_tokens)
    engine = jetstream.JetStreamEngine(
        server.make_engine(source, served, options.num_slots, chunk_steps=1, full=True),
        served,
        lambda: source.weights().params,
        SamplingParams(1, options.temperature, top_p=options.top_p, stop_tokens=served.eos_tokens),
        options.seed,
    )
    jetstream_server = jetstream.start_server(engine, options.host, options.port)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logging.info("serving %r by JetStream on %s:%d", served.name, options.host, options.port)
    stop.wait()
    jetstream_server.stop()
