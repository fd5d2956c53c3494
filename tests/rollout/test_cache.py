"""The cache of the rollout engine: blocks, recent tokens, attention over both, and its memory."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.rollout import cache as cache_lib
from jaxrl_llm.rollout.cache import NOWHERE, Recent

SHAPE = dataclasses.replace(
    tiny.NETWORK.shape, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8
)
SLOTS, BLOCKS = 3, (4, 2, 6)
# 2 layers, keys and values, 2 heads of 8 numbers of 4 bytes: 256 bytes a token.
TOKEN_BYTES = 256


def random_rows(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def whole(cache):
    """Returns keys and values of a cache as `[layer, S, K, T, H]`."""
    keys = [np.concatenate([np.asarray(b).swapaxes(2, 3) for b in row], 2) for row in cache.keys]
    values = [np.concatenate([np.asarray(b) for b in row], 2) for row in cache.values]
    return np.stack(keys), np.stack(values)


def filled(seed=0, blocks=BLOCKS):
    cache = cache_lib.empty(SHAPE, SLOTS, blocks, "float32")
    leaves, tree = jax.tree.flatten(cache)
    rows = [jnp.asarray(random_rows(seed + i, *leaf.shape)) for i, leaf in enumerate(leaves)]
    return tree.unflatten(rows)


def test_an_empty_cache_has_the_positions_of_its_blocks():
    cache = cache_lib.empty(SHAPE, SLOTS, BLOCKS, "bfloat16")
    assert whole(cache)[0].shape[3] == 12
    assert [b.shape for b in cache.keys[1]] == [(3, 2, 8, 4), (3, 2, 8, 2), (3, 2, 8, 6)]
    assert [b.shape for b in cache.values[0]] == [(3, 2, 4, 8), (3, 2, 2, 8), (3, 2, 6, 8)]
    assert all(leaf.dtype == "bfloat16" and not leaf.any() for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize("width", [3, 4, 5, 9, 12])
def test_prompts_go_into_the_blocks_of_their_slots(width):
    before = filled()
    keys, values = random_rows(7, 2, 2, 3, 2, width, 8)  # each [layer, n, K, W, H]
    slots = np.array([2, SLOTS, 0])  # the second goes nowhere
    after = cache_lib.fill(before, slots, list(jnp.asarray(keys)), list(jnp.asarray(values)))
    for new, old, rows in zip(whole(after), whole(before), (keys, values), strict=True):
        expected = old.copy()
        expected[:, 2, :, :width], expected[:, 0, :, :width] = rows[:, 0], rows[:, 2]
        np.testing.assert_array_equal(new, expected)


@pytest.mark.parametrize(("slots", "window"), [(3, 12), (2, 6), (1, 5), (3, 3)])
def test_the_front_is_the_first_slots_and_positions(slots, window):
    cache = filled()
    front = cache_lib.front(cache, slots, window)
    assert whole(front)[0].shape[3] == window
    for part, all_of_it in zip(whole(front), whole(cache), strict=True):
        np.testing.assert_array_equal(part, all_of_it[:, :slots, :, :window])


def test_recent_tokens_join_the_cache_where_they_belong():
    cache, (keys, values) = filled(), random_rows(9, 2, 2, 2, 2, 5, 8)
    # Two of three slots. Across a block's end, not in order, and some nowhere.
    positions = np.array([[3, 4, NOWHERE, 6, 5], [NOWHERE, 0, 9, NOWHERE, NOWHERE]], np.int32)
    recent = Recent(tuple(k.swapaxes(2, 3) for k in keys), tuple(values), positions)
    joined = cache_lib.join(cache, recent, 12)
    for new, old, rows in zip(whole(joined), whole(cache), (keys, values), strict=True):
        expected = old.copy()
        for slot, entry in itertools.product(range(2), range(5)):
            if positions[slot, entry] != NOWHERE:
                expected[:, slot, :, positions[slot, entry]] = rows[:, slot, :, entry]
        np.testing.assert_array_equal(new, expected)


def test_blocks_behind_the_end_are_left_alone():
    cache = filled()
    recent = cache_lib.no_recent(SHAPE, SLOTS, 2, "float32")
    joined = cache_lib.join(cache, recent, 6)
    assert joined.keys[0][2] is cache.keys[0][2]
    assert joined.keys[0][1] is not cache.keys[0][1]


def test_tokens_of_a_step_lie_behind_those_before():
    recent = cache_lib.no_recent(SHAPE, SLOTS, 6, "float32")
    assert (recent.positions == NOWHERE).all()
    k, v = random_rows(3, 2, SLOTS, 2, 2, 8)  # each [S, Q, K, H]
    keys, values = cache_lib.add(recent, 1, jnp.int32(2), (k, v))
    np.testing.assert_array_equal(keys[..., 2:4], k.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(values[:, :, 2:4], v.transpose(0, 2, 1, 3))
    assert not keys[..., :2].any() and not keys[..., 4:].any()
    assert not values[:, :, :2].any() and not values[:, :, 4:].any()


@pytest.mark.parametrize("blocks", [(12,), BLOCKS, (1,) * 12])
@pytest.mark.parametrize("width", [1, 3])
def test_attention_over_blocks_is_attention_over_the_whole(blocks, width):
    keys, values = random_rows(1, 2, SLOTS, 2, 12, 8)
    q = random_rows(2, SLOTS, width, 4, 8)
    seen = np.random.default_rng(4).random((SLOTS, width, 12)) < 0.6
    seen[..., 0] = True
    ends = np.cumsum(blocks)[:-1]
    found = cache_lib.attention(
        q, np.split(keys.swapaxes(2, 3), ends, 3), np.split(values, ends, 2), seen
    )
    expected = jax.nn.dot_product_attention(
        q, keys.swapaxes(1, 2), values.swapaxes(1, 2), mask=seen[:, None]
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_cache_bytes_by_hand():
    one = tiny.make_mesh()
    assert cache_lib.cache_bytes(tiny.NETWORK, one, 8, 100) == 8 * 100 * TOKEN_BYTES
    split = tiny.make_mesh(fsdp=2, tensor=2)
    assert cache_lib.cache_bytes(tiny.NETWORK, split, 8, 100) == 8 * 100 * TOKEN_BYTES // 4


def test_logits_bytes_by_hand():
    vocab = tiny.NETWORK.shape.vocab_size
    assert cache_lib.logits_bytes(tiny.NETWORK, tiny.make_mesh(), 8) == 8 * vocab * 4
    split = tiny.make_mesh(fsdp=2, tensor=2)
    assert cache_lib.logits_bytes(tiny.NETWORK, split, 8) == 8 * vocab * 4 // 4


def test_every_guess_has_logits_of_its_own():
    mesh = tiny.make_mesh()
    network = tiny.with_sizes(vocab_size=1 << 20)  # three times 4 MiB a place and slot
    found = [cache_lib.fitting_slots(network, mesh, 100, 64, guesses) for guesses in (0, 1, 4)]
    assert found == [64, 32, 16]


def test_a_cpu_decodes_up_to_64_within_a_gigabyte():
    mesh = tiny.make_mesh()
    assert cache_lib.fitting_slots(tiny.NETWORK, mesh, 100, 48) == 48
    assert cache_lib.fitting_slots(tiny.NETWORK, mesh, 100, 1000) == 64
    room = (1 << 30) // TOKEN_BYTES
    assert cache_lib.fitting_slots(tiny.NETWORK, mesh, room // 24, 64) == 16
    assert cache_lib.fitting_slots(tiny.NETWORK, mesh, 10 * room, 64) == 1


@pytest.mark.parametrize(
    ("stats", "slots"),
    [
        ({"bytes_limit": 4 * 32 * 100 * TOKEN_BYTES, "bytes_in_use": 0}, 32),
        ({"bytes_limit": 4 * 32 * 100 * TOKEN_BYTES, "bytes_in_use": 1}, 16),
        (None, 256),
    ],
    ids=str,
)
def test_a_device_that_tells_sets_the_limit(stats, slots, monkeypatch):
    device = types.SimpleNamespace(platform="tpu", memory_stats=lambda: stats)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    monkeypatch.setattr(cache_lib, "cache_bytes", lambda network, mesh, s, t: s * t * TOKEN_BYTES)
    monkeypatch.setattr(cache_lib, "logits_bytes", lambda network, mesh, rows: 0)
    assert cache_lib.fitting_slots(tiny.NETWORK, mesh, 100, 1000) == slots
