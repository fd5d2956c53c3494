"""Properties of partitions and packings over many inputs, and a few by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.packing.packed_batch import (
    PrefixPiece,
    SharedPrefixes,
    balanced_partition,
    bucket,
    pack,
    prefix_pieces,
    shared_prefixes,
    workload,
)

few = settings(max_examples=60, deadline=None)


def gsm8k_like_lengths(count, seed=0):
    """Log-normal: a mean of 250 tokens, a long tail up to 1024."""
    draws = np.random.default_rng(seed).lognormal(5.4, 0.45, count)
    return np.clip(draws, 60, 1024).astype(int)


def test_workload_by_hand():
    # 24576 tokens: as much for attention as for all the rest.
    np.testing.assert_array_equal(workload(np.array([0, 24576])), [0.0, 2 * 24576])


def test_partition_by_hand():
    # 8 and 7 differ by 1, 6 and 5 by 1, 4 and 2 by 2: 8 + 5 and 7 + 6 by 0; then + 4 and + 2.
    costs = [8, 7, 6, 5, 4, 2]
    parts = balanced_partition(costs, 2)
    assert sorted(sum(costs[i] for i in part) for part in parts) == [16, 16]
    assert balanced_partition([1, 1, 1, 9], 2) == [[0, 1], [2, 3]]
    assert balanced_partition([], 2) == [[], []]


@few
@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_partition_has_every_item_once_in_parts_of_one_size(num_parts, size, random):
    costs = [random.choice([0.0, 1e6 * random.random()]) for _ in range(num_parts * size)]
    parts = balanced_partition(costs, num_parts)
    assert parts == balanced_partition(costs, num_parts)
    assert [len(part) for part in parts] == [size] * num_parts
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))


def test_parts_of_a_step_are_balanced():
    costs = workload(gsm8k_like_lengths(1024))
    sums = [costs[part].sum() for part in balanced_partition(costs, 8)]
    assert max(sums) / np.mean(sums) < 1.001
    in_order = costs.reshape(8, -1).sum(1)
    assert max(in_order) / np.mean(in_order) > 1.01  # what there was to gain


def test_partition_errors():
    with pytest.raises(ValueError, match="7 items cannot form 2 parts of equal size"):
        balanced_partition([1.0] * 7, 2)
    with pytest.raises(ValueError, match="num_parts must be at least 1, got 0"):
        balanced_partition([1.0], 0)
    for wrong in (-1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="finite and not negative"):
            balanced_partition([1.0, wrong], 2)


def test_pack_by_hand():
    # 7 opens row 0; 5 does not fit and opens row 1; 4 goes to row 1; 3 to row 0; 1 to row 1.
    assert pack([3, 7, 5, 1, 4], 10) == [[0, 1], [2, 3, 4]]
    assert pack([], 10) == []
    assert pack([10, 10], 10) == [[0], [1]]


@few
@given(st.lists(st.integers(1, 64), max_size=60), st.integers(64, 200))
def test_rows_hold_every_sequence_once_within_the_cap(lengths, row_tokens):
    rows = pack(lengths, row_tokens)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert all(0 < load <= row_tokens for load in loads)
    # No two rows could be one: what first fit promises.
    assert all(a + b > row_tokens for n, a in enumerate(loads) for b in loads[n + 1 :])
    assert rows == pack(lengths, row_tokens)


@pytest.mark.parametrize("row_tokens", [2048, 4096, 16384])
def test_waste_is_below_five_percent(row_tokens):
    lengths = gsm8k_like_lengths(1024)
    rows = pack(lengths, row_tokens)
    assert 1 - lengths.sum() / (len(rows) * row_tokens) < 0.05


def test_pack_errors():
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, a row holds 1 to 10"):
        pack([3, 11], 10)
    with pytest.raises(ValueError, match="sequence 0 has 0 tokens"):
        pack([0], 10)


def test_beginnings_end_where_sequences_differ_or_are_asked_about():
    tokens = np.array([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 8, 2], [5, 6, 0, 0], [9, 3, 0, 0]])
    lengths = np.array([4, 4, 4, 2, 2])
    own = np.arange(4) >= np.array([3, 3, 3, 4, 1])[:, None]  # of the fourth nothing is
    found = shared_prefixes(tokens, lengths, own, np.array([0, 0, 1, 1, 2]))
    np.testing.assert_array_equal(found.lengths, [3, 3, 1, 1, 1])
    # Of three that begin alike, by two tokens.
    found = shared_prefixes(tokens[:3], lengths[:3], own[:3], np.zeros(3, int))
    np.testing.assert_array_equal(found.lengths, [2, 2, 2])


def test_pieces_by_hand():
    common = SharedPrefixes(np.array([0, 0, 0, 1, 1, 2]), np.array([3, 3, 3, 0, 0, 2]))
    found = prefix_pieces(np.array([4, 5, 6, 2, 2, 4]), common, 8)
    # 3 + 3 + 2 fill a row; the third begins another, with nobody to share with.
    assert found == [
        PrefixPiece((1, 2), 3, 8),
        PrefixPiece((0,), 0, 4),
        PrefixPiece((3,), 0, 2),
        PrefixPiece((4,), 0, 2),
        PrefixPiece((5,), 0, 4),
    ]


def test_bucket_rounds_up():
    assert [bucket(n) for n in (0, 1, 2, 3, 9)] == [1, 1, 2, 4, 16]
    assert [bucket(n, smallest=3, largest=10) for n in (1, 4, 7, 10)] == [3, 6, 10, 10]
