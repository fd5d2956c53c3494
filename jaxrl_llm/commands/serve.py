"""Serves a model with OpenAI's HTTP API; see docs/serving.md."""

import sys

from absl import logging

from jaxrl_llm import program
from jaxrl_llm.commands.options import Serve
from jaxrl_llm.learner import saved
from jaxrl_llm.serving.driver import Driver

try:
    from jaxrl_llm.serving import server
    from jaxrl_llm.serving.app import make_app
    from jaxrl_llm.serving.metrics import Metrics
except ModuleNotFoundError as error:
    sys.exit(f"{error}; serving needs more than the package: pip install 'jaxrl_llm[serve]'")


def main(options: Serve) -> None:
    program.keep_compilations(options.model or options.workdir)
    listener = server.listen(options.host, options.port)
    if options.model:
        source = saved.from_model(saved.model_config(options.model, options.dtype, options.tensor))
    else:
        source = saved.from_run(options.workdir)
    treatment = options.special_tokens
    served = server.served(source, options.name, options.max_tokens, treatment)
    engine = server.engine(
        source, served, options.num_slots, options.chunk_steps, options.draft_tokens
    )
    logging.info("reading the weights of %s", source.name)
    params = source.weights().params
    driver = Driver(engine, params, max_waiting=options.max_waiting)
    body_bytes = options.body_bytes or (2**20 if served.pictures is None else 2**25)
    app = make_app(served, driver, Metrics(driver), options.request_s, body_bytes)
    longest = served.max_tokens - 1  # one token must fit
    filters = (False, True) if options.warm_up_prompts else ()
    programs = engine.jitted.programs(options.warm_up_prompts, longest, filters)
    del params  # otherwise they stay in memory after SIGHUP has loaded new weights
    read = lambda: source.weights().params  # noqa: E731
    server.run(
        app,
        driver,
        listener,
        programs=programs,
        reload=read,
        grace_s=options.grace_s,
        max_connections=max(256, 4 * driver.capacity),
    )
