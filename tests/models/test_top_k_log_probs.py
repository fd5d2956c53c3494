"""A teacher's likeliest tokens, and the policy's log-probs of them: as with all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.models import heads
from jaxrl_llm.models.target_positions import AllTargets, SelectedTargets
from jaxrl_llm.models.top_k_log_probs import top_k_log_probs
from jaxrl_llm.sharding import mesh as mesh_lib

B, T, D, V, K = 4, 16, 8, 64, 5


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(heads, "_MIN_ROWS", 1)


@pytest.fixture
def batch():
    keys = jax.random.split(jax.random.key(0), 5)
    segment_ids = jnp.ones((B, T), jnp.int32).at[1, 7:].set(2).at[2, 9:].set(0)
    order = jax.vmap(lambda key: jax.random.permutation(key, V))(jax.random.split(keys[3], B * T))
    return {
        "hidden": jax.random.normal(keys[0], (B, T, D)),
        "weight": jax.random.normal(keys[1], (V, D)),
        "tokens": jax.random.randint(keys[2], (B, T), 0, V),
        "segment_ids": segment_ids,
        "listed": order[:, :K].reshape(B, T, K),
        "bars": jax.random.normal(keys[4], (B, T, K + 2)),
    }


def dense(hidden, weight, tokens, segment_ids, listed):
    """Log-probs [B, T, 1 + K + 1] of the token, of the listed ones, and of all others together."""
    log_p = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, weight) / 0.7)[:, :-1]
    asked = jnp.concatenate([tokens[..., None], listed], -1)[:, 1:]
    others = ~(listed[:, 1:, :, None] == jnp.arange(V)).any(2)
    rest = jax.nn.logsumexp(jnp.where(others, log_p, -jnp.inf), -1, keepdims=True)
    found = jnp.concatenate([jnp.take_along_axis(log_p, asked, -1), rest], -1)
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return jnp.pad(jnp.where(inside[..., None], found, 0.0), ((0, 0), (1, 0), (0, 0)))


def chunked(hidden, weight, tokens, segment_ids, listed, places=None):
    found = heads.token_statistics(
        hidden, weight, tokens, places or AllTargets(segment_ids),
        temperature=0.7, chunk=6, entropy="none", listed=listed,
    )  # fmt: skip
    return jnp.concatenate([found.log_probs[..., None], found.listed_log_probs], -1)


def run(function, batch, **more):
    def loss(hidden, weight, tokens, segment_ids, listed, bars):
        found = function(hidden, weight, tokens, segment_ids, listed, **more)
        return (bars * found).sum(), found

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, found), bars = gradient(*batch.values())
    return found, *bars


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 1e-5 * np.abs(b).max()


def test_listed_tokens_equal_dense(batch):
    assert_close(run(chunked, batch), run(dense, batch))


def test_chosen_places_equal_all_places(batch):
    """Where nobody looks there is nothing, and no gradient."""
    positions = jnp.array([[3, 5, T], [9, 12, 15], [1, 8, T], [2, 4, 6]])
    mask = jnp.zeros((B, T + 1), bool).at[jnp.arange(B)[:, None], positions].set(True)[:, :T]
    places = SelectedTargets(positions, jnp.maximum(positions - 1, 0), T)
    want = run(dense, {**batch, "bars": jnp.where(mask[..., None], batch["bars"], 0.0)})
    got = run(chunked, batch, places=places)
    assert_close(got, (jnp.where(mask[..., None], want[0], 0.0), *want[1:]))


def test_the_vocabulary_over_devices_equals_one_device(batch):
    want, first = run(chunked, batch), likeliest(batch)
    mesh = tiny.make_mesh(fsdp=2, tensor=2)
    dims = ("batch", "length", None)
    placed = {
        name: x
        if name == "weight"
        else jax.device_put(x, mesh_lib.activation_sharding(x.shape, dims[: x.ndim], mesh))
        for name, x in batch.items()
    }
    with jax.set_mesh(mesh):
        assert_close(run(chunked, placed), want)
        for got, one in zip(likeliest(placed), first, strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-5, atol=1e-6)


def likeliest(batch, limit=V):
    ask = jax.jit(
        lambda hidden, weight, ids: top_k_log_probs(
            hidden, weight, AllTargets(ids), K, limit=limit, temperature=0.7, chunk=6
        )
    )
    return ask(batch["hidden"], batch["weight"], batch["segment_ids"])


@pytest.mark.parametrize("limit", [V, 20])
def test_likeliest_tokens_equal_dense(batch, limit):
    logits = jnp.einsum("btd,vd->btv", batch["hidden"], batch["weight"]) / 0.7
    log_p = jax.nn.log_softmax(logits)[:, :-1]
    want, tokens = jax.lax.top_k(log_p[..., :limit], K)
    ids = batch["segment_ids"]
    inside = ((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] > 0))[..., None]
    found, log_probs = likeliest(batch, limit)
    np.testing.assert_array_equal(found[:, 1:], jnp.where(inside, tokens, 0))
    np.testing.assert_allclose(log_probs[:, 1:], jnp.where(inside, want, 0.0), atol=1e-5)
    assert not found[:, 0].any() and not log_probs[:, 0].any()


def test_logits_of_listed_tokens_exist_in_pieces():
    shape, vocab, width, count = (8, 128), 8_000, 16, 16
    arguments = [
        jax.ShapeDtypeStruct((*shape, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        *[jax.ShapeDtypeStruct(shape, jnp.int32)] * 2,
        jax.ShapeDtypeStruct((*shape, count), jnp.int32),
        jax.ShapeDtypeStruct((*shape, count + 2), jnp.float32),
    ]

    def temporary_bytes(function):
        def loss(hidden, weight, tokens, segment_ids, listed, bars):
            return (bars * function(hidden, weight, tokens, segment_ids, listed)).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def in_chunks(hidden, weight, tokens, segment_ids, listed):
        found = heads.token_statistics(
            hidden, weight, tokens, AllTargets(segment_ids), chunk=32, listed=listed
        )
        return jnp.concatenate([found.log_probs[..., None], found.listed_log_probs], -1)

    logits = 4 * shape[0] * shape[1] * vocab
    assert temporary_bytes(in_chunks) < logits / 4
