"""Packed batches: every token in one place, and back; budgets kept; shapes few."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.config import RLConfig, RLTrainerConfig
from jaxrl_llm.learner import batches
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.packing import packed_batch, row_layout
from jaxrl_llm.types import Rollouts

B, W, SHARDS = 12, 16, 2
BUDGET = 40  # two rows of 16 a device, four in a microbatch


@st.composite
def steps(draw):
    lengths = np.array(draw(st.lists(st.integers(1, W), min_size=B, max_size=B)), np.int32)
    chosen = draw(st.sets(st.integers(0, B - 1), min_size=1))
    return lengths, np.array(sorted(chosen))


def packed_of(lengths, chosen, budget=BUDGET, width=W):
    return Packer(budget, SHARDS).pack(lengths, chosen, width=width)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_every_token_has_one_place(step):
    lengths, chosen = step
    packed = packed_of(lengths, chosen)
    m, count = packed.microbatches, int(packed.count)
    rows = m.segment_ids.shape[1]
    assert rows % SHARDS == 0
    assert rows // SHARDS * W <= BUDGET
    assert (m.segment_ids[count:] == 0).all()
    assert (m.sequences[count:] == B).all()
    assert (m.segment_ids[:count] > 0).any((1, 2)).all()
    used = m.segment_ids > 0
    places = list(zip(m.segment_ids[used] - 1, m.positions[used], strict=True))
    assert sorted(places) == [(s, t) for s in chosen for t in range(lengths[s])]
    listed = m.sequences[m.sequences < B]
    assert sorted(listed) == chosen.tolist()
    np.testing.assert_array_equal(np.flatnonzero(packed.is_member), chosen)
    # Where a sequence is said to begin, it does.
    for g, place in zip(*np.nonzero(m.sequences < B), strict=True):
        row, start = m.rows[g, place], m.starts[g, place]
        assert m.segment_ids[g, row, start] == m.sequences[g, place] + 1
        assert m.positions[g, row, start] == 0
    share = 1 - lengths[chosen].sum() / (count * rows * W)
    assert batches.padding_share(packed) == pytest.approx(share)


@jax.jit
def there_and_back(packed, tokens, lengths):
    def back(microbatch):
        return microbatch.to_sequences(microbatch.to_rows(tokens), lengths, W)

    return packed_batch.map_to_sequences(packed, back, B, W)


@settings(max_examples=40, deadline=None)
@given(steps())
def test_unpacking_undoes_packing(step):
    lengths, chosen = step
    tokens = np.random.default_rng(0).integers(1, 1000, (B, W)).astype(np.int32)
    found = there_and_back(packed_of(lengths, chosen), tokens, lengths)
    kept = np.isin(np.arange(B), chosen)[:, None] & (np.arange(W) < lengths[:, None])
    np.testing.assert_array_equal(found, np.where(kept, tokens, 0))


@st.composite
def grouped_steps(draw):
    """Steps in which neighbours begin alike, by as much as their lengths allow."""
    lengths, chosen = draw(steps())
    groups = np.array(sorted(draw(st.lists(st.integers(0, 5), min_size=B, max_size=B))))
    common = np.zeros(B, int)
    for group in np.unique(groups):
        rows = groups == group
        common[rows] = draw(st.integers(0, lengths[rows].min() - 1))
    return lengths, chosen, packed_batch.SharedPrefixes(groups, common)


def packed_groups(lengths, chosen, common, budget=80):
    asked = np.arange(W) >= np.maximum(common.lengths, 1)[:, None]
    packer = Packer(budget, SHARDS, attention_parity=10_000)
    return packer.pack(lengths, chosen, width=W, scored=asked, common=common), asked


@settings(max_examples=100, deadline=None)
@given(grouped_steps())
def test_a_shared_beginning_has_one_place_before_what_continues_it(step):
    lengths, chosen, common = step
    with mock.patch.object(row_layout, "KEY_BLOCK", 4):
        packed, asked = packed_groups(*step)
    m, count = packed.microbatches, int(packed.count)
    rows, width = m.segment_ids.shape[1:]
    if blocks := m.key_blocks.shape[3]:
        assert blocks * 4 < width
        ids, prefixes = m.segment_ids, m.prefix_ids
        sees = (ids[..., None] == ids[..., None, :]) | (prefixes[..., None] == ids[..., None, :])
        sees &= np.tri(width, dtype=bool) & (ids != 0)[..., None, :]
        of_blocks = sees.reshape(*ids.shape[:2], width // 4, 4, width // 4, 4).any((3, 5))
        for block, wanted in zip(
            m.key_blocks.reshape(-1, blocks), of_blocks.reshape(-1, width // 4), strict=True
        ):
            assert set(np.flatnonzero(wanted)) == set(block.tolist()) - {width // 4}
    assert rows % SHARDS == 0 and rows // SHARDS * width <= 80
    assert (m.segment_ids != 0).sum() <= lengths[chosen].sum()
    assert sorted(m.sequences[m.sequences < B]) == chosen.tolist()
    scored = []
    for g, place in zip(*np.nonzero(m.sequences < B), strict=True):
        sequence, row = m.sequences[g, place], m.rows[g, place]
        ids, positions = m.segment_ids[g, row], m.positions[g, row]
        own = np.flatnonzero(ids == sequence + 1)
        shared = m.prefix_lengths[g, place]
        np.testing.assert_array_equal(positions[own], np.arange(shared, lengths[sequence]))
        np.testing.assert_array_equal(own, m.starts[g, place] + positions[own])
        before = np.arange(own[0] - 1, own[-1])
        if shared:
            assert shared == common.lengths[sequence]
            prefix = m.prefix_ids[g, row, own[0]]
            assert prefix < 0 and (m.prefix_ids[g, row, own] == prefix).all()
            assert common.groups[-prefix - 1] == common.groups[sequence]
            beginning = np.flatnonzero(ids == prefix)
            np.testing.assert_array_equal(beginning, m.prefix_starts[g, place] + np.arange(shared))
            np.testing.assert_array_equal(positions[beginning], np.arange(shared))
            assert beginning[-1] < own[0]
            before[0] = beginning[-1]
        for at, follows in zip(m.scored_columns[g, row], m.previous_columns[g, row], strict=True):
            if at in own:
                scored.append((sequence, positions[at]))
                assert follows == before[at - own[0]]
    wanted = [(s, t) for s in chosen for t in np.flatnonzero(asked[s, : lengths[s]])]
    assert sorted(scored) == wanted
    assert (m.segment_ids[count:] == 0).all() and (m.sequences[count:] == B).all()


@settings(max_examples=30, deadline=None)
@given(grouped_steps())
def test_unpacking_undoes_packing_of_shared_beginnings(step):
    lengths, chosen, common = step
    drawn = np.random.default_rng(0).integers(1, 1000, (B, W)).astype(np.int32)
    alike = np.arange(W) < common.lengths[:, None]
    tokens = np.where(alike, drawn[common.groups], drawn)
    packed, _ = packed_groups(*step)
    found = there_and_back(packed, tokens, lengths)
    kept = np.isin(np.arange(B), chosen)[:, None] & (np.arange(W) < lengths[:, None])
    np.testing.assert_array_equal(found, np.where(kept, tokens, 0))


def test_sharing_by_hand():
    """Rows of 12 hold [prompt of 4, 3 answers of 2]; alone, two sequences of 6."""
    lengths, groups = np.full(6, 6), np.repeat([0, 1], 3)
    asked = np.arange(8) >= 4
    common = packed_batch.SharedPrefixes(groups, np.full(6, 4))
    settings = {"width": 8, "scored": np.broadcast_to(asked, (6, 8)), "common": common}
    packed = Packer(24, 1, attention_parity=100).pack(lengths, np.arange(6), **settings)
    m = jax.tree.map(lambda a: a[0], packed.microbatches)
    np.testing.assert_array_equal(m.segment_ids[0], [-1, -1, -1, -1, 1, 1, 2, 2, 3, 3, 0, 0][:12])
    np.testing.assert_array_equal(m.prefix_ids[0], [-1] * 10 + [0, 0])
    np.testing.assert_array_equal(m.positions[0], [0, 1, 2, 3, 4, 5, 4, 5, 4, 5, 0, 0])
    np.testing.assert_array_equal(m.scored_columns[0, :6], [4, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(m.previous_columns[0, :6], [3, 4, 3, 6, 3, 8])
    np.testing.assert_array_equal(m.starts[:3], [0, 2, 4])
    assert (packed.microbatches.segment_ids != 0).sum() == 20


def test_sharing_where_it_pays_and_the_same_in_a_resumed_run():
    lengths, groups = np.full(16, 8), np.repeat(np.arange(4), 4)
    asked = np.broadcast_to(np.arange(8) >= 4, (16, 8))
    common = packed_batch.SharedPrefixes(groups, np.full(16, 4))
    settings = {"width": 8, "scored": asked, "common": common}

    def width(packer, **changed):
        packed = packer.pack(lengths, np.arange(16), **settings | changed)
        return packed.microbatches.prefix_ids.shape[-1]

    packer = Packer(64, 1, attention_parity=100)
    # A prompt of 4 and four answers of 4.
    assert width(packer) == 20
    # Attention as dear as that of wider rows, no samples beside each other, a row that devices
    # share, everything scored: as without.
    assert width(Packer(64, 1, attention_parity=1)) == 0
    strangers = packed_batch.SharedPrefixes(np.arange(16), np.full(16, 4))
    assert width(Packer(64, 1, attention_parity=100), common=strangers) == 0
    assert width(Packer(64, 1, 2, attention_parity=100)) == 0
    assert width(packer, scored=batches.EVERY_TOKEN) == 0
    # A budget that holds no wider rows: what fits.
    assert width(Packer(10, 1, attention_parity=100)) in (0, 8)
    resumed = Packer(64, 1, attention_parity=1)
    resumed.set_state(packer.get_state())
    assert width(resumed) == 20
    # Four shards with a group each do as well; sixteen would wait for three quarters of them.
    assert width(Packer(64, 4, attention_parity=100)) == 20
    assert width(Packer(64, 16, attention_parity=100)) == 0


def test_take_and_put_are_inverse():
    lengths = np.random.default_rng(1).integers(1, W, B)
    packed = packed_of(lengths, np.array([0, 2, 3, 4, 7, 8, 9, 11]))
    values = {"x": jnp.arange(B * 3.0).reshape(B, 3) + 1, "on": jnp.ones(B, bool)}
    target = jax.tree.map(jnp.zeros_like, values)
    for g in range(int(packed.count)):
        microbatch = jax.tree.map(lambda a, g=g: a[g], packed.microbatches)
        taken = jax.tree.map(microbatch.take, values)
        assert taken["on"].dtype == bool
        np.testing.assert_array_equal(taken["on"], microbatch.sequences < B)
        assert (taken["x"][microbatch.sequences == B] == 0).all()
        target = jax.tree.map(microbatch.put, target, taken)
    np.testing.assert_array_equal(target["on"], packed.is_member)
    np.testing.assert_array_equal(target["x"], np.where(packed.is_member[:, None], values["x"], 0))


def test_accumulate_sums_over_what_is_used():
    lengths = np.full(B, W)
    for budget in (BUDGET, 1000):  # three microbatches and one of padding; a single one
        packed = packed_of(lengths, np.arange(B), budget)
        assert int(packed.count) == (3 if budget == BUDGET else 1)
        weights = jnp.arange(float(B))

        def function(microbatch, weights=weights):
            return {"sum": microbatch.take(weights).sum(), "calls": jnp.float32(1.0)}

        like = {"sum": weights[0], "calls": weights[0]}
        found = jax.jit(lambda p, f=function, like=like: packed_batch.accumulate(p, f, like))(
            packed
        )
        assert found == {"sum": 66.0, "calls": int(packed.count)}


def test_packed_rows_by_hand():
    # Rows of 8: [6, 2], [5, 3], [4]; one shard, two rows a microbatch.
    lengths = np.array([4, 6, 3, 5, 2, 7])
    packed = Packer(16, 1).pack(lengths, np.array([0, 1, 2, 3, 4]), width=8)
    # With room for more microbatches, and for more sequences in each.
    assert packed.microbatches.sequences.shape == (4, 8)
    m = jax.tree.map(lambda a: a[:2], packed.microbatches)
    assert int(packed.count) == 2
    np.testing.assert_array_equal(
        m.segment_ids,
        [
            [[2, 2, 2, 2, 2, 2, 5, 5], [3, 3, 3, 4, 4, 4, 4, 4]],
            [[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0]],
        ],
    )
    np.testing.assert_array_equal(
        m.positions[0], [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4]]
    )
    np.testing.assert_array_equal(m.sequences[:, :5], [[1, 4, 2, 3, 6], [0, 6, 6, 6, 6]])
    np.testing.assert_array_equal(m.rows[:, :5], [[0, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(m.starts[:, :5], [[0, 6, 0, 3, 0], [0, 0, 0, 0, 0]])
    assert batches.padding_share(packed) == 12 / 32


def shapes(packer, seeds, spread=1.0):
    found = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        lengths = np.clip(np.exp(random.normal(5.0, spread, 128)), 8, 1024).astype(int)
        packed = packer.pack(lengths, np.arange(128), width=1024)
        found.append(jax.tree.map(np.shape, packed))
    return [str(shape) for shape in found]


def test_few_distinct_shapes_are_compiled():
    # Log-normal lengths: the number of rows differs every step, shapes settle.
    packer = Packer(1024 * 64, 2)
    found = shapes(packer, range(100))
    assert len(set(found)) <= 5
    assert len(set(found[20:])) <= 3
    # A resumed run makes the shapes that the interrupted one would have made.
    resumed = Packer(1024 * 64, 2)
    resumed.set_state(packer.get_state())
    assert shapes(resumed, range(100, 120)) == shapes(packer, range(100, 120))


def test_the_memo_of_shapes_has_the_keys_of_checkpoints():
    kind = batches.BatchKind(16, 352, 2)
    memo = batches.ShapeMemo(
        fixed={2: 1},
        shared_width={kind: 0},
        rows={kind: 8},
        several_rows={kind: 4},
        microbatches={16: 3},
        slots={(16, 4): 5},
        scored_eighths={352: 6},
        key_blocks={352: 7},
    )
    state = {
        "settled over 2": 1,
        "shared by 16 of 352 over 2": 0,
        "16 in rows of 352 over 2": 8,
        "microbatches of 16 in rows of 352 over 2": 4,
        "microbatches of 16": 3,
        "places of 16 in 4 rows": 5,
        "scored in rows of 352": 6,
        "blocks seen in rows of 352": 7,
    }
    assert memo.to_json() == state
    assert batches.ShapeMemo.from_json(state) == memo


@pytest.mark.parametrize("budget", [512, 1536])
def test_steps_after_the_first_have_its_shapes(budget):
    """Four prompts of GSM8K with four answers each, most of them cut off at 96 tokens."""
    packer = Packer(budget, 1, attention_parity=1024, max_scored=96, min_efficient_tokens=512)
    found = set()
    for seed in range(50):
        random = np.random.default_rng(seed)
        prompts = np.repeat(random.integers(72, 162, 4), 4)
        answers = np.where(random.random(16) < 0.8, 96, random.integers(20, 96, 16))
        positions = np.arange(352)
        asked = (positions >= prompts[:, None]) & (positions < (prompts + answers)[:, None])
        common = packed_batch.SharedPrefixes(np.repeat(np.arange(4), 4), prompts)
        settings = {"width": 352, "scored": asked, "common": common}
        packed = packer.pack(prompts + answers, np.arange(16), **settings)
        found.add(str(jax.tree.map(np.shape, packed)))
    assert len(found) == 1


@pytest.mark.parametrize("parity", [0, 1024], ids=["alone", "shared"])
@pytest.mark.parametrize("budget", [512, 1536, 16_384])
def test_a_run_that_settles_has_one_shape(budget, parity):
    """Sixteen prompts of up to 160 tokens, four answers each of up to 96, in two minibatches."""
    make = functools.partial(
        Packer, budget, 1, attention_parity=parity, max_scored=96, min_efficient_tokens=512
    )
    packer, width, count = make(), 256, 64
    lengths = {"samples": 4, "prompt": 160, "usual": 80, "width": width}
    settled = packer.fix_shapes((count, 32), **lengths)
    wanted = [str(jax.tree.map(np.shape, packed)) for packed in settled]
    # A quarter of it at the most: short steps hardly pay for long ones.
    assert settled[0].microbatches.segment_ids[0].size <= min(budget, count * width // 4)
    resumed = make()
    resumed.set_state(packer.get_state())
    assert str(resumed.fix_shapes((count, 32), **lengths)) == str(settled)
    for seed in range(30):
        random = np.random.default_rng(seed)
        # Now all short, now all long, now mixed.
        longest = random.integers(2, 97)
        prompts = np.repeat(random.integers(2, random.integers(3, 161), 16), 4)
        answers = random.integers(1 + longest // 2 * (seed % 2), longest + 1, count)
        positions = np.arange(width)
        asked = (positions >= prompts[:, None]) & (positions < (prompts + answers)[:, None])
        common = packed_batch.SharedPrefixes(np.repeat(np.arange(16), 4), prompts)
        how = {"width": width, "scored": asked, "common": common}
        half = np.sort(random.permutation(count)[:32])
        for chosen, shape in zip((np.arange(count), half), wanted, strict=True):
            packed = packer.pack(prompts + answers, chosen, **how)
            assert str(jax.tree.map(np.shape, packed)) == shape, (seed, longest)
    # A run that began without it goes on as it was.
    begun = make()
    begun.pack(prompts + answers, np.arange(count), **how)
    state = begun.get_state()
    assert begun.fix_shapes((count, 32), **lengths) == []
    assert begun.get_state() == state


@pytest.mark.parametrize("budget", [512, 2048])
def test_settled_rows_suit_usual_prompts(budget):
    """One prompt in a hundred has 256 tokens, all others have 48; four answers of 96 tokens."""
    computed = {}
    for usual in (48, 256):
        packer = Packer(budget, 1, attention_parity=2048, max_scored=96, min_efficient_tokens=512)
        packer.fix_shapes((16,), samples=4, prompt=256, usual=usual, width=352)
        positions = np.tile(np.arange(352), (16, 1))
        packed = packer.pack(
            np.full(16, 144),
            np.arange(16),
            width=352,
            scored=(positions >= 48) & (positions < 144),
            common=packed_batch.SharedPrefixes(np.repeat(np.arange(4), 4), np.full(16, 48)),
        )
        of_rows = packed.microbatches.segment_ids[: int(packed.count)]
        computed[usual] = of_rows.size
    assert computed[48] <= 0.75 * computed[256]


def test_rows_are_spread_over_shards_by_cost():
    """Of 64 packed rows a few hold one long sequence, whose attention costs most."""
    lengths = np.array([4096] * 8 + [256] * 600)
    lengths = np.random.default_rng(0).permutation(lengths)
    shards, width = 8, 4096
    packer = Packer(width * 4, shards)
    packed = packer.pack(lengths, np.arange(len(lengths)), width=width)
    shares = packer.sequences_by_device(packed)
    assert sorted(s for share in shares for s in share) == list(range(len(lengths)))
    costs = [packed_batch.workload(lengths[share]).sum() for share in shares]
    assert max(costs) - min(costs) <= packed_batch.workload(np.array([width]))[0]
    # What is at work at one time differs by a row at most: no shard waits long for another.
    for g in range(int(packed.count)):
        used = (packed.microbatches.segment_ids[g] > 0).reshape(shards, -1).sum(1)
        assert used.max() - used.min() <= width


@pytest.mark.parametrize("shards", [2, 4])
def test_rows_of_a_sequence_mesh_divide_and_budgets_are_of_a_device(shards):
    lengths = np.array([27, 3, 9, 14])
    packer = Packer(16, 1, shards)
    packed = packer.pack(lengths, np.arange(4), width=27)
    rows, width = packed.microbatches.segment_ids.shape[1:]
    assert width % (2 * shards) == 0 and 27 <= width <= 32
    assert rows * width <= 16 * shards or rows == 1
    assert [sorted(share) for share in packer.sequences_by_device(packed)] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("shards", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_little_of_gsm8k_is_padding(shards):
    """Prompts of about 95 tokens and answers of about 150, 5 to a prompt, in rows of 1024."""
    packer, wasted, shapes = Packer(16_384, shards), [], set()
    for seed in range(20):
        random = np.random.default_rng(seed)
        prompts = np.repeat(np.clip(random.normal(95, 35, 256), 40, 250), 5)
        answers = np.clip(np.exp(random.normal(np.log(130), 0.5, 1280)), 20, 512)
        lengths = prompts.astype(int) + answers.astype(int)
        packed = packer.pack(lengths, np.arange(1280), width=1024)
        wasted.append(batches.padding_share(packed))
        shapes.add(packed.microbatches.segment_ids.shape)
        _, rows, width = packed.microbatches.segment_ids.shape
        assert rows // shards * width <= 16_384  # of a device: a hard cap
    assert np.mean(wasted) < 0.05
    assert len(shapes) <= 2


def test_each_epoch_takes_every_sequence_once():
    random = np.random.default_rng(1)
    lengths = random.integers(6, W + 1, B).astype(np.int32)
    inside = np.arange(W) < lengths[:, None]
    mask = inside & (np.arange(W) >= 5)
    rollouts = Rollouts(
        tokens=np.where(inside, random.integers(0, 104, (B, W)), 0).astype(np.int32),
        response_mask=mask,
        rollout_log_probs=np.where(mask, -1.0, 0.0).astype(np.float32),
        versions=mask.astype(np.int32),
        lengths=lengths,
        group_ids=np.repeat(np.arange(B // 2), 2).astype(np.int32),
        stopped=mask[:, -1],
        prompts=(),
        responses=(),
    )
    config = RLConfig(trainer=RLTrainerConfig(minibatch_size=4, epochs=2))
    packer, key = Packer(BUDGET, SHARDS), jax.random.key(0)
    order = batches.update_order(config, len(lengths), key)
    found = list(batches.minibatches(packer, rollouts, order))
    assert len(found) == 6
    chosen = np.array([packed.is_member for packed, _ in found])
    np.testing.assert_array_equal(chosen.sum(1), 4)
    np.testing.assert_array_equal(chosen[:3].sum(0), 1)
    np.testing.assert_array_equal(chosen[3:].sum(0), 1)
    assert (chosen[:3] != chosen[3:]).any(), "every epoch has an order of its own"
    assert len({str(jax.random.key_data(k)) for _, k in found}) == 6
    for (which, _), packed in zip(
        batches.update_order(config, len(lengths), key), chosen, strict=True
    ):
        np.testing.assert_array_equal(which, np.flatnonzero(packed))
