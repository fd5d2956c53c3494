"""Parity with transformers: logits and scores of every family, in float32."""

import dataclasses

import hf_checkpoints
import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm.models import heads
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network

# float32 rounding of three layers on logits of size about 10, two orders of summation.
RELATIVE = 2e-5


def rows_of(found):
    """Returns the token rows of what transformers said, and where they are no padding."""
    tokens, lengths = found["tokens"], found["lengths"]
    return tokens, np.arange(tokens.shape[1]) < lengths[:, None]


def our_hidden(network, params, tokens, mask):
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return jax.jit(tiny.hidden_states(network))(params, tokens, positions, mask.astype(np.int32))


def assert_close(got, want):
    assert np.abs(want).max() > 1.0, "the checkpoint is too small to tell anything"
    assert np.abs(got - want).max() <= RELATIVE * np.abs(want).max()


@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
def test_logits_equal_transformers(family, tmp_path):
    theirs = hf_checkpoints.expected(family)
    tokens, mask = rows_of(theirs)
    hf_checkpoints.make(tmp_path, family)
    network = Network(checkpoint.read_architecture(tmp_path))
    params = checkpoint.load(tmp_path, network)
    got = np.asarray(network.logits(params, our_hidden(network, params, tokens, mask)))
    assert_close(got[mask], theirs["logits"])


def test_stretched_rotary_matters_here(tmp_path):
    # Without this, the Llama parity above would hold with no scaling at all.
    tokens, mask = rows_of(hf_checkpoints.expected("llama"))
    hf_checkpoints.make(tmp_path / "scaled", "llama")
    hf_checkpoints.make(tmp_path / "plain", "llama")
    hf_checkpoints.edit_config(tmp_path / "plain", rope_parameters={"rope_theta": 500.0})
    logits = []
    for name in ("scaled", "plain"):
        network = Network(checkpoint.read_architecture(tmp_path / name))
        params = checkpoint.load(tmp_path / name, network)
        logits.append(network.logits(params, our_hidden(network, params, tokens, mask)))
    scaled, plain = (np.asarray(x)[mask] for x in logits)
    assert np.abs(scaled - plain).max() > 0.01 * np.abs(plain).max()


@pytest.mark.parametrize("family", hf_checkpoints.FAMILIES)
def test_classifier_scores_equal_transformers(family, tmp_path):
    theirs = hf_checkpoints.expected(family)
    tokens, mask = rows_of(theirs)
    hf_checkpoints.make(tmp_path, family, head="scalar")
    network = Network(checkpoint.read_architecture(tmp_path), head="scalar")
    params = checkpoint.load(tmp_path, network)
    got = heads.sequence_scores(
        our_hidden(network, params, tokens, mask),
        network.head_weight(params),
        theirs["lengths"] - 1,
    )
    assert_close(np.asarray(got), theirs["scores"])


def test_packed_rows_equal_rows_of_their_own(tmp_path):
    tokens = hf_checkpoints.expected("qwen2")["tokens"]
    hf_checkpoints.make(tmp_path, "qwen2")
    network = Network(checkpoint.read_architecture(tmp_path))
    params = checkpoint.load(tmp_path, network)
    first, second = tokens[0, :23], tokens[1, :31]
    packed = np.concatenate([first, second, tokens[3, :10]])[None]
    positions = np.concatenate([np.arange(23), np.arange(31), np.zeros(10)])[None].astype(np.int32)
    segments = np.repeat([1, 2, 0], [23, 31, 10])[None].astype(np.int32)
    hidden = np.asarray(jax.jit(tiny.hidden_states(network))(params, packed, positions, segments))[
        0
    ]
    for sequence, got in ((first, hidden[:23]), (second, hidden[23:54])):
        mask = np.ones((1, len(sequence)), bool)
        alone = np.asarray(our_hidden(network, params, sequence[None], mask))[0]
        np.testing.assert_allclose(got, alone, rtol=1e-4, atol=1e-5)


def test_shapes_of_equal_networks_are_the_callers_own(tmp_path):
    hf_checkpoints.make(tmp_path, "qwen2")
    networks = [Network(checkpoint.read_architecture(tmp_path)) for _ in range(2)]
    found = [network.abstract_params() for network in networks]
    del found[0]["layers"]["0"]["mlp"]
    assert (
        set(found[1]["layers"]["0"]) == set(networks[0].abstract_params()["layers"]["0"]) > {"mlp"}
    )
    half = dataclasses.replace(networks[0], param_dtype="bfloat16").abstract_params()
    assert {a.dtype for a in jax.tree.leaves(half)} == {np.dtype("bfloat16")}
