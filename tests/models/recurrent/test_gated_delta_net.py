"""Networks with gated delta nets: packed rows, meshes, decay rates in low precision."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from kinds_of_layers import NETWORKS

from jaxrl_llm.models import mixed_precision
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.sharding import mesh as mesh_lib

NETWORK = Network(NETWORKS["states"])
LENGTHS = (50, 75)  # the second begins within a chunk of 64 tokens and ends in the third
WIDTH = 144


@functools.cache
def weights():
    # Larger ones amplify rounding from layer to layer beyond 1e-5 on a single device, too.
    return tiny.params(NETWORK, scale=4.0)


@functools.cache
def rows():
    """Returns tokens, positions and segments of packed rows with padding."""
    tokens = np.random.default_rng(0).integers(3, 96, (4, WIDTH)).astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in (*LENGTHS, WIDTH - sum(LENGTHS))])
    segments = np.repeat([1, 2, 0], [*LENGTHS, WIDTH - sum(LENGTHS)])
    wide = [np.broadcast_to(a.astype(np.int32), tokens.shape) for a in (positions, segments)]
    return tokens, *wide


def objective(network, params, tokens, positions, segments):
    """Returns a number in which every hidden state of a token has a part, and these states."""
    hidden = network.forward(params, tokens, positions, segments)[0]
    hidden = jnp.where((segments != 0)[..., None], hidden, 0.0)
    return (hidden * jnp.cos(jnp.arange(hidden.size)).reshape(hidden.shape)).sum(), hidden


def gradient(network, mesh):
    with jax.set_mesh(mesh):
        function = jax.jit(jax.grad(functools.partial(objective, network), has_aux=True))
        found, hidden = function(tiny.sharded(weights(), mesh, network), *rows())
    return jax.tree.map(np.asarray, (found, hidden))


@functools.cache
def expected():
    return gradient(NETWORK, tiny.make_mesh())


def assert_close(found, wanted):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_packed_sequences_are_those_alone():
    _, hidden = expected()
    tokens, positions, _ = rows()
    begin = 0
    for length in LENGTHS:
        part = slice(begin, begin + length)
        ids = np.ones((4, length), np.int32)
        alone = jax.jit(tiny.hidden_states(NETWORK))(
            weights(), tokens[:, part], positions[:, part], ids
        )
        np.testing.assert_allclose(hidden[:, part], alone, atol=1e-5 * np.abs(alone).max())
        begin += length


@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        ({"fsdp": 2, "tensor": 2, "sequence": 2}, "all_to_all"),
        *(
            pytest.param(sizes, form, marks=mark)
            for mark, sizes, form in (
                (pytest.mark.nightly, {"data": 2, "fsdp": 2}, "all_to_all"),
                (pytest.mark.nightly, {"tensor": 4}, "all_to_all"),
                (pytest.mark.nightly, {"sequence": 4}, "all_to_all"),
                (pytest.mark.slow, {"sequence": 8}, "ring"),
                (pytest.mark.slow, {"expert": 2, "fsdp": 2, "tensor": 2}, "all_to_all"),
            )
        ),
    ],
    ids=str,
)
def test_meshes_do_not_matter(sizes, form):
    network = dataclasses.replace(NETWORK, sequence_attention=form)
    assert_close(gradient(network, tiny.make_mesh(**sizes)), expected())


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param("full", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("attention", "projections", "dots")
        ),
    ],
)
def test_recomputation_changes_nothing(remat):
    assert_close(gradient(dataclasses.replace(NETWORK, remat=remat), tiny.make_mesh()), expected())


def test_decay_rates_are_never_rounded():
    layer = weights()["layers"]["0"]["attention"]
    found = mixed_precision.cast(layer, "bfloat16")
    assert {a.dtype for a in jax.tree.leaves(found["decay"])} == {np.dtype("float32")}
    assert found["q"]["kernel"].dtype == found["q_conv"]["weight"].dtype == jnp.bfloat16


def test_heads_are_whole_on_every_device_that_computes():
    names = {"delta_keys": 8, "delta_values": 6, "gated_heads": 16}
    assert names.items() <= NETWORK.sharding_units.items()
    mesh = tiny.make_mesh(tensor=2)
    axes, shapes = NETWORK.logical_axes(), NETWORK.abstract_params()
    found = mesh_lib.shardings(shapes, axes, mesh, mesh_lib.TRAIN, NETWORK.sharding_units)
    attention = found["layers"]["0"]["attention"]
    for name in ("q", "k", "v", "z"):
        assert attention[name]["kernel"].spec[-1] == "tensor"
    assert attention["o"]["kernel"].spec[-2] == "tensor"
