"""The scheduler on its own: replayed decisions, no device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout.scheduler import Placement, Request, SamplingParams, Scheduler


def request(*budgets, prompt=(7, 8), stops=()):
    params = tuple(SamplingParams(b, stop_tokens=stops) for b in budgets)
    return Request(tuple(prompt), np.zeros((len(budgets), 2), np.uint32), params)


def outputs(columns, steps, slots):
    """What `generate` returns: tokens and log-probs [N, S]; slots without a column are idle."""
    tokens = np.full((steps, slots), -1, np.int32)
    for slot, column in columns.items():
        tokens[: len(column), slot] = column
    return tokens, np.where(tokens >= 0, tokens / -10.0, 0.0).astype(np.float32)


def test_one_run_by_hand():
    scheduler = Scheduler([request(4, 1), request(3, stops=(5,)), request(2)], num_slots=2)
    assert (scheduler.num_waiting, scheduler.num_active) == (4, 0)

    # The first two samples of the first prompt enter; the second ends with its first token.
    placements = scheduler.admit()
    assert placements == [Placement(0, 0, 0), Placement(0, 1, 1)]
    padding = (9, -0.9, 0)  # an insert is wider than what enters
    scheduler.first_tokens(placements, *zip((1, -0.1, 3), (2, -0.2, 0), padding, strict=True))
    assert (scheduler.num_waiting, scheduler.num_active) == (2, 1)
    assert scheduler.max_active_tokens() == 3

    # The freed slot is the one that is filled; a full house admits nobody.
    placements = scheduler.admit()
    assert placements == [Placement(1, 0, 1)]
    assert scheduler.admit() == []
    scheduler.first_tokens(placements, [3], [-0.3], [2])
    assert scheduler.max_active_tokens() == 3

    # Two steps; slot 1 meets its stop token in the first and idles in the second.
    taken = scheduler.take(*outputs({0: [4, 5], 1: [5]}, 3, 2), remaining=[1, 0])
    assert taken == 3
    assert scheduler.max_active_tokens() == 5
    assert scheduler.admit() == [Placement(2, 0, 1)]
    scheduler.first_tokens([Placement(2, 0, 1)], [6], [-0.6], [1])
    assert scheduler.take(*outputs({0: [1], 1: [2]}, 3, 2), remaining=[0, 0]) == 2
    assert (scheduler.num_waiting, scheduler.num_active) == (0, 0)

    found = [[c.tokens for c in row] for row in scheduler.completions]
    assert found == [[[1, 4, 5, 1], [2]], [[3, 5]], [[6, 2]]]
    # 5 ends a sample only where it is among the sample's stop tokens.
    assert [[c.stopped for c in row] for row in scheduler.completions] == [
        [False, False],
        [True],
        [False],
    ]
    assert scheduler.completions[1][0].log_probs == pytest.approx([-0.3, -0.5])


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 12), max_size=5), max_size=8),
    num_slots=st.integers(1, 6),
    chunk=st.integers(1, 5),
)
def test_every_sample_is_served_once_and_in_order(groups, num_slots, chunk):
    scheduler = Scheduler([request(*budgets) for budgets in groups], num_slots)
    left = np.zeros(num_slots, int)
    admitted = []
    while scheduler.num_waiting or scheduler.num_active:
        while placements := scheduler.admit():
            for p in placements:
                assert left[p.slot] == 0, "a slot in use was given away"
                left[p.slot] = groups[p.request][p.sample] - 1
                admitted.append((p.request, p.sample))
            scheduler.first_tokens(
                placements, *zip(*((1, -1.0, left[p.slot]) for p in placements), strict=True)
            )
        assert scheduler.num_active == (left > 0).sum()
        # No slot idles while a sample waits.
        assert not scheduler.num_waiting or scheduler.num_active == num_slots
        steps = np.minimum(left, chunk)
        columns = {slot: [2] * count for slot, count in enumerate(steps)}
        left -= steps
        assert scheduler.take(*outputs(columns, chunk, num_slots), left) == steps.sum()
    assert admitted == [(r, s) for r, group in enumerate(groups) for s in range(len(group))]
    assert [[len(c.tokens) for c in row] for row in scheduler.completions] == groups


def test_filters_are_seen():
    assert not SamplingParams(1, temperature=0.3).is_filtered
    for params in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(1, **params).is_filtered
