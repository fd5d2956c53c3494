"""llama.cpp itself reads our GGUF files: it computes and tokenizes as we do."""

import gguf_models
import jax
import numpy as np
import pytest

from jaxrl_llm.data import gguf_tokenizer
from jaxrl_llm.models.hf import checkpoint, gguf_writer

pytestmark = pytest.mark.parity

TEXT = "hello  12 hell0 \u65e5\u672c caf\u00e9\n\n 123456<|im_end|>x"
ALWAYS = 265  # a token of whole characters in both tokenizers: llama.cpp reports only these


def top_log_probs(server, prompt):
    """Returns the ten likeliest tokens after a prompt with their log-probs."""
    request = {
        "prompt": prompt,
        "max_tokens": 1,
        "logprobs": 10,
        "ignore_eos": True,
        "cache_prompt": False,
        "logit_bias": [[ALWAYS, 1000.0]],  # of what is sampled, not of the reported log-probs
    }
    answer = server.handle_completions(request)
    tokens = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in tokens}


@pytest.mark.parametrize("name", gguf_models.CONFIGS)
def test_llama_cpp_computes_the_same(tmp_path, name):
    xllamacpp = pytest.importorskip("xllamacpp")
    network, tokenizer = gguf_models.network(name), gguf_models.tokenizer(name)
    fields = gguf_tokenizer.to_fields(tokenizer, network.shape.vocab_size)
    read, path = gguf_models.contents(network), tmp_path / "model.gguf"
    gguf_writer.save(path, network, read, fields, weight_type="f16", general_fields={})
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_gpu_layers = str(path), 256, 0
    options.warmup, options.n_parallel, options.cpuparams.n_threads = False, 1, 2
    server = xllamacpp.Server(options)

    checkpoint.save_streamed(tmp_path / "folder", network, read, np.dtype(np.float32))
    params = checkpoint.load(tmp_path / "folder", network)
    tokens = np.random.default_rng(0).integers(5, 260, (1, 200))  # beyond windows and stretching
    positions, segments = np.arange(200)[None], np.ones_like(tokens)
    hidden, _ = network.forward(params, tokens, positions, segments)
    log_probs = np.asarray(jax.nn.log_softmax(network.logits(params, hidden[0, -1])))
    found = top_log_probs(server, tokens[0].tolist())
    # Weights and the KV cache are float16 there: 2 ** -11 of each number, over a few layers.
    for token, value in found.items():
        assert value == pytest.approx(log_probs[token], abs=0.01)
    assert max(found, key=found.get) == log_probs.argmax()

    # A text becomes the same tokens: what follows it is equal to the bit.
    ids = tokenizer.backend_tokenizer.encode(TEXT).ids
    assert top_log_probs(server, TEXT) == top_log_probs(server, ids)
