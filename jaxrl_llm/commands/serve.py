"""Serves a model with OpenAI's HTTP API (docs/serving.md), and trains it (docs/service.md)."""

import contextlib
import sys

from absl import logging

from jaxrl_llm import program, saved_policy
from jaxrl_llm.commands.options import ServeOptions
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import aot_programs
from jaxrl_llm.serving.driver import Driver

try:
    from jaxrl_llm.serving import server
    from jaxrl_llm.serving.adapters import AdapterPool
    from jaxrl_llm.serving.app import make_app
    from jaxrl_llm.serving.metrics import Metrics
    from jaxrl_llm.serving.training_service import service
except ModuleNotFoundError as error:
    sys.exit(f"{error}; serving needs more than the package: pip install 'jaxrl_llm[serve]'")


def main(options: ServeOptions) -> None:
    program.enable_compilation_cache(options.workdir, options.model)
    listener = server.bind_socket(options.host, options.port)
    if options.model:
        source = saved_policy.policy_from_model(
            saved_policy.sampling_config(options.model, options.dtype, options.tensor)
        )
    else:
        source = saved_policy.policy_from_run(options.workdir)
    treatment = options.special_tokens
    served = server.served_model(source, options.name, options.max_tokens, treatment)
    api_keys = service.read_api_keys(options.api_keys)
    adapters = None
    if options.adapters or options.max_adapters or options.train:
        adapters = AdapterPool(
            served.name,
            source.models.policy.decoder,
            source.sampler.engine_args,
            options.adapters_by_name,
            options.max_adapters or (service.DEFAULT_PLACES if options.train else 0),
            options.max_adapter_rank or (service.DEFAULT_RANK if options.train else 0),
        )
    engine = server.make_engine(
        source,
        served,
        options.num_slots,
        options.chunk_steps,
        options.draft_tokens,
        prefix_caching=options.prefix_caching,
        network=adapters.network if adapters else None,
    )

    logging.info("reading the weights of %s", source.name)
    training_base = None
    if options.train:
        training_base = service.load_training_base(source, served.max_tokens)

    def load_weights() -> Params:
        if training_base is not None:  # read once, for both layouts
            base = source.sampler.weights(training_base.params)
        else:
            base = source.weights().params
        return adapters.set_base(base) if adapters else base

    params = load_weights()
    driver = Driver(engine, params, max_waiting=options.max_waiting)
    if adapters:
        adapters.connect(driver.update_weights)
    body_bytes = options.body_bytes or (2**20 if served.image_processor is None else 2**25)
    if options.train:
        body_bytes = max(body_bytes, service.BODY_BYTES)
    app = make_app(
        served, driver, Metrics(driver), options.request_s, body_bytes, adapters=adapters
    )
    max_prompt_tokens = served.max_tokens - 1  # room for one generated token
    filter_variants = (False, True) if options.warm_up_prompts else ()
    programs = aot_programs.warmup_programs(
        engine.programs,
        options.warm_up_prompts,
        max_prompt_tokens,
        filter_variants,
        continues=engine.prefix_caching,
    )
    del params  # else the old weights stay in memory after SIGHUP has loaded new ones
    with contextlib.ExitStack() as stack:
        if training_base is not None:
            assert adapters is not None
            stack.enter_context(
                service.training_service(
                    app,
                    served,
                    driver,
                    adapters,
                    training_base,
                    options.train,
                    tokenizer=options.model,
                    max_resident=options.max_training_clients,
                    api_keys=api_keys,
                )
            )
        server.run(
            app,
            driver,
            listener,
            programs=programs,
            reload=load_weights,
            grace_s=options.grace_s,
            max_connections=max(2048 if options.train else 256, 4 * driver.capacity),
        )
