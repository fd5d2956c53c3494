"""Biases that select experts stay in float32: read, trained, sampled with and written."""

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from flax import traverse_util

from jaxrl_llm.learner import router_replay
from jaxrl_llm.models.hf import checkpoint, config_reader, random_model, safetensors_file
from jaxrl_llm.models.transformer import Network

SHAPE = config_reader.architecture_from_config({
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
})  # fmt: skip
# Apart by less than bfloat16 tells around 1.
BIASES = 1.0 + np.arange(4, dtype=np.float32) / 1024


def biases_of(tree):
    flat = traverse_util.flatten_dict(tree)
    return [(np.asarray(a), a.dtype) for path, a in flat.items() if path[-1] == "selection_bias"]


def with_biases(tree):
    return jax.tree.map_with_path(
        lambda path, a: (
            jnp.broadcast_to(BIASES, a.shape)
            if getattr(path[-1], "key", "") == "selection_bias"
            else a
        ),
        tree,
    )


def test_no_bias_is_rounded(tmp_path):
    network = Network(SHAPE, param_dtype="bfloat16", compute_dtype="bfloat16")
    params = with_biases(jax.jit(network.init)(jax.random.key(0)))
    assert params["embed"].dtype == "bfloat16"
    checkpoint.save(tmp_path, network, params, dtype="bfloat16")
    (stored,) = [
        tensor
        for name, tensor in safetensors_file.open_folder(tmp_path).items()
        if "e_score_correction_bias" in name
    ]
    np.testing.assert_array_equal(stored.view(), BIASES)
    loaded = checkpoint.load(tmp_path, network)
    mesh = tiny.make_mesh()
    resharder = tiny.resharder(mesh, network, "bfloat16")
    sampled = resharder.reshard(resharder.zeros(), tiny.sharded(loaded, mesh, network))
    assert sampled["embed"].dtype == "bfloat16"
    for tree in (loaded, sampled["layers"][1]):
        ((values, kind),) = biases_of(tree)
        assert kind == "float32"
        np.testing.assert_array_equal(values.reshape(-1), BIASES)
    assert jax.tree.map(lambda a: a.dtype, loaded) == jax.tree.map(
        lambda a: a.dtype, network.abstract_params()
    )


def test_updates_leave_parameters_without_gradient():
    """Weight decay would move them: biases that select experts, and indexers that select keys."""
    network = Network(config_reader.architecture_from_config(random_model.example("glm_moe_dsa")))
    updates = router_replay.with_frozen_biases(jax.tree.map(jnp.ones_like, tiny.params(network)))
    flat = traverse_util.flatten_dict(updates)
    frozen = {path[2:] for path, update in flat.items() if not np.any(update)}
    modules = [("q", "kernel"), ("k", "kernel"), ("weights", "kernel")]
    modules += [("k_norm", "scale"), ("k_norm", "bias")]
    indexer = {("attention", "indexer", *module) for module in modules}
    assert frozen == indexer | {("mlp", "router", "selection_bias")}
