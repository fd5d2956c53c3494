"""Prefix caching in the engine: fewer tokens computed, the same samples."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from engine_work import LIMIT, NETWORKS, ONE, assert_same, made, rollout_params

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import aot_programs, host_inputs
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

PAGE = 8


@pytest.fixture
def small_pages(monkeypatch):
    monkeypatch.setattr("jaxrl_llm.config.kv_cache_sizing._PAGE_TOKENS", {"cpu": PAGE})
    monkeypatch.setattr(host_inputs, "MIN_WIDTH", LIMIT)
    monkeypatch.setattr(host_inputs, "_CONTINUATION_SHAPES", ((8, PAGE), (8, 32)))
    monkeypatch.setattr(host_inputs, "_FEW_PROMPTS_SHAPES", ((2, 32),))


def engine_with(num_slots=8, mesh=ONE, shape=tiny.SHAPE, max_tokens=LIMIT, draft_tokens=0, **args):
    return Engine(
        Network(shape),
        mesh,
        num_slots=num_slots,
        max_tokens=max_tokens,
        chunk_steps=4,
        speculation=SpeculationConfig(draft_tokens=draft_tokens, ngram_tokens=1),
        **args,
    )


def keys_of(*seeds):
    return np.asarray([jax.random.key_data(jax.random.key(seed)) for seed in seeds])


def chats(engine, params, *, num_chats, turns, new_tokens, sampled, clients, system=()):
    """Clients take chats one after another, a turn of each at a time.

    Returns the completions of each chat, and the number of tokens that were new in their prompts.
    """
    engine.reset()
    random = np.random.default_rng(0)
    texts = random.integers(4, 96, (num_chats, turns, new_tokens)).tolist()
    dialogues = [tuple(system)] * num_chats
    replies, running, num_new = [[] for _ in range(num_chats)], {}, 0
    waiting = list(range(num_chats))

    def submit(chat):
        turn = len(replies[chat])
        dialogues[chat] = (*dialogues[chat], *texts[chat][turn])
        key, asked = keys_of(100 * chat + turn), (SamplingParams(sampled),)
        number = engine.submit(Request(dialogues[chat], key, asked))
        running[number] = chat, engine.completions(number)[0]
        return new_tokens if turn or chat else new_tokens + len(system)

    while waiting or running:
        while waiting and len(running) < clients:
            num_new += submit(waiting.pop(0))
        for progress in engine.step(params):
            if progress.finish_reason:
                chat, completion = running.pop(progress.request)
                dialogues[chat] = (*dialogues[chat], *completion.tokens)
                replies[chat].append(completion)
                if len(replies[chat]) < turns:
                    num_new += submit(chat)
    return replies, num_new


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS if n != "plain")]
)
def test_turns_of_chats_compute_what_is_new_and_change_no_sample(name, small_pages):
    params, sizes = made(name), {"num_chats": 5, "turns": 3, "new_tokens": 8, "sampled": 5}
    sizes |= {"clients": 3, "system": tuple(range(4, 15))}
    whole = engine_with(shape=NETWORKS[name])
    wanted, _ = chats(whole, params, **sizes)
    engine = engine_with(shape=NETWORKS[name], prefix_caching=True)
    replies, num_new = chats(engine, params, **sizes)
    assert_same(replies, wanted)
    done = engine.statistics
    # Of each turn the last sampled token too; of the beginning what is not a full page.
    assert done.prefill_tokens <= num_new + 5 * 2 + 5 * 3 < whole.statistics.prefill_tokens / 2
    assert done.prefix_cache_queries == whole.statistics.prefill_tokens
    assert done.prefill_tokens + done.prefix_cache_hits == done.prefix_cache_queries
    assert done.prefix_cache_hit_rate > 0.5 and whole.statistics.prefix_cache_queries == 0
    assert engine._pages.num_used == 0
    # Pages for little more than one sequence: many are evicted before they are found again.
    few = engine_with(shape=NETWORKS[name], prefix_caching=True, cache_tokens=LIMIT + 2 * PAGE)
    assert_same(chats(few, params, **sizes)[0], wanted)
    assert 0 < few.statistics.prefix_cache_hits < done.prefix_cache_hits


@pytest.mark.slow
def test_64_chats_of_ten_turns_from_ten_clients():
    sizes = {"num_chats": 64, "turns": 10, "new_tokens": 12, "sampled": 5, "clients": 10}
    engine = engine_with(10, max_tokens=192, prefix_caching=True)
    replies, num_new = chats(engine, rollout_params(), **sizes)
    assert num_new == 64 * 10 * 12
    done = engine.statistics
    print(f"computed per new token: {done.prefill_tokens / num_new:.3f}")
    assert done.prefill_tokens <= 1.1 * num_new and done.recomputed_tokens == 0
    # What is kept is bounded by the pages, however many chats there were.
    cache = engine._pages._cache
    assert len(cache._hashes) + len(cache._tail_keys) <= engine.programs.pages.num_pages
    assert not engine._scheduler.requests and not engine._scheduler._evicted_tokens
    whole = engine_with(10, max_tokens=192)
    assert_same(replies, chats(whole, rollout_params(), **sizes)[0])
    assert whole.statistics.prefill_tokens > 6 * done.prefill_tokens


def groups_with_system_prompt(count=6, group=2, system=40):
    """Prompts as of a step of training: a long system prompt, groups of samples."""
    random = np.random.default_rng(1)
    common = tuple(random.integers(4, 96, system).tolist())
    return [
        Request(
            (*common, *random.integers(4, 96, 3 + i).tolist()),
            keys_of(*range(10 * i, 10 * i + group)),
            (SamplingParams(6), SamplingParams(9, temperature=0.7))[:group],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "sizes", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("draft_tokens", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_system_prompt_is_computed_once(sizes, draft_tokens, small_pages):
    mesh = tiny.make_mesh(**sizes)
    params, asked = rollout_params(mesh), groups_with_system_prompt()
    whole, engine = (
        engine_with(4, mesh, draft_tokens=draft_tokens, prefix_caching=caching)
        for caching in (False, True)
    )
    wanted = whole.generate(params, asked)
    assert_same(engine.generate(params, asked), wanted)
    assert whole.statistics.prefill_tokens == sum(len(r.tokens) for r in asked)
    shards = engine.programs.pages.num_shards
    own = sum(len(r.tokens) - 40 for r in asked)
    # Both samples of a prompt compute what follows its full pages.
    assert engine.statistics.prefill_tokens <= 40 * shards + 2 * own
    assert engine.statistics.prefix_cache_hit_rate > 0.5


def test_each_session_begins_without_a_cache(small_pages):
    """A resumed run repeats itself bit for bit: what was sampled before leaves no trace."""
    engine, params = engine_with(4, prefix_caching=True), rollout_params()
    asked = groups_with_system_prompt()
    wanted = engine.generate(params, asked)
    engine.generate(params, asked[::-1])
    again = engine.generate(params, asked)
    for ours, theirs in zip(again, wanted, strict=True):
        assert [(c.tokens, c.log_probs) for c in ours] == [(c.tokens, c.log_probs) for c in theirs]
    hits = engine.statistics.prefix_cache_hits
    fresh = engine_with(4, prefix_caching=True)
    fresh.generate(params, asked)
    assert fresh.statistics.prefix_cache_hits == hits > 0


def test_new_weights_read_no_old_pages(small_pages):
    engine, old = engine_with(4, prefix_caching=True), rollout_params()
    new = tiny.rollout_params(tiny.params(seed=1), ONE)
    asked = groups_with_system_prompt(3)
    longest = dataclasses.replace(asked[2], params=(SamplingParams(15),) * 2)
    engine.reset()

    def run(request, *weights):
        number = engine.submit(request)
        completions = engine.completions(number)
        for params in weights:
            engine.step(params)
        while any(not c.finish_reason for c in completions):
            engine.step(weights[-1])
        return completions

    run(asked[0], old)
    hits = engine.statistics.prefix_cache_hits
    run(asked[1], old)
    assert engine.statistics.prefix_cache_hits == hits + 40
    # Weights change while it runs: its pages are half of the old ones, and no other reads them.
    half = run(longest, old, new)
    hits = engine.statistics.prefix_cache_hits
    more = Request((*longest.tokens, *half[0].tokens), keys_of(7), (SamplingParams(4),))
    found = [run(asked[0], new), run(more, new)]
    assert engine.statistics.prefix_cache_hits == hits + 40  # those of asked[0] alone
    assert_same(found, engine_with(4).generate(new, [asked[0], more]))


def test_a_preempted_sample_reads_what_others_still_hold(small_pages):
    prompts = [(*range(4, 28), 30 + i) for i in range(3)]
    asked = [Request(p, keys_of(i), (SamplingParams(39),)) for i, p in enumerate(prompts)]
    params = rollout_params()
    engine, whole = (
        engine_with(3, prefix_caching=caching, cache_tokens=2 * LIMIT) for caching in (True, False)
    )
    assert_same(engine.generate(params, asked), whole.generate(params, asked))
    assert engine.statistics.num_preemptions > 0 and whole.statistics.num_preemptions > 0
    assert 0 < engine.statistics.recomputed_tokens < whole.statistics.recomputed_tokens


def test_what_an_aborted_sample_computed_is_not_computed_again(small_pages):
    engine, params = engine_with(4, prefix_caching=True), rollout_params()
    (whole,) = engine.generate(params, [Request((4,) * 20, keys_of(3), (SamplingParams(12),))])
    engine.reset()
    number = engine.submit(Request((4,) * 20, keys_of(3), (SamplingParams(12),)))
    engine.step(params)
    (begun,) = engine.abort(number)
    assert begun.tokens == whole[0].tokens[:5]
    before = engine.statistics.prefill_tokens
    rest = Request((*(4,) * 20, *begun.tokens), keys_of(3), (SamplingParams(7),))
    (completion,) = engine.completions(engine.submit(rest))
    while not completion.finish_reason:
        engine.step(params)
    assert begun.tokens + completion.tokens == whole[0].tokens
    assert engine.statistics.prefill_tokens == before + 1


def test_kept_routes_exclude_the_cache():
    shape = NETWORKS["experts and windows"]
    assert engine_with(shape=shape, prefix_caching=True).prefix_caching
    assert not engine_with(shape=shape, prefix_caching=True, keeps_routes=True).prefix_caching


@pytest.mark.slow
def test_nothing_compiles_after_the_warm_up():
    engine = engine_with(4, max_tokens=2 * LIMIT, prefix_caching=True)
    params = rollout_params()
    for program in aot_programs.warmup_programs(
        engine.programs, num_prompts=2, prompt_tokens=100, continues=True
    ):
        engine.compile(params, program)
    count = engine.num_compilations()
    sizes = {"num_chats": 4, "turns": 3, "new_tokens": 20, "sampled": 6, "clients": 2}
    chats(engine, params, **sizes)
    assert engine.statistics.prefix_cache_hits > 0
    assert engine.num_compilations() == count
