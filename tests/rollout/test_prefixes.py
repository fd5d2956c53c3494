"""Prompts in rows: where each one lies, how much is padding, and that sharing changes nothing."""

import functools
from unittest import mock

import jax
import numpy as np
import tiny
from engine_work import LIMIT, rollout_params
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.packing.packed_batch import bucket
from jaxrl_llm.rollout.engine import host_inputs, prefill
from jaxrl_llm.rollout.engine.page_allocator import CacheLayout, PageAllocator
from jaxrl_llm.rollout.engine.prefill_batcher import PrefillBatcher
from jaxrl_llm.rollout.engine.requests import EngineStatistics, Request, SamplingParams
from jaxrl_llm.rollout.engine.scheduler import Scheduler

MOST = 600


def prompts_of(lengths):
    return [tuple(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 599), min_size=1, max_size=40))
def test_every_prompt_lies_in_a_row_of_few_sizes(lengths):
    prompts = prompts_of(lengths)
    count = host_inputs.num_prompts_in_batch(lengths, MOST)
    batch = host_inputs.prompt_rows(prompts[:count], MOST)
    rows, width = batch.tokens.shape
    assert batch.tokens.size <= max(4096, width)
    assert width < 2 * max(32, *lengths[:count]) and rows in (bucket(rows), 4096 // width)
    free = np.ones(rows * width, bool)
    for prompt, start, length in zip(prompts[:count], batch.starts, batch.lengths, strict=False):
        inside = slice(start, start + length)
        assert start // width == (start + length - 1) // width, "a prompt in two rows"
        assert free[inside].all()
        free[inside] = False
        assert tuple(batch.tokens.flat[inside]) == prompt
        np.testing.assert_array_equal(batch.positions.flat[inside], np.arange(length))
        assert len(set(batch.segment_ids.flat[inside])) == 1
    np.testing.assert_array_equal(batch.segment_ids.reshape(-1) == 0, free)
    segments = {(row, s) for row, ids in enumerate(batch.segment_ids) for s in set(ids) - {0}}
    assert len(segments) == count
    assert (batch.starts[count:] == 0).all() and (batch.lengths[count:] == 1).all()
    # What is warmed up for so many prompts is all that they can need.
    shapes = set(host_inputs.all_prefill_shapes(count, max(lengths), MOST))
    assert batch.tokens.shape in shapes
    assert len(shapes) <= 20


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 599), min_size=1, max_size=40), st.integers(1, 599))
def test_a_run_reads_its_prompts_in_few_shapes(lengths, longest):
    with mock.patch.object(prefill, "PREFILL_CHUNK_TOKENS", 128):
        shapes = host_inputs.prefill_shapes(8, longest, MOST)
        assert len(shapes) == 1 + (longest > 128)
        count = host_inputs.num_prompts_in_batch(lengths, MOST, shapes)
        rows, width = host_inputs.prompt_rows(
            prompts_of(lengths[:count]), MOST, shapes
        ).tokens.shape
    if max(lengths[:count]) <= shapes[-1][1]:
        assert (rows, width) in shapes
    assert width >= max(lengths[:count])
    # Who needs other rows than those before waits for the next batch.
    if len({min((w for _, w in shapes if w >= n), default=n) for n in lengths}) == 1:
        assert count == len(lengths) or count >= min(rows, 8)


def gsm8k_like(random, count):
    """Lengths of prompts as GSM8K's with a chat template: median about 95 tokens, few over 200."""
    return np.clip(np.exp(random.normal(4.55, 0.35, count)), 40, 250).astype(int).tolist()


def read_all(lengths):
    """Returns the positions computed for these prompts and the shapes of the batches."""
    shapes = []

    def read(params, prompts, adapters):
        shapes.append(prompts.tokens.shape)
        return "what was read"

    pages = PageAllocator(CacheLayout(len(lengths) * 8, 32, 256, len(lengths)))
    scheduler = Scheduler("".join, pages, 1)
    for prompt in prompts_of(lengths):
        scheduler.add(Request(prompt, np.zeros((1, 2), np.uint32), (SamplingParams(1),)))
    done, params = EngineStatistics(), {"weight": np.zeros(1)}
    reader = PrefillBatcher(read, MOST, done)
    assert reader.reset_if_new_weights(params) and not reader.reset_if_new_weights(params)
    samples = scheduler.schedule()
    for _, indices in reader.prefill_batches(params, samples, scheduler):
        assert list(indices.values()) == list(range(len(indices)))
    assert done.prefill_tokens == sum(lengths)
    return done.prefill_positions, shapes


def one_a_row(lengths):
    """Returns the positions of as many prompts as fit 4096, each padded to the widest of them."""
    total = first = 0
    while first < len(lengths):
        count, width = 0, 32
        for n in lengths[first:]:
            wider = max(width, bucket(n, smallest=32))
            if count and (count + 1) * wider > 4096:
                break
            count, width = count + 1, wider
        total += min(bucket(count), 4096 // width) * width
        first += count
    return total


def test_padding_of_prompts_as_gsm8k_has_them():
    random = np.random.default_rng(0)
    real = shared = alone = 0
    shapes = set()
    for _ in range(20):
        lengths = gsm8k_like(random, 128)
        positions, seen = read_all(lengths)
        real, shared, alone = real + sum(lengths), shared + positions, alone + one_a_row(lengths)
        shapes |= set(seen)
    print(f"computed per prompt token: {shared / real:.2f}, one prompt a row {alone / real:.2f}")
    assert alone / real > 2.0
    assert shared / real < 1.25
    assert len(shapes) <= 6


def test_sharing_a_row_changes_nothing():
    random = np.random.default_rng(1)
    lengths = [40, 3, 1, 20, 33, 9, 64, 24]
    prompts = [tuple(random.integers(4, 96, n).tolist()) for n in lengths]
    read = jax.jit(functools.partial(prefill.prefill, tiny.NETWORK))
    together = read(rollout_params(), host_inputs.prompt_rows(prompts, LIMIT))
    assert together.keys[0].shape[1] == (4 + 1) * 64, "8 prompts in 4 rows, and one of nothing"
    for i, prompt in enumerate(prompts):
        filled = [prompt, *[(5,) * 64] * 7]  # the same program, nobody beside it
        alone = read(rollout_params(), host_inputs.prompt_rows(filled, LIMIT))
        np.testing.assert_allclose(together.logits[i], alone.logits[0], atol=2e-5)
        for ours, theirs in zip(
            (*together.keys, *together.values), (*alone.keys, *alone.values), strict=True
        ):
            at, other = together.starts[i], alone.starts[0]
            np.testing.assert_allclose(
                ours[:, at : at + lengths[i]], theirs[:, other : other + lengths[i]], atol=2e-5
            )
