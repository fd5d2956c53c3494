"""Makes a Hugging Face folder of a GGUF file."""

import numpy as np
from absl import logging
from jax import numpy as jnp

from jaxrl_llm import errors
from jaxrl_llm.commands.options import Import
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.transformer import Network


def main(options: Import) -> None:
    errors.check_package("gguf", "gguf", "launch/import_gguf.py")
    from jaxrl_llm.data import gguf_tokenizer
    from jaxrl_llm.models import gguf_file

    file = gguf_file.open_file(options.file)
    network = Network(gguf_file.read_shape(file))
    dtype = np.dtype(jnp.dtype(options.dtype))
    contents = gguf_file.contents(file, network, dtype)
    if options.tokenizer:
        tokenizer = tokenizer_lib.load_tokenizer(options.tokenizer)
    else:
        tokenizer = gguf_tokenizer.from_fields(file.fields, options.file)
    ends = () if options.tokenizer else gguf_tokenizer.end_tokens(file.fields)
    huggingface.write(options.out, network, contents, dtype, tokenizer, eos_token_ids=ends)
    logging.info("the model of %s is in %s", options.file, options.out)
