"""Writes a folder of a random model."""

import pathlib

from absl import logging

from jaxrl_llm.commands.options import RandomModelOptions
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.models.hf import config_reader, random_model


def main(options: RandomModelOptions) -> None:
    tokenizer = tokenizer_lib.load_tokenizer(options.tokenizer)
    if options.model_config:
        config = config_reader.read_json(pathlib.Path(options.model_config))
    else:
        config = random_model.example(options.family, vocab_size=len(tokenizer))
    random_model.save(
        options.out,
        config,
        seed=options.seed,
        dtype=options.dtype,
        tokenizer=tokenizer,
        source=options.model_config or "config.json",
    )
    logging.info("a random model of family %s is in %s", config["model_type"], options.out)
