"""Supports: the tokens that each token was drawn from, and log-probs over them in both engines."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from distributions import FILTERS, distribution
from engine_work import LIMIT, ONE, assert_same, engine_of, expected, request, rollout_params
from talk import Talk

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.learner import predict
from jaxrl_llm.learner.batches import Packer, shared_prompts
from jaxrl_llm.packing import packed_batch, token_fields
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine import token_sampling
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Completion, RequestError, SamplingParams
from jaxrl_llm.rollout.engine.token_sampling import SamplerState
from jaxrl_llm.rollout.episode_runner import EpisodeSequence
from jaxrl_llm.sampling import async_checkpoint
from jaxrl_llm.types import Prompt, PromptBatch, Weights

TOKENIZER = character_tokenizer()
NETWORK = tiny.with_sizes(vocab_size=len(TOKENIZER))
TEMPERATURE = 0.8
KINDS = ({"top_p": 0.7}, {"top_k": 6}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9}, {})


@functools.partial(jax.jit, static_argnames=("filtered", "num_support"))
def draw(logits, sampler, filtered, num_support):
    return token_sampling.sample_with_support(
        logits, jnp.arange(len(logits)), sampler, filtered=filtered, num_support=num_support
    )


def sampler_of(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, support_tokens=0):
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), rows))
    column = functools.partial(np.full, rows)
    return SamplerState(
        keys,
        column(np.float32(temperature)),
        column(top_k),
        column(np.float32(top_p)),
        column(np.float32(min_p)),
        column(support_tokens),
    )


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_supports_are_what_the_filters_keep(filters):
    rows, vocab_size, most = 300, 60, 12
    logits = np.random.default_rng(0).normal(0, 2, (rows, vocab_size)).astype(np.float32)
    tokens, log_probs, support = map(
        np.asarray, draw(logits, sampler_of(rows, **filters, support_tokens=most), True, most + 3)
    )
    assert support.shape == (rows, most + 3) and (support[:, most:] == -1).all()
    for row in range(rows):
        p = distribution(logits[row], **filters)
        kept = np.argsort(-p)[: min(most, (p > 0).sum())]
        assert support[row][support[row] >= 0].tolist() == kept.tolist()
        want = np.log(p[tokens[row]] / p[kept].sum())
        assert tokens[row] in kept and log_probs[row] == pytest.approx(want, abs=1e-5)
    # With room for all that the filters keep, the same tokens are drawn as without supports.
    plain = np.asarray(draw(logits, sampler_of(rows, **filters), True, 0)[0])
    sampler = sampler_of(rows, **filters, support_tokens=vocab_size)
    whole = [np.asarray(x) for x in draw(logits, sampler, True, vocab_size)]
    np.testing.assert_array_equal(whole[0], plain)
    if set(filters) <= {"temperature"}:
        np.testing.assert_array_equal(whole[1], draw(logits, sampler, False, 0)[1])
    # Rows without a support beside others with one: as if these were not there.
    mixed = dataclasses.replace(sampler, support_tokens=np.arange(rows) % 2 * most)
    tokens, log_probs, support = map(np.asarray, draw(logits, mixed, True, most))
    np.testing.assert_array_equal(tokens[::2], plain[::2])
    np.testing.assert_array_equal(log_probs[::2], draw(logits, sampler, True, 0)[1][::2])
    assert (support[::2] == -1).all() and (support[1::2, 0] >= 0).all()


@functools.cache
def engine():
    return Engine(
        NETWORK,
        ONE,
        num_slots=8,
        max_tokens=LIMIT,
        chunk_steps=5,
        decode=TOKENIZER.decode,
        speculation=SpeculationConfig(draft_tokens=2, ngram_tokens=1),
    )


@functools.cache
def weights():
    return tiny.params(NETWORK)


@functools.cache
def sampled(turns):
    """Rollouts of one sample of each kind of filter, of one turn or of several."""
    params = tuple(
        SamplingParams(
            20, TEMPERATURE, **kind, support_tokens=16, stop_tokens=tuple(range(40, 56)) * turns
        )
        for kind in KINDS
    )
    if turns:
        params = tuple(dataclasses.replace(p, stop_strings=("#",)) for p in params)
    rows = [
        TOKENIZER(text, add_special_tokens=False)["input_ids"]
        for text in ("ask " * 6, "and more" * 3)
    ]
    prompts = PromptBatch(
        tuple(Prompt(tuple(ids), "", "test", None, {}, i) for i, ids in enumerate(rows))
    )
    rollouts, _ = episodes.rollout(
        engine(),
        Weights(tiny.rollout_params(weights(), ONE, NETWORK), 0),
        TOKENIZER,
        prompts,
        params,
        jax.random.key(2),
        Talk([1] * len(rows) * len(KINDS)) if turns else None,
    )
    return rollouts


def trained(rollouts, max_tokens, shares):
    """Log-probs of the trainer, by sequence."""
    packer = Packer(max_tokens, 1, attention_parity=10_000 if shares else 0)
    packed = packer.pack_rollouts(rollouts, None, shared_prompts(rollouts))
    assert not shares or (packed.microbatches.prefix_lengths > 0).any()
    packed = token_fields.with_fields(packed, ONE, support=rollouts.support)
    forward = predict.ForwardSpec(NETWORK, jnp.asarray(rollouts.tokens))
    lengths, width = jnp.asarray(rollouts.lengths), rollouts.tokens.shape[1]

    @jax.jit
    def score(params, packed):
        def of_microbatch(microbatch):
            statistics = forward.run(params, microbatch).token_statistics(
                entropy="none", temperature=TEMPERATURE
            )
            return microbatch.to_sequences(statistics.log_probs, lengths, width)

        return packed_batch.map_to_sequences(packed, of_microbatch, *rollouts.tokens.shape)

    with jax.set_mesh(ONE):
        return np.asarray(score(weights(), packed))


@pytest.mark.parametrize(
    "turns", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one turn", "turns"]
)
def test_trainer_and_engine_agree(turns):
    rollouts = sampled(turns)
    mask, support = rollouts.response_mask, rollouts.support
    assert support.shape == (*rollouts.tokens.shape, 16)
    assert (support[~mask] == -1).all()
    assert (support[mask] == rollouts.tokens[mask][:, None]).any(-1).all()
    sizes = (support >= 0).sum(-1)[mask]
    assert sizes.min() <= 6 and sizes.max() == 16
    for max_tokens, shares in (256, False), (64, False), *([] if turns else [(256, True)]):
        log_probs = trained(rollouts, max_tokens, shares)
        np.testing.assert_allclose(log_probs[mask], rollouts.rollout_log_probs[mask], atol=1e-5)
        assert (log_probs[~mask] == 0).all()
    whole = dataclasses.replace(rollouts, support=np.full_like(support, -1))
    over_all = trained(whole, 256, False)
    assert np.abs(over_all - log_probs)[mask].max() > 0.1, "the filters kept nearly everything"


def test_neighbours_and_evaluations_keep_their_samples():
    random = np.random.default_rng(4)
    kinds = [SamplingParams(12, **kind, support_tokens=8) for kind in KINDS]
    asked = request(random, 9, kinds, 3)
    plain = dataclasses.replace(
        asked, params=tuple(dataclasses.replace(p, support_tokens=0) for p in kinds)
    )
    params = rollout_params()
    (alone,), (with_plain, plain_beside) = (
        engine_of().generate(params, some) for some in ([asked], [asked, plain])
    )
    assert_same([with_plain], [alone])
    assert_same([plain_beside], engine_of().generate(params, [plain]))
    assert all(not c.support for c in plain_beside)
    assert {np.concatenate(c.support).shape for c in alone} == {(12, 8)}
    assert expected()[0][0].support == []
    with pytest.raises(RequestError, match=r"support_tokens=97 .* must lie between 0 and 96"):
        engine_of().submit(request(random, 3, [SamplingParams(1, support_tokens=97)], 0))


def test_checkpoints_keep_supports():
    prompt = Prompt((5, 6), "", "test", None, {}, 0)
    params = SamplingParams(8, support_tokens=3)
    sequence = EpisodeSequence(0, prompt.tokens, params, np.zeros(2, np.uint32))
    support = [np.array([[7, 9, -1]], np.int32), np.array([[8, 2, 4], [1, 2, 3]], np.int32)]
    # The last support is of a token after a stop string.
    sequence.append_turn(Completion([7, 8], [-0.5, -1.0], [0, 0], support=support))
    sequence.append_reply([5])
    want = [[7, 9, -1], [8, 2, 4], [-1, -1, -1]]
    assert sequence.support.tolist() == want
    group = async_checkpoint.PromptGroup(prompt, 0, 1)
    text = async_checkpoint.to_text(0, group, [(sequence, False)])
    _, _, ((restored, _),) = async_checkpoint.from_text(text, [params])
    assert restored.support.tolist() == want and restored.tokens == [7, 8, 5]
    before = async_checkpoint.from_text(
        text.replace("max_support", "unknown"), [params]
    )  # of a version without supports
    assert before[2][0][0].support is None
