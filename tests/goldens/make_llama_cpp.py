"""Makes `llama_cpp.json`: what llama.cpp's converter writes of the models of `gguf_models.py`.

In an environment with `pip install -e '.[parity,gguf]'` and sentencepiece:

    PYTHONPATH=.:tests python tests/goldens/make_llama_cpp.py LLAMA_CPP

with a checkout of llama.cpp. Of each model and weight type the file holds the metadata (arrays of
the tokenizer by length and CRC-32), and type, shape and CRC-32 of each tensor. The converter knows
splits of words by a hash of a known vocabulary's ids; the name is given to it here.
"""

import importlib
import json
import pathlib
import sys
import tempfile
import zlib

import gguf
import gguf_models
import numpy as np

from jaxrl_llm.models.hf import checkpoint

CONVERTER = "conversion"  # a package of llama.cpp's checkout
GOLDENS = pathlib.Path(__file__).parent
WEIGHT_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}


def described(path):
    """Returns the fields and tensors of a file, as JSON has them."""
    reader = gguf.GGUFReader(path)
    fields = {}
    for name, field in reader.fields.items():
        value = field.contents()
        if isinstance(value, list) and len(value) > 8:
            value = [len(value), zlib.crc32(json.dumps(value).encode())]
        fields[name] = value
    tensors = {
        tensor.name: [tensor.tensor_type.name, tensor.shape.tolist(), zlib.crc32(tensor.data)]
        for tensor in reader.tensors
    }
    return {"fields": fields, "tensors": tensors}


def main(llama_cpp):
    sys.path.insert(0, llama_cpp)
    conversion = importlib.import_module(CONVERTER)
    with tempfile.TemporaryDirectory() as temporary:
        result = {}
        for name in gguf_models.CONFIGS:
            folder = pathlib.Path(temporary) / name
            network, tokenizer = gguf_models.network(name), gguf_models.tokenizer(name)
            read = gguf_models.contents(network)
            checkpoint.save_streamed(folder, network, read, np.dtype(np.float32), tokenizer)
            architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
            model_class = conversion.get_model_class(architecture)
            split = gguf_models.TOKENIZERS.get(name, {}).get("tokenizer.ggml.pre", "qwen2")
            model_class.get_vocab_base_pre = lambda self, tokenizer, split=split: split
            if name == "gemma2":  # its converter asks for a file of SentencePiece's own format
                model_class._set_vocab_sentencepiece = model_class._set_vocab_llama_hf
            for kind, file_type in WEIGHT_TYPES.items():
                path = pathlib.Path(temporary) / f"{name}-{kind}.gguf"
                model_class(folder, file_type, path).write()
                result[f"{name}.{kind}"] = described(path)
    lines = (f"{json.dumps(key)}: {json.dumps(result[key], sort_keys=True)}" for key in result)
    (GOLDENS / "llama_cpp.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1])
