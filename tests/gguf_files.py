"""Small GGUF files, as llama.cpp's converter writes them."""

import gguf
import hf_checkpoints
import numpy as np
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_level(pre="smollm", **changes):
    """Fields of a byte-level tokenizer with four special tokens and a few merges."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
    merged = ["he", "ll", "hell", "hello", "Ġhello", "12", "Ġ1", "Ġ12"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ġ 1", "Ġ 12"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*special, *BYTES, *merged, "[PAD]"],
        "tokenizer.ggml.token_type": [3, 3, 3, 4, *[1] * (len(BYTES) + len(merged)), 5],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }


def sentence_piece(**changes):
    """Fields of a tokenizer of characters and bytes; its pieces are likelier the longer."""
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*[0.0] * 259, *[-10.0] * 5, *map(float, range(-5, 0))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 10],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


VOCABULARY = 288  # rows of the embedding; those of `hf_checkpoints`, then zeros


def network_fields(family):
    """Fields of a family's checkpoint of `hf_checkpoints`; without Llama 3's rotary scaling."""
    config = hf_checkpoints.kept(family)[1]["lm"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "vocab_size": VOCABULARY,
    }
    return {f"{family}.{key}": value for key, value in found.items()}


def tensors(family):
    """Returns a family's tensors by transformers' names."""
    arrays = hf_checkpoints.kept(family)[0]
    found = {k: v for k, v in arrays.items() if k.startswith("model.") or k == "lm_head.weight"}
    if hf_checkpoints.kept(family)[1]["lm"]["tie_word_embeddings"]:
        found.pop("lm_head.weight", None)
    for name in found.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        missing = VOCABULARY - len(found[name])
        found[name] = np.pad(found[name], [(0, missing), (0, 0)])
    return {name: array.astype(np.float32) for name, array in found.items()}


def in_pairs(array, num_heads):
    """Returns rows of queries or keys with those that rotate together side by side."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def network_tensors(family, kind=GGMLQuantizationType.F32):
    """Returns a family's tensors by llama.cpp's names; matrices of 32 columns are of a `kind`."""
    config = hf_checkpoints.kept(family)[1]["lm"]
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(architectures[family], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found = {}
    for name, array in tensors(family).items():
        projection = name.split(".")[-2]
        if family == "llama" and projection in heads:
            array = in_pairs(array, heads[projection])
        small = array.ndim == 1 or array.shape[-1] % 32
        stored = GGMLQuantizationType.F32 if small else kind
        key = theirs.get_name(name, try_suffixes=(".weight", ".bias"))
        found[key] = stored, gguf.quantize(array, stored)
    return found


def write(path, architecture, fields, tensors):
    """Writes a file; a field of None is left out."""
    writer = gguf.GGUFWriter(path, architecture)
    adders = {bool: writer.add_bool, str: writer.add_string, list: writer.add_array}
    adders |= {float: writer.add_float32, int: writer.add_uint32}
    for key, value in fields.items():
        if value is not None:
            adders[type(value)](key, value)
    for name, (kind, array) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make(path, family, kind=GGMLQuantizationType.F32, more_tensors=None, **changes):
    """Writes a family's checkpoint with a tokenizer of bytes."""
    fields = network_fields(family) | byte_level() | changes
    return write(path, family, fields, network_tensors(family, kind) | (more_tensors or {}))
