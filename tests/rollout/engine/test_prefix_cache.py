"""Pages found again by their tokens: hashes, eviction, and what the scheduler reads of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_work import first, outputs, request, text_of

from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.rollout.engine import host_inputs
from jaxrl_llm.rollout.engine.page_allocator import CacheLayout, PageAllocator
from jaxrl_llm.rollout.engine.prefix_cache import page_hashes
from jaxrl_llm.rollout.engine.scheduler import Scheduler


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(host_inputs, "_CONTINUATION_SHAPES", ((8, 4),))


def make(num_slots, num_pages=0, num_shards=1, chunk_tokens=4, prefix_caching=True):
    """A scheduler with pages of four tokens for sequences of up to 32."""
    layout = CacheLayout(num_pages or num_slots * 8, 4, 32, num_slots, num_shards)
    pages = PageAllocator(layout, prefix_caching=prefix_caching)
    return Scheduler(text_of, pages, chunk_tokens)


class PageContents:
    """What a device would have in its pages: at each position, all tokens that it depends on."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self.size = scheduler._pages.layout.page_tokens
        self.pages, self.weights = {}, 0

    def write(self, sample, begin, end):
        for at in range(begin, end):
            page = sample.pages[at // self.size]
            self.pages[page, at % self.size] = sample.token_range(0, at + 1), self.weights

    def check(self, sample, end, any_weights=False):
        for at in range(end):
            tokens, weights = self.pages[sample.pages[at // self.size], at % self.size]
            assert tokens == sample.token_range(0, at + 1)
            assert any_weights or weights == self.weights

    def enter(self, samples):
        """Writes prompts as `Engine.step` does: whole ones first, then rows of `extend`."""
        whole = [sample for sample in samples if sample.needs_full_prefill]
        for sample in whole:
            size = self.size
            for page, at in sample.page_writes:
                for offset in range(size):
                    if at + offset < len(sample.prompt):
                        content = sample.token_range(0, at + offset + 1), self.weights
                        self.pages[page, offset] = content
        others = [sample for sample in samples if not sample.needs_full_prefill]
        for sample in others:  # all read before any is written: they may share a program
            self.check(sample, sample.num_cached_tokens, sample.continued_sample is not None)
            assert sample.num_cached_tokens < sample.num_tokens
        for sample in others:
            self.write(sample, sample.num_cached_tokens, sample.num_tokens)
        for sample in whole:
            self.check(sample, sample.num_tokens)

    def decode(self, chunk, limit_of):
        """Samples up to `chunk` tokens of each active sample, each its position modulo 5."""
        active = dict(self._scheduler.active)
        columns, left = {}, [0] * self._scheduler._num_slots
        for slot, sample in active.items():
            count = min(chunk, limit_of(sample) - sample.num_tokens)
            begin = sample.num_tokens
            columns[slot] = [(begin + i) % 5 for i in range(count)]
            left[slot] = limit_of(sample) - begin - count
            # The last token sampled is written with the next ones.
            sample.completion.tokens += columns[slot]
            self.write(sample, begin - 1, begin + count - 1)
            del sample.completion.tokens[len(sample.completion.tokens) - count :]
        slots = self._scheduler._num_slots
        self._scheduler.record_generated(outputs(columns, chunk, slots, left))


def enter_all(scheduler, contents):
    """Rounds of `schedule` as a step of the engine makes them; returns the samples that entered."""
    entered = []
    while samples := scheduler.schedule():
        contents.enter(samples)
        left = [sample.max_tokens - sample.num_tokens - 1 for sample in samples]
        tokens = [sample.num_tokens % 5 for sample in samples]
        scheduler.record_inserted(samples, first(tokens, left))
        entered += samples
    return entered


def run(scheduler, contents, chunk=4):
    """Runs all samples to their end; returns those that entered, in order."""
    entered = []
    while scheduler.waiting or scheduler.active:
        scheduler.reserve(chunk, preempt=True)
        entered += enter_all(scheduler, contents)
        scheduler.reserve(chunk, preempt=True)
        contents.decode(chunk, lambda sample: sample.max_tokens)
        scheduler.progress()
    return entered


def test_a_hash_stands_for_all_tokens_before_the_end_of_its_page():
    hashes = page_hashes(range(10), 4, b"")
    assert len(hashes) == 2 and len(set(hashes)) == 2 and {len(h) for h in hashes} == {16}
    assert page_hashes([*range(8), 99], 4, b"") == hashes
    assert page_hashes([0, 1, 2, 4, *range(4, 8)], 4, b"")[1] != hashes[1]
    assert not set(page_hashes(range(10), 4, b"adapter")) & set(hashes)
    assert page_hashes(range(4, 8), 4, hashes[0], start=4) == hashes[1:]
    assert page_hashes(range(3), 4, b"") == []


def test_a_hash_depends_on_the_images_of_its_page_and_before():
    def images(vectors, shift=0):
        index = np.full((1, 12), -1)
        index[0, 5:7] = 0, 1
        positions = np.repeat(np.arange(12)[None, :, None], 3, -1)
        positions[0, 5:7, 2] += shift
        return ImageInputs(positions, index, np.asarray(vectors, np.float32))

    plain = page_hashes(range(12), 4, b"")
    one, same, other, moved = (
        page_hashes(range(12), 4, b"", each)
        for each in (
            images([[1, 2], [3, 4]]),
            images([[1, 2], [3, 4], [5, 6]]),  # of another image, not in these tokens
            images([[1, 2], [3, 5]]),
            images([[1, 2], [3, 4]], shift=1),
        )
    )
    assert one == same
    for hashes in (other, moved, plain):
        assert hashes[0] == one[0], "no image in the first page"
        assert hashes[1] != one[1] and hashes[2] != one[2]
    pages = page_hashes(range(4, 12), 4, one[0], images([[1, 2], [3, 4]]), start=4)
    assert pages == one[1:]


def test_the_next_turn_computes_its_new_tokens_alone():
    scheduler = make(2)
    contents = PageContents(scheduler)
    scheduler.add(request(5, prompt=range(10, 20)))
    (one,) = run(scheduler, contents)
    assert one.needs_full_prefill or one.completion.tokens
    dialogue = (*one.prompt, *one.completion.tokens)
    assert len(dialogue) == 15 and scheduler._pages.num_used == 0
    # All but the last token, which was not decoded: three full pages and two tokens more.
    scheduler.add(request(2, prompt=(*dialogue, 30, 31, 32)))
    (two,) = run(scheduler, contents)
    assert two.num_cached_tokens == 14
    assert (scheduler.prefix_cache_hits, scheduler.prefix_cache_queries) == (14, 10 + 18)
    # A page that was continued is not found in its old form, full pages are.
    scheduler.add(request(2, prompt=(*dialogue, 40)))
    (three,) = run(scheduler, contents)
    assert three.num_cached_tokens == 12
    # Other first tokens: nothing.
    scheduler.add(request(2, prompt=(9, *dialogue)))
    (four,) = run(scheduler, contents)
    assert four.num_cached_tokens == 0


def test_at_least_one_token_is_computed():
    scheduler = make(2)
    contents = PageContents(scheduler)
    for _ in range(2):
        scheduler.add(request(1, prompt=range(8)))
        samples = run(scheduler, contents)
    assert samples[0].num_cached_tokens == 4
    scheduler.add(request(1, prompt=range(6)))
    (shorter,) = run(scheduler, contents)
    assert shorter.num_cached_tokens == 4


def test_the_least_recently_used_pages_are_evicted_first():
    pages = PageAllocator(CacheLayout(8, 4, 32, 1), prefix_caching=True)

    def store(name):
        """Allocates three pages of a sequence and frees them again, two full and a tail."""
        held = pages.allocate(0, 3)
        hashes = [f"{name}{i}".encode() for i in range(2)]
        assert all(map(pages.register, held, hashes))
        assert not pages.register(held[2], hashes[0]), "another page has this hash"
        pages.register_tail(held[2], hashes[1], (7, 8))
        pages.free(held)
        return hashes, held

    one, two = store("a"), store("b")
    assert (pages.num_used, pages.num_free(0)) == (0, 8)
    assert pages.cached_prefix(0, one[0]) == one[1][:2] and pages.cached_prefix(0, one[0][1:])
    assert pages.cached_tail(0, one[0][1], (7, 8, 9)) == (one[1][2], 2)
    assert pages.cached_tail(0, one[0][1], (7,)) == (None, 0)
    # Used again, the first is younger than the second. The tail is not: it belongs to nobody.
    pages.add_reference(one[1][:2])
    pages.free(one[1][:2])
    (first_free, *_) = pages.allocate(0, 2)
    assert first_free not in (*one[1], *two[1])  # free pages go first
    assert pages.allocate(0, 1) == [one[1][2]]
    assert pages.cached_tail(0, one[0][1], (7, 8, 9)) == (None, 0)
    assert pages.allocate(0, 3) == two[1][::-1]  # of a sequence the end goes first
    assert pages.cached_prefix(0, two[0]) == []
    assert pages.allocate(0, 1) == [one[1][1]]
    assert pages.cached_prefix(0, one[0]) == [one[1][0]]
    # Pages in use stay, however old.
    pages.add_reference([one[1][0]])
    assert pages.num_free(0) == 0 and pages.num_used == 8
    pages.clear_cache()
    assert pages.cached_prefix(0, one[0]) == []
    pages.free([one[1][0]])
    assert pages.num_free(0) == 1


def test_samples_that_begin_alike_wait_for_the_first():
    scheduler = make(6)
    contents = PageContents(scheduler)
    for last in (50, 60, 70):
        scheduler.add(request(4, 4, prompt=(*range(10, 18), last)))
    assert scheduler.requests_to_prefill([]) == [0]
    entered = scheduler.schedule()
    assert [(s.request, s.index) for s in entered] == [
        *[(0, 0), (0, 1)],  # whole, with one prefill
        *[(1, 0), (1, 1), (2, 0), (2, 1)],  # after those, in the same round
    ]
    assert [s.num_cached_tokens for s in entered] == [0, 0, 8, 8, 8, 8]
    assert all(s.pages[:2] == entered[0].pages[:2] for s in entered)
    assert len({s.pages[2] for s in entered}) == 6
    contents.enter(entered)
    scheduler.record_inserted(entered, first([1] * 6, [0] * 6))
    # What extend computes may be read in the next round only.
    scheduler.add(request(4, prompt=(*range(10, 18), 80, 81, 82, 83, 84)))
    scheduler.add(request(4, prompt=(*range(10, 18), 80, 81, 82, 83, 85)))
    (one,) = entered = scheduler.schedule()
    contents.enter(entered)
    (two,) = scheduler.schedule()
    contents.enter([two])
    assert (one.num_cached_tokens, two.num_cached_tokens) == (8, 12)


@pytest.mark.parametrize(
    ("common", "length", "group", "cached"),
    [
        # 6 of 22 tokens, and at least 4 of each further sample: 6, 14, 18; 16.5 is three quarters.
        *[(16, 22, 1, 16), (16, 22, 3, 16), (16, 22, 4, 0)],
        # 20 of 28, and 24: three quarters are 21. 12 of 16 are that.
        *[(8, 28, 1, 8), (4, 28, 1, 0), (4, 16, 1, 4)],
    ],
)
def test_the_cache_is_read_only_where_that_saves_work(common, length, group, cached):
    scheduler = make(4)
    contents = PageContents(scheduler)
    scheduler.add(request(1, prompt=range(common + 1)))
    run(scheduler, contents)
    prompt = [*range(common), *[99] * (length - common)]
    scheduler.add(request(*[1] * group, prompt=prompt))
    leader, *others = run(scheduler, contents)
    assert leader.num_cached_tokens == cached
    last_page = length - (length - 1) // 4 * 4
    expected = length - last_page if cached else 0
    assert all(sample.num_cached_tokens == expected for sample in others)


def test_prompts_with_other_images_share_what_is_before_them():
    scheduler = make(1)
    contents = PageContents(scheduler)

    def cached_tokens(prompt, value):
        index = np.full((1, len(prompt)), -1)
        index[0, 5] = 0  # in the second page
        positions = np.repeat(np.arange(len(prompt))[None, :, None], 3, -1)
        images = ImageInputs(positions, index, np.full((1, 2), value, np.float32))
        scheduler.add(dataclasses.replace(request(4, prompt=prompt), image_inputs=images))
        (sample,) = run(scheduler, contents)
        return sample.num_cached_tokens, sample.tokens

    begin = cached_tokens(range(7), 1.0)[0]
    again, dialogue = cached_tokens(range(7), 1.0)
    # The second page of a prompt has an image and is not full: it is not continued.
    assert (begin, again) == (0, 4)
    assert cached_tokens(range(7), 2.0)[0] == 4
    assert cached_tokens((*dialogue, 9), 1.0)[0] == len(dialogue) - 1 == 10
    assert cached_tokens((*dialogue, 9), 3.0)[0] == 4


def test_without_prefix_caching_nothing_outlives_its_request():
    scheduler = make(2, prefix_caching=False)
    contents = PageContents(scheduler)
    for _ in range(2):
        scheduler.add(request(3, 3, prompt=range(9)))
        samples = run(scheduler, contents)
        assert [s.num_cached_tokens for s in samples] == [0, 0]
    assert scheduler._pages._cache.num_unused(0) == 0
    assert scheduler.prefix_cache_queries == 0


ACTIONS = st.one_of(
    st.tuples(st.just("request"), st.integers(0, 3), st.integers(1, 14), st.integers(1, 3)),
    st.tuples(st.just("again"), st.integers(0, 9), st.integers(1, 6), st.integers(1, 2)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("weights")),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    actions=st.lists(ACTIONS, max_size=40),
    sizes=st.sampled_from([(1, 1), (4, 1), (6, 1), (4, 2), (6, 3)]),
    spare=st.integers(0, 9),
    prefix_caching=st.booleans(),
)
def test_samples_read_only_what_was_written_for_their_tokens(actions, sizes, spare, prefix_caching):
    num_slots, shards = sizes
    scheduler = make(num_slots, shards * (8 + spare), shards, 6, prefix_caching)
    contents = PageContents(scheduler)
    ended, numbers, weights_of = [], [], {}

    def step(chunk):
        scheduler.reserve(chunk, preempt=True)
        for sample in enter_all(scheduler, contents):
            weights_of[sample] = contents.weights
        scheduler.reserve(chunk, preempt=True)
        for sample in scheduler.active.values():
            contents.check(sample, sample.num_tokens - 1, weights_of[sample] != contents.weights)
        contents.decode(chunk, lambda sample: sample.max_tokens)
        for sample in (s for group in list(scheduler.requests.values()) for s in group):
            if sample.completion.finish_reason and sample.tokens not in ended:
                ended.append(sample.tokens)
        scheduler.progress()
        held = [0] * scheduler._pages.layout.num_pages
        for holder in (*scheduler.active.values(), *scheduler._retained.values()):
            for page in holder.pages:
                held[page] += 1
        assert held == scheduler._pages._ref_counts
        cache, free = scheduler._pages._cache, scheduler._pages._free
        unused = [page for shard in range(shards) for page in (*free[shard], *cache._unused[shard])]
        assert sorted(unused) == [page for page, count in enumerate(held) if not count]

    for kind, *values in actions:
        if kind == "request":
            start, length, count = values
            prompt = [start, *range(length - 1)]
            numbers.append(scheduler.add(request(*range(2, 2 + count * 3, 3), prompt=prompt)))
        elif kind == "again" and ended:
            which, length, count = values
            prompt = (*ended[which % len(ended)], *[20 + which] * length)[:28]
            numbers.append(scheduler.add(request(*[4] * count, prompt=prompt)))
        elif kind == "abort" and numbers:
            scheduler.abort(numbers[values[0] % len(numbers)])
        elif kind == "weights":
            scheduler.drop_cache()
            contents.weights += 1
        elif kind == "step":
            step(*values)
    for _ in range(500):
        if not (scheduler.waiting or scheduler.active):
            break
        step(6)
    assert not (scheduler.waiting or scheduler.active) and scheduler._pages.num_used == 0
    cache = scheduler._pages._cache
    assert len(cache._hashes) + len(cache._tail_keys) == sum(map(len, cache._unused))
