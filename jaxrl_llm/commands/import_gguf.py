"""Converts a GGUF file into a Hugging Face folder."""

import numpy as np
from absl import logging
from jax import numpy as jnp

from jaxrl_llm import errors
from jaxrl_llm.commands.options import ImportOptions
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.storage import model_folder


def main(options: ImportOptions) -> None:
    errors.check_package("gguf", "gguf", "launch/import_gguf.py")
    from jaxrl_llm.data import gguf_tokenizer
    from jaxrl_llm.models.hf import gguf_file

    file = gguf_file.open_file(str(model_folder.local_file(options.file)))
    network = Network(gguf_file.read_architecture(file))
    dtype = np.dtype(jnp.dtype(options.dtype))
    contents = gguf_file.tensor_reader(file, network, dtype)
    if options.tokenizer:
        tokenizer = tokenizer_lib.load_tokenizer(options.tokenizer)
    else:
        tokenizer = gguf_tokenizer.from_fields(file.fields, options.file)
    eos_token_ids = () if options.tokenizer else gguf_tokenizer.end_tokens(file.fields)
    checkpoint.save_streamed(
        options.out, network, contents, dtype, tokenizer, eos_token_ids=eos_token_ids
    )
    logging.info("the model of %s is in %s", options.file, options.out)
