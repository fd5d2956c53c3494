"""The scheduler on its own: replayed decisions, no device."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_work import first, outputs, request, text_of

from jaxrl_llm.rollout.engine import host_inputs
from jaxrl_llm.rollout.engine.page_allocator import CacheLayout, PageAllocator
from jaxrl_llm.rollout.engine.requests import NUM_STOP_TOKENS, Progress, SamplingParams
from jaxrl_llm.rollout.engine.scheduler import Scheduler


def make(num_slots, num_pages=0, page_tokens=4, max_tokens=32, num_shards=1, chunk_tokens=4):
    """Returns a scheduler; without `num_pages` every slot has those of the longest sequence."""
    num_pages = num_pages or num_slots * -(-max_tokens // page_tokens)
    layout = CacheLayout(num_pages, page_tokens, max_tokens, num_slots, num_shards)
    return Scheduler(text_of, PageAllocator(layout), chunk_tokens)


def entered(samples):
    return [(s.request, s.index, s.slot) for s in samples]


def brief(progress):
    return [(p.request, p.sample, p.tokens, p.finish_reason) for p in progress]


def test_one_run_by_hand():
    scheduler = make(2)
    numbers = [scheduler.add(r) for r in (request(4, 1), request(3, stops=(5,)), request(2))]
    assert numbers == [0, 1, 2]
    assert (len(scheduler.waiting), len(scheduler.active)) == (4, 0)

    # The first two samples of the first prompt enter; the second ends with its first token.
    samples = scheduler.schedule()
    assert entered(samples) == [(0, 0, 0), (0, 1, 1)]
    scheduler.record_inserted(samples, first([1, 2, 9], (3, 0, 0)))  # an insert may be wider
    assert (len(scheduler.waiting), len(scheduler.active)) == (2, 1)
    assert max(scheduler.active_lengths()) == 3

    # The freed slot is the one that is filled; a full house admits nobody.
    samples = scheduler.schedule()
    assert entered(samples) == [(1, 0, 1)]
    assert scheduler.schedule() == []
    scheduler.record_inserted(samples, first([3], [2]))
    assert scheduler.active_lengths() == [3, 3]
    # Of budgets 4 and 3, a token each is used.
    assert scheduler.active_lengths(beyond=2) == [3]
    assert scheduler.active_lengths(beyond=3) == []

    # Two steps; slot 1 meets its stop token in the first and idles in the second.
    assert scheduler.record_generated(outputs({0: [4, 5], 1: [5]}, 3, 2, [1, 0])) == 3
    assert brief(scheduler.progress()) == [
        (0, 0, (1, 4, 5), ""),
        (0, 1, (2,), "length"),
        (1, 0, (3, 5), "stop"),
    ]
    assert list(scheduler.requests) == [0, 2]  # the second is finished and forgotten
    assert max(scheduler.active_lengths()) == 5
    samples = scheduler.schedule()
    assert entered(samples) == [(2, 0, 1)]
    scheduler.record_inserted(samples, first([6], [1]))
    assert scheduler.record_generated(outputs({0: [1], 1: [5]}, 3, 2, [0, 0])) == 2
    assert (len(scheduler.waiting), len(scheduler.active)) == (0, 0)
    # 5 ends a sample only where it is among the sample's stop tokens.
    found = scheduler.progress()
    assert brief(found) == [(2, 0, (6, 5), "length"), (0, 0, (1,), "length")]
    assert found[0].log_probs == pytest.approx((-0.6, -0.5))
    assert found[0].top_log_probs == ()
    assert scheduler.progress() == []
    assert scheduler.stale_slots() == []


def test_likeliest_tokens_are_as_many_as_asked_for():
    scheduler = make(1)
    scheduler.add(request(2, top=1))
    scheduler.record_inserted(scheduler.schedule(), first([3], [1]), version=5)
    scheduler.record_generated(outputs({0: [4]}, 2, 1, [0]), version=6)
    (found,) = scheduler.progress()
    tops = ((3, -0.3),), ((4, -0.4),)
    assert found == Progress(0, 0, (3, 4), (-0.3, -0.4), (5, 6), tops, "length")


def test_a_request_is_removed_wherever_its_samples_are():
    scheduler = make(2)
    gone, other = scheduler.add(request(1, 5, 5)), scheduler.add(request(1))
    scheduler.record_inserted(scheduler.schedule(), first([1, 2], [0, 4]))
    scheduler.record_inserted(scheduler.schedule(), first([3], [4]))
    # One is done, two stand in slots that the device would go on with.
    found = scheduler.abort(gone)
    assert [c.tokens for c in found] == [[1], [2], [3]]
    assert [c.finish_reason for c in found] == ["length", "abort", "abort"]
    assert scheduler.abort(gone) == []
    assert scheduler.progress() == []
    # A slot that is filled again is in step with the device, the other is not.
    samples = scheduler.schedule()
    assert entered(samples) == [(other, 0, 0)]
    scheduler.record_inserted(samples, first([3], [0]))
    assert scheduler.stale_slots() == [1]
    assert scheduler.stale_slots() == []
    # One that waits.
    last = scheduler.add(request(1, 1))
    assert [c.finish_reason for c in scheduler.abort(last)] == ["abort", "abort"]
    assert (len(scheduler.waiting), len(scheduler.active)) == (0, 0)


def test_active_samples_move_to_the_front():
    scheduler = make(8)
    scheduler.add(request(*range(1, 9)))
    # Samples 3 and later live on; 0 to 2 end with their first token.
    scheduler.record_inserted(scheduler.schedule(), first([1] * 8, [0, 0, 0, 3, 0, 5, 6, 0]))
    assert scheduler.compact(8) == []
    assert scheduler.compact(4) == [(5, 0), (6, 1)]
    # Columns are slots: what was sampled goes to the samples that moved there.
    scheduler.record_generated(outputs({0: [5], 1: [6], 3: [3]}, 1, 4, [4, 5, 0, 2]))
    found = {p.sample: p.tokens for p in scheduler.progress()}
    assert [found[i] for i in (3, 5, 6)] == [(1, 3), (1, 5), (1, 6)]


def test_a_stop_string_ends_a_sample_within_a_chunk():
    scheduler = make(2)
    scheduler.add(request(9, 9, strings=("bcd", "zz"), top=2))
    scheduler.record_inserted(scheduler.schedule(), first([1, 0], [8, 8]))
    scheduler.record_generated(outputs({0: [2, 3, 4, 5], 1: [1, 2, 4, 1]}, 4, 2, [4, 4]))
    one, other = scheduler.progress()
    assert (one.tokens, one.finish_reason) == ((1, 2, 3), "stop")
    assert len(one.log_probs) == len(one.versions) == len(one.top_log_probs) == 3
    assert (other.tokens, other.finish_reason) == ((0, 1, 2, 4, 1), "")
    assert scheduler.stale_slots() == [0]
    # Begun in one chunk and completed in the next; ending at its limit in the same chunk.
    scheduler.record_generated(outputs({1: [2, 3, 0, 0]}, 4, 2, [0, 0]))
    (other,) = scheduler.progress()
    assert (other.tokens, other.finish_reason) == ((2, 3), "stop")


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 12), max_size=5), max_size=8),
    num_slots=st.integers(1, 6),
    chunk=st.integers(1, 5),
)
def test_every_sample_is_served_once_and_in_order(groups, num_slots, chunk):
    scheduler = make(num_slots)
    numbers = [scheduler.add(request(*budgets)) for budgets in groups]
    lengths = [[0] * len(budgets) for budgets in groups]
    left = np.zeros(num_slots, int)
    admitted = []
    while scheduler.waiting or scheduler.active:
        while samples := scheduler.schedule():
            for p in samples:
                assert left[p.slot] == 0, "a slot in use was given away"
                left[p.slot] = groups[p.request][p.index] - 1
                admitted.append((p.request, p.index))
            scheduler.record_inserted(
                samples, first([1] * len(samples), [left[p.slot] for p in samples])
            )
        assert len(scheduler.active) == (left > 0).sum()
        # No slot idles while a sample waits.
        assert not scheduler.waiting or len(scheduler.active) == num_slots
        steps = np.minimum(left, chunk)
        columns = {slot: [2] * count for slot, count in enumerate(steps)}
        left -= steps
        assert scheduler.record_generated(outputs(columns, chunk, num_slots, left)) == steps.sum()
        for p in scheduler.progress():
            lengths[p.request][p.sample] += len(p.tokens)
            done = lengths[p.request][p.sample] == groups[p.request][p.sample]
            assert p.finish_reason == ("length" if done else "")
    assert admitted == [(r, s) for r, group in enumerate(groups) for s in range(len(group))]
    assert lengths == groups
    assert numbers == list(range(len(groups)))


def page_counts(scheduler):
    """Returns how many samples hold each page, as the samples themselves say."""
    counts = [0] * scheduler._pages.layout.num_pages
    for holder in (*scheduler.active.values(), *scheduler._retained.values()):
        for page in holder.pages:
            counts[page] += 1
    return counts


def test_samples_of_a_prompt_share_its_full_pages():
    scheduler = make(4)
    scheduler.add(request(6, 6, 6, prompt=range(10)))
    samples = scheduler.schedule()
    # Two full pages are written once, the third by each.
    one, two, three = (sample.pages for sample in samples)
    assert one[:2] == two[:2] == three[:2]
    assert [sample.page_writes for sample in samples] == [
        [(one[0], 0), (one[1], 4), (one[2], 8)],
        [(two[2], 8)],
        [(three[2], 8)],
    ]
    assert scheduler._pages.num_used == 5
    scheduler.record_inserted(samples, first([1, 2, 3], [5, 5, 0]))
    # The third ended: its own page is free, the prompt's are still held by two.
    assert scheduler._pages.num_used == 4
    assert scheduler.reserve(4, preempt=True)
    # 11 tokens, 4 more, without the last: 14 in the cache.
    assert [len(sample.pages) for sample in samples] == [4, 4, 0]
    scheduler.record_generated(outputs({0: [4] * 4, 1: [5] * 4}, 4, 4, [0, 0, 0, 0]))
    assert scheduler._pages.num_used == 0
    scheduler.add(request(6, 6, prompt=range(10)))
    assert [len(sample.page_writes) for sample in scheduler.schedule()] == [3, 1]
    scheduler.drop_cache()  # the weights have changed
    scheduler.add(request(6, prompt=range(10)))
    assert [len(sample.page_writes) for sample in scheduler.schedule()] == [3]


def test_the_youngest_is_put_back_when_pages_run_out():
    # Eight pages of four tokens: as many as the longest sequence has.
    scheduler = make(3, num_pages=8)
    for _ in range(3):
        scheduler.add(request(28))
    samples = old, young, last = scheduler.schedule()
    scheduler.record_inserted(samples, first([1, 1, 1], [27, 27, 27]))
    for count in (3, 2):  # of 11 tokens each, two hold three pages and none is left for the third
        assert scheduler.reserve(4, preempt=True)
        assert len(scheduler.active) == count
        columns = {slot: [2] * 4 for slot in scheduler.active}
        scheduler.record_generated(outputs(columns, 4, 3, [9] * 3))
    assert [len(sample.pages) for sample in samples] == [3, 3, 0]
    assert scheduler.stale_slots() == [2]
    assert scheduler.schedule() == []  # it would be put back at once
    assert not scheduler.reserve(12, preempt=False)
    assert scheduler.num_preempted == 1 and scheduler._pages.num_used == 6
    assert scheduler.reserve(12, preempt=True)
    assert scheduler.active == {0: old} and len(old.pages) == 6
    assert scheduler.num_preempted == 2 and scheduler.stale_slots() == [1]
    assert list(scheduler.waiting) == [young, last]
    # It enters again when pages are free, with all its tokens to be read and the rest to be drawn.
    assert scheduler.schedule() == []
    scheduler.abort(0)
    assert scheduler.schedule() == [young, last]
    assert not young.needs_full_prefill and young.num_cached_tokens == 0
    assert young.remaining_params.max_tokens == 28 - len(young.completion.tokens) == 19
    assert scheduler.recomputed_tokens == young.num_tokens + last.num_tokens == (2 + 9) + (2 + 5)


@pytest.mark.parametrize(
    ("num_prompts", "group", "prompt", "longest", "share"),
    [(32, 4, 64, 256, 0.5), (16, 16, 1024, 512, 0.25)],
)
def test_half_and_a_quarter_of_the_pages_are_enough(num_prompts, group, prompt, longest, share):
    """Of slots times the longest sequence, with lengths as reasoning makes them: none waits."""
    lengths = np.exp(np.random.default_rng(0).normal(4.0, 0.9, (num_prompts, group)))
    budgets = np.clip(lengths * longest / 256, 1, longest).astype(int)
    most, slots, chunk = prompt + longest, 64, 16
    num_pages = int(share * slots * most / 32)
    scheduler = make(slots, num_pages, 32, most, chunk_tokens=chunk)
    for each in budgets:
        scheduler.add(request(*each.tolist(), prompt=range(prompt)))
    given, full = 0, 0
    while scheduler.waiting or scheduler.active:
        while samples := scheduler.schedule():
            left = [sample.params.max_tokens - 1 for sample in samples]
            scheduler.record_inserted(samples, first([1] * len(samples), left))
            given += len(samples)
        full += len(scheduler.active) == slots
        scheduler.reserve(chunk, preempt=True)
        left = {at: s.max_tokens - s.num_tokens for at, s in scheduler.active.items()}
        columns = {at: [2] * min(chunk, count) for at, count in left.items()}
        remaining = [max(0, left.get(at, 0) - chunk) for at in range(slots)]
        given += scheduler.record_generated(outputs(columns, chunk, slots, remaining))
    assert given == budgets.sum() and scheduler.num_preempted == 0 and full > 0
    assert scheduler._pages.num_used == 0


def test_abandoned_continuation_frees_its_pages_first():
    """All pages hold a sample that ended; one that soon differs from it needs nearly all."""
    scheduler = make(1, num_pages=8)
    number = scheduler.add(dataclasses.replace(request(20, prompt=range(11)), retains_pages=True))
    scheduler.record_inserted(scheduler.schedule(), first([1], [19]))
    scheduler.reserve(19, preempt=True)
    scheduler.record_generated(outputs({0: [2] * 19}, 19, 1, [0]))
    assert scheduler._pages.num_used == 8
    other = request(3, prompt=[*range(6), *[3] * 22])
    scheduler.add(dataclasses.replace(other, continues=(number, 0)))
    (sample,) = scheduler.schedule()
    assert sample.num_cached_tokens == 6 and len(sample.pages) == 7
    assert page_counts(scheduler) == scheduler._pages._ref_counts


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 18), max_size=5), st.booleans()),
        max_size=6,
    ),
    sizes=st.sampled_from([(4, 1), (6, 1), (4, 2), (6, 3)]),
    spare=st.integers(0, 6),
    chunk=st.integers(1, 6),
)
def test_however_few_pages_there_are_every_sample_ends(groups, sizes, spare, chunk):
    (num_slots, shards), per_slot = sizes, 8
    num_pages = shards * (per_slot + spare)
    scheduler = make(num_slots, num_pages, num_shards=shards, chunk_tokens=chunk)
    waits = []  # of what is kept
    for length, budgets, keeps in groups:
        asked = request(*budgets, prompt=range(length))
        number = scheduler.add(dataclasses.replace(asked, retains_pages=keeps))
        waits += [(number, i, length, b) for i, b in enumerate(budgets) if keeps]
    for _ in range(3000):
        if not (scheduler.waiting or scheduler.active):
            break
        scheduler.reserve(chunk, preempt=True)
        while samples := scheduler.schedule():
            for sample in samples:
                assert len(sample.pages) * 4 >= sample.num_tokens > sample.num_cached_tokens
                for page in sample.pages[sample.num_cached_tokens // 4 :]:
                    alone = not scheduler._pages.is_shared(page)
                    assert alone or sample.needs_full_prefill
            left = [sample.max_tokens - sample.num_tokens - 1 for sample in samples]
            scheduler.record_inserted(samples, first([1] * len(samples), left))
        scheduler.reserve(chunk, preempt=True)
        assert page_counts(scheduler) == scheduler._pages._ref_counts
        steps = {
            slot: min(chunk, sample.max_tokens - sample.num_tokens)
            for slot, sample in scheduler.active.items()
        }
        for slot, sample in scheduler.active.items():
            end = sample.num_tokens + steps[slot] - 1
            assert len(sample.pages) * 4 >= end
            here = {page * shards // num_pages for page in sample.pages}
            assert here == {slot * shards // num_slots}
            # Nobody writes to what others read.
            for page in sample.pages[(sample.num_tokens - 1) // 4 : -(-end // 4)]:
                assert not scheduler._pages.is_shared(page)
        left = [0] * num_slots
        for slot, sample in scheduler.active.items():
            left[slot] = sample.max_tokens - sample.num_tokens - steps[slot]
        columns = {slot: [2] * count for slot, count in steps.items()}
        scheduler.record_generated(outputs(columns, chunk, num_slots, left))
        for p in scheduler.progress():
            for number, i, length, budget in [w for w in waits if w[:2] == (p.request, p.sample)]:
                if p.finish_reason:
                    more = (*range(length), 1, *[2] * (budget - 1))[: 30 - i]
                    more = (*more[: budget + i], *[3] * (len(more) - budget - i))  # or differs
                    asked = request(2, prompt=more)
                    scheduler.add(dataclasses.replace(asked, continues=(number, i)))
                    waits.remove((number, i, length, budget))
    assert not scheduler.waiting and not scheduler.active and not waits
    for key in list(scheduler._retained):
        scheduler.free_retained(*key)
    assert scheduler._pages.num_used == 0


def test_sampling_params_know_whether_they_filter():
    assert not SamplingParams(1, temperature=0.3).is_filtered
    for params in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert SamplingParams(1, **params).is_filtered


def test_an_insert_of_two_samples_in_room_for_three():
    entering = [
        (1, 6, np.array([1, 2], np.uint32), SamplingParams(7, 0.5, top_k=3, stop_tokens=(9, 4))),
        (1, 0, np.array([3, 4], np.uint32), SamplingParams(5, top_p=0.9, min_p=0.1)),
    ]
    found = host_inputs.insert_args(entering, size=3, num_slots=8)
    # The third goes past the last slot: nowhere.
    assert found.slots.tolist() == [6, 0, 8]
    assert found.prompt_indices.tolist() == [1, 1, 0]
    assert found.max_new_tokens.tolist() == [7, 5, 1]
    assert found.stop_tokens.shape == (3, NUM_STOP_TOKENS)
    assert found.stop_tokens[0, :3].tolist() == [9, 4, -1]
    assert (found.stop_tokens[1:] == -1).all()
    assert found.sampler.keys.tolist() == [[1, 2], [3, 4], [0, 0]]
    assert found.sampler.temperature.tolist() == [0.5, 1.0, 1.0]
    assert found.sampler.top_k.tolist() == [3, 0, 0]
    np.testing.assert_allclose(found.sampler.top_p, [1.0, 0.9, 1.0])
    np.testing.assert_allclose(found.sampler.min_p, [0.0, 0.1, 0.0])


def test_empty_insert_fills_no_slot():
    found = host_inputs.insert_args([], 2, 4)
    assert found.slots.tolist() == [4, 4]
