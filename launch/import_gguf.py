"""Makes a Hugging Face folder of a GGUF file, tokenizer and chat template included.

`python launch/import_gguf.py --file=FILE --out=FOLDER`; needs `pip install 'jaxrl_llm[gguf]'`.
"""

import numpy as np
from absl import flags, logging
from jax import numpy as jnp

from jaxrl_llm import errors, program
from jaxrl_llm.data import tokenizer as tokenizer_lib
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.transformer import Network

FILE = flags.DEFINE_string("file", None, "GGUF file of a known family.", required=True)
OUT = flags.DEFINE_string(
    "out", None, "Folder to write: new, empty or an earlier export.", required=True
)
DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "Of the tensors in the folder."
)
TOKENIZER = flags.DEFINE_string(
    "tokenizer", "", "Hugging Face folder with the tokenizer; empty: that of the file."
)


def main():
    errors.check_package("gguf", "gguf", "launch/import_gguf.py")
    from jaxrl_llm.data import gguf_tokenizer
    from jaxrl_llm.models import gguf_file

    file = gguf_file.open_file(FILE.value)
    network = Network(gguf_file.read_shape(file))
    dtype = np.dtype(jnp.dtype(DTYPE.value))
    contents = gguf_file.contents(file, network, dtype)
    if TOKENIZER.value:
        tokenizer = tokenizer_lib.load_tokenizer(TOKENIZER.value)
    else:
        tokenizer = gguf_tokenizer.from_fields(file.fields, FILE.value)
    ends = () if TOKENIZER.value else gguf_tokenizer.end_tokens(file.fields)
    huggingface.write(OUT.value, network, contents, dtype, tokenizer, eos_token_ids=ends)
    logging.info("the model of %s is in %s", FILE.value, OUT.value)


if __name__ == "__main__":
    program.run(main)
