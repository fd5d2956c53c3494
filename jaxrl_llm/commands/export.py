"""Writes what a run learned as a Hugging Face folder."""

from absl import logging

from jaxrl_llm import errors
from jaxrl_llm.commands.options import Export
from jaxrl_llm.learner import saved
from jaxrl_llm.models import families, huggingface, peft_folder
from jaxrl_llm.sharding import hosts


def main(options: Export) -> None:
    found = saved.learned(options.workdir, options.best)
    params, step = found.read()
    models, path = found.models, found.config.model.path
    if options.adapters:
        if not found.config.lora.rank:
            message = f"the run in {options.workdir} has no adapters (lora.rank=0); leave it out"
            errors.refuse([("adapters", message)])
        peft_folder.save(options.out, found.network, params, path)
        logging.info("the adapters after step %d are in %s", step, options.out)
        return
    network, weights = found.network, found.whole(params)
    if models.gallery is not None and network.head == "lm":
        network, weights = models.gallery.joined(network, weights)
    huggingface.save(
        options.out,
        network,
        weights,
        tokenizer=models.tokenizer,
        source_config=families.read_config(path) if path else None,
        dtype=options.dtype or None,
        eos_token_ids=models.eos_tokens,
        generation_config=families.generation_config(path) if path else {},
    )
    if models.pictures is not None and hosts.is_first():
        models.pictures.save(options.out)
    logging.info("the weights after step %d are in %s", step, options.out)
