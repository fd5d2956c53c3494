"""One function, several kernels: all compute the softmax by definition."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.models import attention

B, N, K, H = 2, 4, 2, 16


def inputs(length, dtype=np.float32, heads=N, size=H):
    random = np.random.default_rng(0)
    shapes = [(B, length, n, size) for n in (heads, K, K)]
    q, k, v = (random.standard_normal(shape).astype(dtype) for shape in shapes)
    cuts = np.sort(random.integers(1, length, (B, 4)), axis=1)
    segments = 1 + (np.arange(length) >= cuts[..., None]).sum(1).astype(np.int32)
    return q, k, v, np.where(np.arange(length) < length - 7, segments, 0)


def full(q, k, v, segments, cap=0.0, scale=0.0, sinks=None, **others):
    scoring = attention.AttentionScoring(scale, cap, None if sinks is None else jnp.asarray(sinks))
    return attention.full_attention(q, k, v, segments, scoring=scoring, **others)


def by_definition(q, k, v, segments, window=0, cap=0.0, scale=0.0, sinks=None):
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2).astype(np.float64) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q.astype(np.float64), k)
    scores = scores * (scale or q.shape[-1] ** -0.5)
    if cap:
        scores = cap * np.tanh(scores / cap)
    t, s = np.arange(length)[:, None], np.arange(length)
    sees = (s <= t) & ((t - s < window) if window else True)
    sees = sees & (segments[:, :, None] == segments[:, None, :])
    scores = np.where(sees[:, None], scores, -np.inf)
    of_nothing = np.full((N, 1, 1), -np.inf) if sinks is None else np.array(sinks)[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True), of_nothing)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + np.exp(of_nothing - top)
    return np.einsum("bnts,bsnh->btnh", weights / total, v)


SINKS = (0.5, -1.0, 2.0, 0.0)
KINDS = [
    {},
    {"window": 20},
    {"cap": 1.5, "scale": 0.5},
    {"window": 9, "cap": 0.7, "sinks": SINKS},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("block", [512, 32, 40], ids=["whole", "blocks", "uneven"])
def test_blocks_are_the_whole(kind, block, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    q, k, v, segments = inputs(96)
    found = jax.jit(functools.partial(full, **kind))(q, k, v, segments)
    real = segments > 0
    wanted = by_definition(q, k, v, segments, **kind)
    np.testing.assert_allclose(found[real], wanted[real], atol=3e-6)


def gradients(q, k, v, segments, **kind):
    def loss(q, k, v):
        mixed = full(q, k, v, segments, **kind)
        return jnp.sum(jnp.sin(mixed) * (segments > 0)[..., None, None])

    return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)


def test_gradients_of_blocks_are_the_whole(monkeypatch):
    arguments = inputs(96)
    whole = gradients(*arguments)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 32)
    for ours, theirs in zip(gradients(*arguments), whole, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("block", [512, 32, 40], ids=["whole", "blocks", "uneven"])
@pytest.mark.parametrize("cap,window", [(0.0, 0), (1.5, 17)])
def test_answers_of_a_prompt_see_it_and_not_each_other(block, cap, window, monkeypatch):
    """[prompt, answer, answer] in one row is the two sequences in rows of their own.

    The window counts tokens of a sequence, not of the row.
    """
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    q, k, v, _ = inputs(96)
    cuts = (0, 30, 55, 90)  # prompt, two answers; then padding
    places = np.arange(96)
    segments = np.select([places < c for c in cuts[1:]], [-1, 1, 2], 0)
    prefixes = np.where(segments != 0, -1, 0)
    ids, prefix_ids = (np.broadcast_to(x, (B, 96)).astype(np.int32) for x in (segments, prefixes))
    in_sequence = np.where(places < cuts[2], places, places - (cuts[2] - cuts[1]))
    positions = np.broadcast_to(in_sequence, (B, 96)).astype(np.int32)
    found = jax.jit(functools.partial(full, cap=cap, window=window))(
        q, k, v, ids, prefix_ids=prefix_ids, positions=positions
    )
    for start, end in itertools.pairwise(cuts[1:]):
        chosen = np.r_[: cuts[1], start:end]
        alone = (x[:, chosen] for x in (q, k, v))
        wanted = by_definition(*alone, np.ones((B, len(chosen)), int), cap=cap, window=window)
        np.testing.assert_allclose(found[:, chosen], wanted, atol=3e-6)


def test_blocked_keys_equal_full_attention():
    """Values and gradients, of rows with several prompts and with padding."""
    q, k, v, _ = inputs(96)
    # Prompt of 20 with answers of 13 and 25; prompt of 7 with one of 9 and one of 10; padding.
    ids = np.repeat([-1, 1, 2, -3, 3, 4, 0], [20, 13, 25, 7, 9, 10, 12])
    prefixes = np.select([ids == 0, np.abs(ids) < 3], [0, -1], -3)
    sees = (ids[:, None] == ids) | (prefixes[:, None] == ids)
    sees &= np.tri(96, dtype=bool) & (ids != 0)
    by_block = sees.reshape(6, 16, 6, 16).any((1, 3))
    most = by_block.sum(1).max()
    assert most < 6
    blocks = np.sort(np.where(by_block, np.arange(6), 6), axis=1)[:, :most]
    rows = (ids, prefixes, blocks)
    ids, prefix_ids, blocks = (np.broadcast_to(x, (B, *x.shape)).astype(np.int32) for x in rows)
    real = (ids != 0)[..., None, None]

    def loss(q, k, v, key_blocks):
        shared = {"prefix_ids": prefix_ids, "key_blocks": key_blocks}
        mixed = attention.full_attention(q, k, v, ids, **shared)
        return jnp.sum(jnp.sin(mixed) * real), jnp.where(real, mixed, 0)

    both = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    wanted, found = both(q, k, v, attention.ALL_KEY_BLOCKS), both(q, k, v, blocks)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6 * np.abs(theirs).max())


@pytest.mark.parametrize("kind", [{"implementation": "splash"}, {"window": 9}], ids=str)
def test_functions_without_prefix_support_raise(kind):
    q, k, v, segments = inputs(32)
    with pytest.raises(ValueError, match="full_attention: prefix_ids with"):
        attention.full_attention(q, k, v, segments, **kind, prefix_ids=segments)
    assert not attention.supports_prefixes("splash")


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=str)
def test_splash_computes_the_same(kind):
    q, k, v, segments = inputs(150)  # no multiple of the kernel's lanes
    splash = functools.partial(full, implementation="splash", interpret=True, **kind)
    found, real = splash(q, k, v, segments), segments > 0
    wanted = by_definition(q, k, v, segments, **kind)
    np.testing.assert_allclose(found[real], wanted[real], atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "tensor": 2}, {"fsdp": 1, "tensor": 4}], ids=str)
def test_splash_on_a_mesh_and_its_gradient(sizes):
    arguments = inputs(128)
    whole = gradients(*arguments)
    with jax.set_mesh(tiny.make_mesh(**sizes)):
        found = gradients(*arguments, implementation="splash", interpret=True)
    for ours, theirs in zip(found, whole, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6 * np.abs(theirs).max())


def test_key_heads_are_shared_and_long_rows_need_little():
    # 16 query heads to 2 key heads, 2048 tokens: all scores are [2, 16, 2048, 2048], keys repeated
    # for each query head 2 x 16 MiB beside the 4 x 2 MiB that they are.
    q, k, v, segments = inputs(2048, heads=16, size=64)
    program = jax.jit(gradients).lower(q, k, v, segments).compile()
    scores = B * 16 * 2048 * 2048 * 4
    # Of a block: scores, their softmax and the gradients of both.
    assert program.memory_analysis().temp_size_in_bytes < 4.5 * scores / 4
    jaxpr = str(jax.make_jaxpr(attention.full_attention)(q, k, v, segments))
    repeated = [line for line in jaxpr.splitlines() if "broadcast" in line and "16,64]" in line]
    assert not repeated


def test_kernel_of_a_platform():
    choose = attention.implementation_for
    assert choose("auto", "tpu", "float32", 128) == "splash"
    assert choose("auto", "gpu", "bfloat16", 64) == "cudnn"
    assert choose("auto", "gpu", "float32", 64) == "xla"
    assert choose("auto", "gpu", "bfloat16", 256) == "xla"
    assert choose("auto", "cpu", "bfloat16", 64) == "xla"
    assert choose("xla", "tpu", "bfloat16", 64) == "xla"


def test_index_scores_and_the_choice_of_keys_by_hand():
    q = jnp.array([[[[1.0, 0.0], [0.0, 1.0]]]])  # one query of two heads
    k = jnp.array([[[2.0, 1.0], [-1.0, 3.0], [0.5, -4.0], [9.0, 9.0], [2.0, 1.0]]])
    weights = jnp.array([[[1.0, -0.5]]])
    scores = attention.index_scores(q, weights, k)
    # relu(2) - relu(1) / 2, 0 - 3 / 2, 0.5 - 0, 9 - 9 / 2, and the first once more
    np.testing.assert_allclose(scores[0, 0], [1.5, -1.5, 0.5, 4.5, 1.5])
    visible = jnp.array([[[True, True, True, False, True]]])
    all_visible = [0, 1, 2, 4]
    expected = {1: [0], 2: [0, 4], 3: [0, 2, 4], 4: all_visible, 5: all_visible}
    for top_keys, chosen in expected.items():
        found = attention.top_visible_keys(scores, visible, top_keys)
        assert np.flatnonzero(found[0, 0]).tolist() == chosen


def test_sparse_attention_is_that_of_the_chosen_keys(monkeypatch):
    """With a shared prefix, in blocks of queries or in one."""
    keys = jax.random.split(jax.random.key(5), 6)
    q, k, v = (jax.random.normal(key, (2, 23, 4, 8)) for key in keys[:3])
    index = attention.KeyIndex(
        jax.random.normal(keys[3], (2, 23, 3, 5)),
        jax.random.normal(keys[4], (2, 23, 5)),
        jax.random.normal(keys[5], (2, 23, 3)),
    )
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0]], [6, 9, 6, 2], axis=1).repeat(2, 0))
    prefixes = jnp.where(segments == 3, 1, segments)
    positions = jnp.broadcast_to(jnp.arange(23), segments.shape)
    shared = {"prefix_ids": prefixes, "positions": positions, "index": index, "top_keys": 4}
    whole = attention.full_attention(q, k, v, segments, **shared)
    mask = np.asarray(attention.segment_causal_mask(segments, prefix_ids=prefixes)[:, 0])
    scores = np.where(mask, attention.index_scores(index.q, index.weights, index.k), -np.inf)
    ranks = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    chosen = mask & (ranks < 4)
    assert chosen.sum(-1).max() == 4 and (mask.sum(-1) > 4).any()
    wanted = attention.masked_attention(q, k, v, jnp.asarray(chosen)[:, None])
    counted = np.asarray(segments) > 0
    np.testing.assert_allclose(whole[counted], wanted[counted], atol=1e-6)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 5)
    blocks = attention.full_attention(q, k, v, segments, **shared)
    np.testing.assert_allclose(blocks[counted], whole[counted], atol=1e-6)
    # Whatever the kernel of other layers is, and in the second sequence, which has no prefix.
    splash = attention.full_attention(q, k, v, segments, "splash", index=index, top_keys=4)
    alone = np.asarray(segments) == 2
    np.testing.assert_allclose(splash[alone], whole[alone], atol=1e-6)
