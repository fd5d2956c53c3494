"""Random models of every family: folders, meshes, adapters, decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.config.learner import PROJECTIONS
from jaxrl_llm.models import flops, lora
from jaxrl_llm.models.hf import (
    checkpoint,
    config_reader,
    config_writer,
    peft_adapter,
    random_model,
    safetensors_file,
)
from jaxrl_llm.models.hf.families import FAMILIES
from jaxrl_llm.models.hf.family_format import CheckpointFormatError
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

LENGTHS = (21, 17, 10)  # of the sequences of a row; longer than some windows, all than top-k
# With most parts that no other family has; those of the others are tested elsewhere too.
OWN_PARTS = ("glm_moe_dsa", "qwen3_next")
FAMILY = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if family in OWN_PARTS else pytest.mark.nightly)
        for family in random_model.EXAMPLES
    ],
)


@functools.cache
def network_of(family):
    shape = config_reader.architecture_from_config(random_model.example(family))
    return Network(shape).decoder


def rows():
    """Two packed rows of several sequences and their padding."""
    total = sum(LENGTHS)
    tokens = np.random.default_rng(0).integers(0, 96, (2, total)).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    segments = np.repeat([1, 2, 0], LENGTHS)
    return tokens, np.stack([positions] * 2), np.stack([segments, np.ones_like(segments)])


def test_every_family_has_an_example():
    assert random_model.EXAMPLES.keys() == FAMILIES.keys()
    for family, config in random_model.EXAMPLES.items():
        shape = config_reader.architecture_from_config(config)
        assert shape.family == family
        assert config_reader.architecture_from_config(config_writer.to_hf_config(shape)) == shape
        assert flops.training(shape, np.array([20])) > 0
    with pytest.raises(CheckpointFormatError, match="'gpt2' is no known family of models; known"):
        random_model.example("gpt2")


def tensors_of(folder):
    stored = safetensors_file.open_folder(folder)
    return {k: np.ascontiguousarray(t.view()).tobytes() for k, t in stored.items()}


@pytest.mark.parametrize("family", ["phi3", "glm_moe_dsa", "minimax_m2"])
def test_folder_is_read_and_written_bit_for_bit(family, tmp_path):
    config = random_model.example(family, vocab_size=98)
    random_model.save(tmp_path / "first", config, seed=3, dtype="bfloat16")
    network = Network(checkpoint.read_architecture(tmp_path / "first"))
    assert network.shape.vocab_size == 98
    params = checkpoint.load(tmp_path / "first", network)
    checkpoint.save(tmp_path / "again", network, params, dtype="bfloat16")
    first = tensors_of(tmp_path / "first")
    assert tensors_of(tmp_path / "again") == first
    random_model.save(tmp_path / "again", config, seed=4, dtype="bfloat16")
    assert (
        tensors_of(tmp_path / "again")["model.embed_tokens.weight"]
        != first["model.embed_tokens.weight"]
    )


@FAMILY
def test_mesh_does_not_matter(family):
    network = network_of(family)
    weights, (tokens, positions, segments) = tiny.params(network, scale=4.0), rows()
    picked = np.random.default_rng(1).standard_normal((*tokens.shape, 96)).astype(np.float32)

    def loss(params):
        hidden = tiny.hidden_states(network)(params, tokens, positions, segments)
        log_probs = jax.nn.log_softmax(network.logits(params, hidden))
        return jnp.where((segments > 0)[..., None], log_probs * picked, 0.0).sum(), log_probs

    compute = jax.jit(jax.grad(loss, has_aux=True))
    wanted, wanted_log_probs = compute(weights)
    sizes = [{"fsdp": 2, "tensor": 2, "sequence": 2}, {"data": 2, "tensor": 4}]
    if network.shape.experts:
        sizes.append({"expert": 2, "fsdp": 2, "sequence": 2})
    for mesh in map(lambda s: tiny.make_mesh(**s), sizes):
        with jax.set_mesh(mesh):
            found, log_probs = compute(tiny.sharded(weights, mesh, network))
        counted = segments > 0
        np.testing.assert_allclose(log_probs[counted], wanted_log_probs[counted], atol=1e-5)
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want) + 1e-5


@FAMILY
def test_log_probs_of_samples_are_those_of_a_whole_pass(family):
    """Over two devices, in groups of samples, past every window and choice of keys."""
    network, mesh = network_of(family), tiny.make_mesh(tensor=2)
    weights = tiny.params(network, scale=4.0)
    params = tiny.rollout_params(weights, mesh, network)
    engine = Engine(network, mesh, num_slots=4, max_tokens=96, chunk_steps=8)
    random = np.random.default_rng(2)
    prompts = [tuple(random.integers(3, 96, n).tolist()) for n in (40, 7, 26)]
    keys = np.arange(4, dtype=np.uint32).reshape(2, 2)
    requests = [Request(p, keys, (SamplingParams(24),) * 2) for p in prompts]
    samples = [
        (prompt, completion)
        for prompt, group in zip(prompts, engine.generate(params, requests), strict=True)
        for completion in group
    ]
    padded = np.zeros((len(samples), 96), np.int32)
    for row, (prompt, completion) in zip(padded, samples, strict=True):
        row[: len(prompt) + 24] = [*prompt, *completion.tokens]
    wanted = tiny.teacher_forced(padded, jnp.ones(len(samples)), network, weights)
    for row, (prompt, completion) in zip(wanted, samples, strict=True):
        np.testing.assert_allclose(completion.log_probs, row[len(prompt) :][:24], atol=5e-5)


@FAMILY
def test_merged_adapters_compute_the_same(family):
    settings = LoraConfig(rank=2, alpha=4.0, targets=PROJECTIONS)
    network = Network(network_of(family).shape, lora=settings)
    weights, (tokens, positions, segments) = tiny.params(network_of(family), scale=4.0), rows()
    adapters = jax.jit(network.init_adapters)(jax.random.key(1))
    adapters = jax.tree.map(
        lambda a: np.random.default_rng(2).standard_normal(a.shape).astype(np.float32) * 0.1,
        adapters,
    )
    whole = lora.combine_params(weights, adapters)

    @jax.jit
    def logits(params):
        hidden = tiny.hidden_states(network)(params, tokens, positions, segments)
        return network.logits(params, hidden)

    counted, found = segments > 0, logits(whole)
    assert np.abs(found - logits(weights))[counted].max() > 1e-3
    merged = logits(lora.merge_adapters(whole, settings.scale))
    size = np.abs(found).max()
    np.testing.assert_allclose(found[counted], merged[counted], atol=2e-5 * size)


def test_adapters_of_fused_projections_are_refused(tmp_path):
    network = Network(network_of("phi3").shape, lora=LoraConfig(rank=2, targets=("q", "up", "o")))
    adapters = jax.jit(network.init_adapters)(jax.random.key(1))
    with pytest.raises(CheckpointFormatError, match="q, up: phi3 files have gate_up_proj and qkv"):
        peft_adapter.save(tmp_path / "adapters", network, adapters)
    network = Network(network.shape, lora=LoraConfig(rank=2, targets=("o", "down")))
    adapters = jax.jit(network.init_adapters)(jax.random.key(1))
    peft_adapter.save(tmp_path / "adapters", network, adapters)
