"""The cache of the rollout engine: pages, recent tokens, attention over both, and its memory."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config.kv_cache_sizing import SequenceLengths
from jaxrl_llm.rollout.engine import decode_attention, kv_cache
from jaxrl_llm.rollout.engine.kv_cache import NO_POSITION, REPLICATED, CacheSharding, WriteBuffer

SHAPE = dataclasses.replace(
    tiny.NETWORK.shape, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8
)
PAGES, SIZE = 8, 4
# 2 layers, keys and values, 2 heads of 8 numbers of 4 bytes: 256 bytes a token.
TOKEN_BYTES = 256
# On one device, and on four: pages and slots over two of them, heads over two.
SPLITS = {
    "one": (REPLICATED, {}),
    "four": (CacheSharding("fsdp", "tensor"), {"fsdp": 2, "tensor": 2}),
}
# Pages of two slots, those of the second shard from 4 on.
TURNED = pytest.mark.parametrize("turned", [False, True], ids=["on_cpu", "on_accelerators"])
TABLE = np.array([[3, 0, 2], [5, 7, 4]], np.int32)


def random_rows(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def whole(cache):
    """Returns keys and values of a cache as `[layer, pages, K, page, H]`."""
    values = [np.swapaxes(v, 2, 3) if cache.transposed_values else v for v in cache.values]
    return np.stack([np.swapaxes(k, 2, 3) for k in cache.keys]), np.stack(values)


def filled(turned, seed=0):
    leaves, tree = jax.tree.flatten(
        kv_cache.empty_cache(SHAPE, PAGES, SIZE, "float32", transposed_values=turned)
    )
    rows = [jnp.asarray(random_rows(seed + i, *leaf.shape)) for i, leaf in enumerate(leaves)]
    return tree.unflatten(rows)


@pytest.fixture(params=SPLITS)
def split(request):
    found, sizes = SPLITS[request.param]
    with jax.set_mesh(tiny.make_mesh(**sizes)):
        yield found


def test_an_empty_cache_has_its_pages():
    cache = kv_cache.empty_cache(SHAPE, PAGES, SIZE, "bfloat16")
    assert [k.shape for k in cache.keys] == [(8, 2, 8, 4)] * 2
    assert [v.shape for v in cache.values] == [(8, 2, 4, 8)] * 2
    assert all(leaf.dtype == "bfloat16" and not leaf.any() for leaf in jax.tree.leaves(cache))


@TURNED
def test_prompts_go_into_pages(split, turned):
    before = filled(turned)
    keys, values = random_rows(7, 2, 2, 2, 11, 8)  # each [layer, K, tokens, H]
    pages, starts = np.array([6, PAGES, 1, 3]), np.array([0, 4, 5, 9])
    fill = jax.jit(functools.partial(kv_cache.write_prompt_pages, split=split))
    given = {"keys": list(jnp.asarray(keys)), "values": list(jnp.asarray(values))}
    after = fill(before, pages=pages, starts=starts, **given)
    for new, old, rows in zip(whole(after), whole(before), (keys, values), strict=True):
        expected = old.copy()  # the second goes nowhere
        expected[:, 6], expected[:, 1] = rows[:, :, 0:4], rows[:, :, 5:9]
        expected[:, 3, :, :2] = rows[:, :, 9:11]
        new[:, 3, :, 2:] = expected[:, 3, :, 2:]  # behind the last token: anything
        np.testing.assert_array_equal(new, expected)


@TURNED
@pytest.mark.parametrize("by_slot", [True, False])
@pytest.mark.parametrize("window", [12, 7, 4])
def test_gathered_entries_are_in_order_of_positions(split, by_slot, window, turned):
    cache, table = filled(turned), TABLE if by_slot else TABLE[[1, 0, 1]]
    gather = jax.jit(kv_cache.gather_pages, static_argnames=("split", "window", "by_slot"))
    found = gather(cache, split=split, table=table, window=window, by_slot=by_slot)
    ours = np.stack([np.swapaxes(k, 2, 3) for k in found.keys]), np.stack(found.values)
    for part, all_of_it in zip(ours, whole(cache), strict=True):
        rows = [np.concatenate([all_of_it[:, page] for page in row], axis=2) for row in table]
        np.testing.assert_array_equal(part, np.stack(rows, axis=1)[:, :, :, :window])


@TURNED
def test_recent_tokens_join_their_pages(split, turned):
    cache, (keys, values) = filled(turned), random_rows(9, 2, 2, 2, 2, 5, 8)
    # Across the end of a page, not in order, and some nowhere.
    positions = np.array(
        [[3, 4, NO_POSITION, 6, 5], [NO_POSITION, 8, 9, NO_POSITION, NO_POSITION]], np.int32
    )
    recent = WriteBuffer(tuple(k.swapaxes(2, 3) for k in keys), tuple(values), positions)
    for by_slot in (True, False):
        join = jax.jit(kv_cache.flush_buffer, static_argnames=("split", "by_slot"))
        joined = join(cache, split=split, recent=recent, table=TABLE, by_slot=by_slot)
        for new, old, rows in zip(whole(joined), whole(cache), (keys, values), strict=True):
            expected = old.copy()
            for slot, entry in itertools.product(range(2), range(5)):
                if (at := positions[slot, entry]) != NO_POSITION:
                    page = TABLE[slot, at // SIZE]
                    expected[:, page, :, at % SIZE] = rows[:, slot, :, entry]
            np.testing.assert_array_equal(new, expected)


def test_tokens_of_a_step_lie_behind_those_before():
    recent = kv_cache.empty_write_buffer(SHAPE, 3, 6, "float32")
    assert (recent.positions == NO_POSITION).all()
    k, v = random_rows(3, 2, 3, 2, 2, 8)  # each [S, Q, K, H]
    keys, values = kv_cache.append_to_buffer(recent, 1, jnp.int32(2), (k, v))
    np.testing.assert_array_equal(keys[..., 2:4], k.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(values[:, :, 2:4], v.transpose(0, 2, 1, 3))
    assert not keys[..., :2].any() and not keys[..., 4:].any()
    assert not values[:, :, :2].any() and not values[:, :, 4:].any()


@pytest.mark.parametrize("blocks", [(12,), (4, 8)])
@pytest.mark.parametrize("width", [1, 3])
def test_attention_over_blocks_is_attention_over_the_whole(blocks, width):
    keys, values = random_rows(1, 2, 3, 2, 12, 8)
    q = random_rows(2, 3, width, 4, 8)
    seen = np.random.default_rng(4).random((3, width, 12)) < 0.6
    seen[..., 0] = True
    ends = np.cumsum(blocks)[:-1]
    found = decode_attention.gathered_attention(
        q, np.split(keys.swapaxes(2, 3), ends, 3), np.split(values, ends, 2), seen
    )
    expected = jax.nn.dot_product_attention(
        q, keys.swapaxes(1, 2), values.swapaxes(1, 2), mask=seen[:, None]
    )
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


def test_cache_bytes_by_hand():
    one = tiny.make_mesh()
    assert kv_cache.cache_bytes(tiny.NETWORK, one, 800, 8) == 800 * TOKEN_BYTES
    split = tiny.make_mesh(fsdp=2, tensor=2)
    assert kv_cache.cache_bytes(tiny.NETWORK, split, 800, 8) == 800 * TOKEN_BYTES // 4


def test_logits_bytes_by_hand():
    vocab = tiny.NETWORK.shape.vocab_size
    assert kv_cache.logits_bytes(tiny.NETWORK, tiny.make_mesh(), 8) == 8 * vocab * 4
    split = tiny.make_mesh(fsdp=2, tensor=2)
    assert kv_cache.logits_bytes(tiny.NETWORK, split, 8) == 8 * vocab * 4 // 4


def test_every_guess_has_logits_of_its_own():
    mesh = tiny.make_mesh()
    network = tiny.with_sizes(vocab_size=1 << 20)  # three times 4 MiB a place and slot
    found = [
        kv_cache.fitting_cache_size(network, mesh, SequenceLengths(96), 64, guesses)
        for guesses in (0, 1, 4)
    ]
    assert found == [(64, 6144), (32, 3072), (16, 1536)]


def test_a_cpu_decodes_up_to_64_within_a_gigabyte():
    fitting = functools.partial(kv_cache.fitting_cache_size, tiny.NETWORK, tiny.make_mesh())
    assert fitting(SequenceLengths(96), 48) == (48, 48 * 96)
    assert fitting(SequenceLengths(96), 1000) == (64, 64 * 96)
    # Pages of 32 tokens: one of each prompt of 40 is shared, each sample has one more with its 24.
    assert fitting(SequenceLengths(24, 40, 4), 1000) == (64, 16 * 32 + 64 * 32)
    assert fitting(SequenceLengths(25, 40, 4), 1000, num_slots=10) == (10, 3 * 32 + 10 * 64)
    logits = 3 * tiny.NETWORK.shape.vocab_size * 4  # of a slot
    room = (1 << 30) // TOKEN_BYTES
    # 24 of the longest fit, so 32 sequences that are half as long on average.
    slots, tokens = fitting(SequenceLengths(room // 24), 64)
    assert (slots, tokens) == (32, ((1 << 30) - 32 * logits) // TOKEN_BYTES)
    # One must fit, whatever it needs.
    assert fitting(SequenceLengths(10 * room), 64) == (1, 10 * room)


@pytest.mark.parametrize(
    ("stats", "room"),
    [
        ({"bytes_limit": 4 * 32 * 128 * TOKEN_BYTES, "bytes_in_use": 0}, (64, 4096)),
        ({"bytes_limit": 4 * 32 * 128 * TOKEN_BYTES, "bytes_in_use": 4}, (32, 4095)),
        (None, (256, 32768)),
    ],
    ids=str,
)
def test_a_device_that_tells_sets_the_limit(stats, room, monkeypatch):
    device = types.SimpleNamespace(platform="tpu", memory_stats=lambda: stats)
    axes = dict.fromkeys(("data", "fsdp", "expert", "sequence"), 1)
    mesh = types.SimpleNamespace(devices=np.array([device]), shape=axes)
    monkeypatch.setattr(kv_cache, "cache_bytes", lambda network, mesh, t, s, *_: t * TOKEN_BYTES)
    monkeypatch.setattr(kv_cache, "logits_bytes", lambda network, mesh, rows: 0)
    assert kv_cache.fitting_cache_size(tiny.NETWORK, mesh, SequenceLengths(128), 1000) == room
