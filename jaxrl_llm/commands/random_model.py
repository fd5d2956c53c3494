"""Writes a folder of a random model."""

import pathlib

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
    print(f"{options.out}: a random model of family {config['model_type']}", flush=True)
