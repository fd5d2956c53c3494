"""Exports the weights of a run as a Hugging Face folder."""

from absl import logging

from jaxrl_llm import errors, saved_policy
from jaxrl_llm.commands.options import ExportOptions
from jaxrl_llm.models.hf import checkpoint, config_reader, peft_adapter
from jaxrl_llm.sharding import multihost


def main(options: ExportOptions) -> None:
    learned = saved_policy.load_run(options.workdir, options.best)
    params, step = learned.read_params()
    models, path = learned.models, learned.config.model.path
    if options.adapters:
        if not learned.config.lora.rank:
            message = f"the run in {options.workdir} has no adapters (lora.rank=0); leave it out"
            errors.raise_flag_problems([("adapters", message)])
        peft_adapter.save(options.out, learned.network, params, path)
        logging.info("the adapters after step %d are in %s", step, options.out)
        return
    network, weights = learned.network, learned.full_params(params)
    if models.image_feature_cache is not None and network.head == "lm":
        network, weights = models.image_feature_cache.with_tower(network, weights)
    checkpoint.save(
        options.out,
        network,
        weights,
        tokenizer=models.tokenizer,
        source_config=config_reader.read_config(path) if path else None,
        dtype=options.dtype or None,
        eos_token_ids=models.eos_tokens,
        generation_config=config_reader.generation_config(path) if path else {},
    )
    if models.image_processor is not None and multihost.is_first():
        models.image_processor.save(options.out)
    logging.info("the weights after step %d are in %s", step, options.out)
