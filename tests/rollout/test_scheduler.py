"""The scheduler on its own: replayed decisions, no device."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.rollout import inputs
from jaxrl_llm.rollout.programs import Outputs
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS, Progress, Request, SamplingParams
from jaxrl_llm.rollout.scheduler import Scheduler


def text_of(tokens):
    return "".join(chr(ord("a") + token) for token in tokens)


def request(*budgets, prompt=(7, 8), stops=(), strings=(), top=0):
    params = tuple(
        SamplingParams(b, stop_tokens=stops, stop_strings=strings, num_top_log_probs=top)
        for b in budgets
    )
    return Request(tuple(prompt), np.zeros((len(budgets), 2), np.uint32), params)


def outputs(columns, steps, slots, remaining):
    """What `generate` gives: slots without a column are idle. Log-probs are -token / 10."""
    tokens = np.full((steps, slots), -1, np.int32)
    for slot, column in columns.items():
        tokens[: len(column), slot] = column
    log_probs = np.where(tokens >= 0, tokens / -10.0, 0.0)
    tops = np.stack([tokens, tokens + 1], -1)
    no_routes = np.zeros((steps, slots, 0), np.int16)
    return Outputs(tokens, log_probs, tops, tops / -10.0, no_routes, np.array(remaining))


def first(tokens, remaining):
    return outputs(dict(enumerate([t] for t in tokens)), 1, len(tokens), remaining)


def entered(samples):
    return [(s.request, s.index, s.slot) for s in samples]


def brief(progress):
    return [(p.request, p.sample, p.tokens, p.finish_reason) for p in progress]


def test_one_run_by_hand():
    scheduler = Scheduler(2, text_of)
    numbers = [scheduler.add(r) for r in (request(4, 1), request(3, stops=(5,)), request(2))]
    assert numbers == [0, 1, 2]
    assert (len(scheduler.waiting), len(scheduler.active)) == (4, 0)

    # The first two samples of the first prompt enter; the second ends with its first token.
    samples = scheduler.admit()
    assert entered(samples) == [(0, 0, 0), (0, 1, 1)]
    scheduler.take_first(samples, first([1, 2, 9], (3, 0, 0)))  # an insert may be wider
    assert (len(scheduler.waiting), len(scheduler.active)) == (2, 1)
    assert max(scheduler.lengths()) == 3

    # The freed slot is the one that is filled; a full house admits nobody.
    samples = scheduler.admit()
    assert entered(samples) == [(1, 0, 1)]
    assert scheduler.admit() == []
    scheduler.take_first(samples, first([3], [2]))
    assert scheduler.lengths() == [3, 3]
    # Of budgets 4 and 3, a token each is used.
    assert scheduler.lengths(beyond=2) == [3]
    assert scheduler.lengths(beyond=3) == []

    # Two steps; slot 1 meets its stop token in the first and idles in the second.
    assert scheduler.take(outputs({0: [4, 5], 1: [5]}, 3, 2, [1, 0])) == 3
    assert brief(scheduler.progress()) == [
        (0, 0, (1, 4, 5), ""),
        (0, 1, (2,), "length"),
        (1, 0, (3, 5), "stop"),
    ]
    assert list(scheduler.requests) == [0, 2]  # the second is finished and forgotten
    assert max(scheduler.lengths()) == 5
    samples = scheduler.admit()
    assert entered(samples) == [(2, 0, 1)]
    scheduler.take_first(samples, first([6], [1]))
    assert scheduler.take(outputs({0: [1], 1: [5]}, 3, 2, [0, 0])) == 2
    assert (len(scheduler.waiting), len(scheduler.active)) == (0, 0)
    # 5 ends a sample only where it is among the sample's stop tokens.
    found = scheduler.progress()
    assert brief(found) == [(2, 0, (6, 5), "length"), (0, 0, (1,), "length")]
    assert found[0].log_probs == pytest.approx((-0.6, -0.5))
    assert found[0].top_log_probs == ()
    assert scheduler.progress() == []
    assert scheduler.stale_slots() == []


def test_likeliest_tokens_are_as_many_as_asked_for():
    scheduler = Scheduler(1, text_of)
    scheduler.add(request(2, top=1))
    scheduler.take_first(scheduler.admit(), first([3], [1]), version=5)
    scheduler.take(outputs({0: [4]}, 2, 1, [0]), version=6)
    (found,) = scheduler.progress()
    tops = ((3, -0.3),), ((4, -0.4),)
    assert found == Progress(0, 0, (3, 4), (-0.3, -0.4), (5, 6), tops, "length")


def test_a_request_is_removed_wherever_its_samples_are():
    scheduler = Scheduler(2, text_of)
    gone, other = scheduler.add(request(1, 5, 5)), scheduler.add(request(1))
    scheduler.take_first(scheduler.admit(), first([1, 2], [0, 4]))
    scheduler.take_first(scheduler.admit(), first([3], [4]))
    # One is done, two stand in slots that the device would go on with.
    found = scheduler.remove(gone)
    assert [c.tokens for c in found] == [[1], [2], [3]]
    assert [c.finish_reason for c in found] == ["length", "abort", "abort"]
    assert scheduler.remove(gone) == []
    assert scheduler.progress() == []
    # A slot that is filled again is in step with the device, the other is not.
    samples = scheduler.admit()
    assert entered(samples) == [(other, 0, 0)]
    scheduler.take_first(samples, first([3], [0]))
    assert scheduler.stale_slots() == [1]
    assert scheduler.stale_slots() == []
    # One that waits.
    last = scheduler.add(request(1, 1))
    assert [c.finish_reason for c in scheduler.remove(last)] == ["abort", "abort"]
    assert (len(scheduler.waiting), len(scheduler.active)) == (0, 0)


def test_active_samples_move_to_the_front():
    scheduler = Scheduler(8, text_of)
    scheduler.add(request(*range(1, 9)))
    # Samples 3 and later live on; 0 to 2 end with their first token.
    scheduler.take_first(scheduler.admit(), first([1] * 8, [0, 0, 0, 3, 0, 5, 6, 0]))
    assert scheduler.compact(8) == []
    assert scheduler.compact(4) == [(5, 0), (6, 1)]
    # Columns are slots: what was sampled goes to the samples that moved there.
    scheduler.take(outputs({0: [5], 1: [6], 3: [3]}, 1, 4, [4, 5, 0, 2]))
    found = {p.sample: p.tokens for p in scheduler.progress()}
    assert [found[i] for i in (3, 5, 6)] == [(1, 3), (1, 5), (1, 6)]


def test_a_stop_string_ends_a_sample_within_a_chunk():
    scheduler = Scheduler(2, text_of)
    scheduler.add(request(9, 9, strings=("bcd", "zz"), top=2))
    scheduler.take_first(scheduler.admit(), first([1, 0], [8, 8]))
    scheduler.take(outputs({0: [2, 3, 4, 5], 1: [1, 2, 4, 1]}, 4, 2, [4, 4]))
    one, other = scheduler.progress()
    assert (one.tokens, one.finish_reason) == ((1, 2, 3), "stop")
    assert len(one.log_probs) == len(one.versions) == len(one.top_log_probs) == 3
    assert (other.tokens, other.finish_reason) == ((0, 1, 2, 4, 1), "")
    assert scheduler.stale_slots() == [0]
    # Begun in one chunk and completed in the next; ending at its limit in the same chunk.
    scheduler.take(outputs({1: [2, 3, 0, 0]}, 4, 2, [0, 0]))
    (other,) = scheduler.progress()
    assert (other.tokens, other.finish_reason) == ((2, 3), "stop")


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 12), max_size=5), max_size=8),
    num_slots=st.integers(1, 6),
    chunk=st.integers(1, 5),
)
def test_every_sample_is_served_once_and_in_order(groups, num_slots, chunk):
    scheduler = Scheduler(num_slots, text_of)
    numbers = [scheduler.add(request(*budgets)) for budgets in groups]
    lengths = [[0] * len(budgets) for budgets in groups]
    left = np.zeros(num_slots, int)
    admitted = []
    while scheduler.waiting or scheduler.active:
        while samples := scheduler.admit():
            for p in samples:
                assert left[p.slot] == 0, "a slot in use was given away"
                left[p.slot] = groups[p.request][p.index] - 1
                admitted.append((p.request, p.index))
            scheduler.take_first(
                samples, first([1] * len(samples), [left[p.slot] for p in samples])
            )
        assert len(scheduler.active) == (left > 0).sum()
        # No slot idles while a sample waits.
        assert not scheduler.waiting or len(scheduler.active) == num_slots
        steps = np.minimum(left, chunk)
        columns = {slot: [2] * count for slot, count in enumerate(steps)}
        left -= steps
        assert scheduler.take(outputs(columns, chunk, num_slots, left)) == steps.sum()
        for p in scheduler.progress():
            lengths[p.request][p.sample] += len(p.tokens)
            done = lengths[p.request][p.sample] == groups[p.request][p.sample]
            assert p.finish_reason == ("length" if done else "")
    assert admitted == [(r, s) for r, group in enumerate(groups) for s in range(len(group))]
    assert lengths == groups
    assert numbers == list(range(len(groups)))


def test_filters_are_seen():
    assert not SamplingParams(1, temperature=0.3).is_filtered
    for params in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(1, **params).is_filtered


def test_an_insert_of_two_samples_in_room_for_three():
    entering = [
        (1, 6, np.array([1, 2], np.uint32), SamplingParams(7, 0.5, top_k=3, stop_tokens=(9, 4))),
        (1, 0, np.array([3, 4], np.uint32), SamplingParams(5, top_p=0.9, min_p=0.1)),
    ]
    found = inputs.admission(entering, size=3, num_slots=8)
    # The third goes past the last slot: nowhere.
    assert found.slots.tolist() == [6, 0, 8]
    assert found.prompts.tolist() == [1, 1, 0]
    assert found.limits.tolist() == [7, 5, 1]
    assert found.stops.shape == (3, NUM_STOP_TOKENS)
    assert found.stops[0, :3].tolist() == [9, 4, -1]
    assert (found.stops[1:] == -1).all()
    assert found.sampler.keys.tolist() == [[1, 2], [3, 4], [0, 0]]
    assert found.sampler.temperature.tolist() == [0.5, 1.0, 1.0]
    assert found.sampler.top_k.tolist() == [3, 0, 0]
    np.testing.assert_allclose(found.sampler.top_p, [1.0, 0.9, 1.0])
    np.testing.assert_allclose(found.sampler.min_p, [0.0, 0.1, 0.0])


def test_an_insert_of_nobody():
    found = inputs.admission([], 2, 4)
    assert found.slots.tolist() == [4, 4]
