"""Routes: the experts that tokens visited, of every token that was read, and followed if given."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import LIMIT, ONE, request
from talk import Talk

from jaxrl_llm.config import RolloutConfig, SpeculationConfig
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.models.architecture import Experts, LayerType
from jaxrl_llm.models.moe.router import RouterInputs
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine import prefill
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, RequestError, SamplingParams
from jaxrl_llm.types import Prompt, PromptBatch, Weights

TOKENIZER = character_tokenizer()
SHAPE = dataclasses.replace(
    tiny.SHAPE,
    vocab_size=len(TOKENIZER),
    num_layers=3,
    layers=(LayerType(experts=True), LayerType(), LayerType(window=9, experts=True)),
    experts=Experts(num=6, per_token=2, size=12),
)
NETWORK = Network(SHAPE)
PROMPTS = ((5, 2), (30, 1), (17, 2))


@functools.cache
def weights():
    return tiny.params(NETWORK), tiny.rollout_params(tiny.params(NETWORK), ONE, NETWORK)


@functools.cache
def engine_with(draft_tokens=0):
    speculation = SpeculationConfig(draft_tokens=draft_tokens, ngram_tokens=1)
    return Engine(
        NETWORK,
        ONE,
        num_slots=4,
        max_tokens=LIMIT,
        chunk_steps=5,
        speculation=speculation,
        keeps_routes=True,
    )


@functools.partial(jax.jit, static_argnames="follows")
def one_pass(tokens, routes=None, follows=True):
    """Returns log-probs [B, T] and routes [B, T, routes] of rows of one sequence each."""
    positions, there = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), tokens >= 0
    routing = RouterInputs(there, routes, follows)
    ids = there.astype(jnp.int32)
    hidden, routed = NETWORK.forward(weights()[0], tokens, positions, ids, routing=routing)
    log_p = jax.nn.log_softmax(NETWORK.logits(weights()[0], hidden))[:, :-1]
    drawn = jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0]
    return (
        jnp.pad(drawn, ((0, 0), (1, 0))),
        NETWORK.flatten_routes(routed.chosen),
        routed.num_agreeing,
    )


def requests():
    random = np.random.default_rng(0)
    return [
        request(random, length, [SamplingParams(30)] * count, seed)
        for seed, (length, count) in enumerate(PROMPTS)
    ]


def rows_of(asked, found):
    samples = [(r.tokens, c) for r, some in zip(asked, found, strict=True) for c in some]
    rows = np.zeros((len(samples), LIMIT), np.int32)
    for row, (prompt, c) in zip(rows, samples, strict=True):
        row[: len(prompt) + len(c.tokens)] = [*prompt, *c.tokens]
    return samples, rows


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_every_token_that_was_read_has_the_routes_of_one_pass(draft_tokens):
    asked = requests()
    found = engine_with(draft_tokens).generate(weights()[1], asked)
    samples, rows = rows_of(asked, found)
    _, visited, _ = one_pass(rows)
    for (prompt, c), wanted in zip(samples, visited, strict=True):
        routes = np.concatenate(c.routes)
        assert routes.shape == (len(prompt) + len(c.tokens) - 1, NETWORK.num_routes)
        np.testing.assert_array_equal(np.sort(routes), np.sort(wanted[: len(routes)]))


def test_given_routes_are_followed():
    random = np.random.default_rng(3)
    (asked,) = requests()[2:]
    given = np.stack([random.permutation(6)[:4] for _ in asked.tokens]).astype(np.int16)
    given[5] = -1  # of the router's own choice
    asked = dataclasses.replace(asked, routes=given)
    found = engine_with().generate(weights()[1], [asked])
    samples, rows = rows_of([asked], found)
    routes = np.full((*rows.shape, 4), -1, np.int16)
    for row, (prompt, c) in zip(routes, samples, strict=True):
        visited = np.concatenate(c.routes)
        known = np.arange(len(prompt)) != 5
        np.testing.assert_array_equal(visited[: len(prompt)][known], given[known])
        assert (visited[5] >= 0).all()
        row[: len(visited)] = visited
    log_probs, again, equal = one_pass(rows, routes)
    for row, ours, (prompt, c) in zip(log_probs, again, samples, strict=True):
        np.testing.assert_allclose(row[len(prompt) :][: len(c.tokens)], c.log_probs, atol=5e-5)
        read = len(prompt) + len(c.tokens) - 1
        np.testing.assert_array_equal(ours[:read], np.concatenate(c.routes))
    # Without following, only tokens before which no route was forced are equal.
    own, theirs, compared = one_pass(rows, routes, follows=False)
    assert (compared < equal + 1).all() and np.abs(own - log_probs).max() > 1e-3
    assert (theirs != again).any()


def test_pieces_of_a_prompt_have_its_routes():
    random = np.random.default_rng(1)
    tokens = random.integers(4, 96, (2, 32)).astype(np.int32)
    given = np.full((2, 32, NETWORK.num_routes), -1, np.int16)
    given[1, 3:20] = np.sort(random.permutation(6)[:4])
    places = np.broadcast_to(np.arange(32, dtype=np.int32), (2, 32))
    prompts = prefill.Prompts(
        tokens, places, np.ones_like(tokens), np.array([0, 32]), np.array([32, 32]), given
    )
    read = jax.jit(functools.partial(prefill.prefill, NETWORK), static_argnames="piece_tokens")
    whole, pieces = read(weights()[1], prompts), read(weights()[1], prompts, piece_tokens=8)
    np.testing.assert_array_equal(np.sort(whole.routes), np.sort(pieces.routes))
    np.testing.assert_array_equal(whole.routes[35:52], given[1, 3:20])
    np.testing.assert_allclose(whole.logits, pieces.logits, atol=2e-4)


@pytest.mark.slow
def test_rollouts_have_the_routes_of_all_turns():
    often = SamplingParams(20, stop_tokens=tuple(range(40, 56)), stop_strings=("#",))
    rows = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in ("ask", "and more")]
    batch = PromptBatch(
        tuple(Prompt(tuple(ids), "", "test", None, {}, i) for i, ids in enumerate(rows))
    )
    engine = Engine(
        NETWORK, ONE, num_slots=4, max_tokens=LIMIT, decode=TOKENIZER.decode, keeps_routes=True
    )
    rollouts, _ = episodes.rollout(
        engine,
        Weights(weights()[1], 0),
        TOKENIZER,
        batch,
        (often,) * 3,
        jax.random.key(2),
        Talk([1] * 6),
    )
    assert rollouts.routed_experts.shape == (*rollouts.tokens.shape, NETWORK.num_routes)
    assert rollouts.routed_experts.dtype == np.int16
    several = ~rollouts.response_mask & (rollouts.tokens > 0)
    assert (several.sum(1) > [len(rows[i]) for i in rollouts.group_ids]).any()
    known = (rollouts.routed_experts >= 0).all(-1)
    columns = np.arange(rollouts.tokens.shape[1])
    np.testing.assert_array_equal(known, columns < rollouts.lengths[:, None] - 1)
    log_probs, again, _ = one_pass(rollouts.tokens, rollouts.routed_experts)
    np.testing.assert_array_equal(np.asarray(again)[known], rollouts.routed_experts[known])
    mask = rollouts.response_mask
    np.testing.assert_allclose(
        np.asarray(log_probs)[mask], rollouts.rollout_log_probs[mask], atol=5e-5
    )


def test_routes_that_do_not_fit_are_refused():
    key = np.zeros((1, 2), np.uint32)
    plain = Engine(NETWORK, ONE, num_slots=4, max_tokens=LIMIT)
    wanted = SamplingParams(4)
    with pytest.raises(RequestError, match="keeps none"):
        plain.submit(Request((5, 6), key, (wanted,), np.zeros((2, 4), np.int16)))
    with pytest.raises(RequestError, match=r"shape \(2, 3\).*give \(2, 4\)"):
        engine_with().submit(Request((5, 6), key, (wanted,), np.zeros((2, 3), np.int16)))
    assert episodes.sampling_params(RolloutConfig(), ()).max_tokens
    completion = plain.generate(weights()[1], requests()[:1])[0][0]
    assert completion.routes == [] and completion.tokens
