"""Samples that follow grammars: their texts, their log-probs, and their neighbours in the batch."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import tiny
import tokenizers
from engine_work import LIMIT, assert_same, request, rollout_params, weights
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.config import SpeculationConfig
from jaxrl_llm.rollout import structured_outputs
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.grammars import GrammarError, fill_masks
from jaxrl_llm.rollout.engine.requests import RequestError, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 50},
        "b": {"type": "string", "maxLength": 6},
        "c": {"enum": ["x", "yz"]},
    },
    "required": ["a", "c"],
    "additionalProperties": False,
}


@functools.cache
def character_tokenizer():
    """A tokenizer of ASCII characters, with fewer tokens than the network has rows."""
    characters = [chr(code) for code in range(32, 127) if chr(code) not in "ABCDEFGHIJKLMNOP"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "</s>", *characters])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<pad>", "<eos>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


STOPS = (1, 2)  # either ends a sample


@functools.cache
def compiler():
    return structured_outputs.GrammarCompiler(character_tokenizer(), tiny.SHAPE.vocab_size)


@functools.cache
def grammar(kind="json"):
    part = {
        "json": lambda: structured_outputs.json_part(SCHEMA, r" ?"),
        "regex": lambda: structured_outputs.regex_part(r"[a-f]{3,30}/(x|y+)\.\d"),
        "choice": lambda: structured_outputs.choice_part(["yes", 'no "quotes"', "yes indeed"]),
        "lark": lambda: structured_outputs.lark_part('start: "(" start ")" | /[a-c]/'),
        "gbnf": lambda: structured_outputs.lark_part('root ::= "<" [0-9]+ ">"'),
    }[kind]()
    return compiler().compile(structured_outputs.source_of(part, "test"))


def constrained(kind, params, seed, **fields):
    plain = request(np.random.default_rng(seed), 5 + seed, params, seed)
    return dataclasses.replace(plain, grammar=grammar(kind), **fields)


def engine_of(**settings):
    settings = {"num_slots": 8, "max_tokens": LIMIT, "chunk_steps": 4} | settings
    return Engine(tiny.NETWORK, settings.pop("mesh", tiny.make_mesh()), **settings)


@functools.cache
def requests():
    one = SamplingParams(50, stop_tokens=STOPS)
    return [
        constrained("json", [one, one, dataclasses.replace(one, temperature=0.0)], 0),
        request(np.random.default_rng(9), 7, [SamplingParams(25)] * 2, 9),
        constrained("regex", [dataclasses.replace(one, top_k=4, num_top_log_probs=2)], 1),
        constrained("choice", [one, one], 2),
        constrained("lark", [dataclasses.replace(one, max_tokens=12)], 3),
        constrained("gbnf", [dataclasses.replace(one, temperature=0.7)], 4),
    ]


@functools.cache
def expected():
    return engine_of().generate(rollout_params(), requests())


def text_of(completion):
    return character_tokenizer().decode(completion.tokens, skip_special_tokens=True)


def masked_log_probs(request, completion):
    """[tokens, V] log-probs by one pass over the sequence, each over what the grammar allows."""
    tokens = jnp.array([[*request.tokens, *completion.tokens]])
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = tiny.hidden_states(tiny.NETWORK)(weights(), tokens, positions, jnp.ones_like(tokens))
    logits = np.asarray(tiny.NETWORK.logits(weights(), hidden))[0]
    logits = logits[len(request.tokens) - 1 : -1]
    temperature = request.params[0].temperature or 1.0
    matcher = request.grammar.matcher()
    rows = []
    for row, token in zip(logits, completion.tokens, strict=True):
        mask = np.zeros((1, 3), np.uint32)
        assert fill_masks(mask, {0: matcher}, {0: STOPS}) == {}
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        assert allowed[token]
        rows.append(jax.nn.log_softmax(np.where(allowed, row / temperature, -np.inf)))
        if token not in STOPS:
            matcher.advance([token])
    return np.array(rows)


def test_texts_follow_grammars_and_log_probs_are_those_of_the_sampled_distribution():
    texts = [[text_of(completion) for completion in each] for each in expected()]
    for text in texts[0]:
        jsonschema.validate(json.loads(text), SCHEMA)
    for pattern, text in ((r"[a-f]{3,30}/(x|y+)\.\d", texts[2][0]), (r"<\d+>", texts[5][0])):
        assert re.fullmatch(pattern, text), text
    assert set(texts[3]) <= {"yes", 'no "quotes"', "yes indeed"}
    (nested,) = texts[4]
    assert nested.strip("()") in ("a", "b", "c") or expected()[4][0].finish_reason == "length"
    for asked, completions in zip(requests(), expected(), strict=True):
        for completion in completions if asked.grammar else ():
            assert completion.finish_reason == "stop" or asked.params[0].max_tokens == 12
            assert completion.is_stopped == (completion.tokens[-1] in STOPS)
            if asked.params[0] is not asked.params[-1]:
                continue  # a greedy one among them
            theirs = masked_log_probs(asked, completion)
            ours = theirs[np.arange(len(completion.tokens)), completion.tokens]
            np.testing.assert_allclose(completion.log_probs, ours, atol=2e-5)
            for row, top in zip(theirs, completion.top_log_probs, strict=False):
                likeliest = sorted(row, reverse=True)[: len(top)]
                np.testing.assert_allclose([p for _, p in top], likeliest, atol=2e-5)


def test_neighbours_without_a_grammar_are_sampled_as_alone():
    alone = engine_of().generate(rollout_params(), requests()[1:2])
    assert_same(expected()[1:2], alone)


@pytest.mark.slow
def test_slots_chunks_preemption_and_speculation_do_not_matter():
    small = engine_of(num_slots=3, chunk_steps=7, cache_tokens=LIMIT + 24)
    assert_same(small.generate(rollout_params(), requests()), expected())
    assert small.statistics.num_preemptions > 0
    drafting = engine_of(speculation=SpeculationConfig(draft_tokens=3))
    assert_same(drafting.generate(rollout_params(), requests()), expected())


def test_a_resumed_sample_goes_on_in_its_grammar():
    engine, asked = engine_of(chunk_steps=3), requests()[0]
    one = dataclasses.replace(asked, keys=asked.keys[:1], params=asked.params[:1])
    number = engine.submit(one)
    for _ in range(3):
        engine.step(rollout_params())
    (part,) = engine.abort(number)
    assert 3 < len(part.tokens) < len(expected()[0][0].tokens)
    rest = dataclasses.replace(
        one,
        tokens=(*one.tokens, *part.tokens),
        num_partial=len(part.tokens),
        params=(dataclasses.replace(one.params[0], max_tokens=50 - len(part.tokens)),),
    )
    ((resumed,),) = engine.generate(rollout_params(), [rest])
    assert part.tokens + resumed.tokens == expected()[0][0].tokens
    np.testing.assert_allclose(
        part.log_probs + resumed.log_probs, expected()[0][0].log_probs, atol=2e-5
    )


def test_what_cannot_be_followed_is_refused_and_ends_its_sample_alone():
    engine = engine_of()
    with pytest.raises(RequestError, match="a grammar needs stop tokens"):
        engine.submit(constrained("json", [SamplingParams(5)], 0))
    other = structured_outputs.GrammarCompiler(character_tokenizer(), 8)
    vocabulary = structured_outputs.source_of(structured_outputs.regex_part("a"), "test")
    small = dataclasses.replace(requests()[0], grammar=other.compile(vocabulary))
    limits = dataclasses.replace(engine.limits, vocab_size=200)
    with pytest.raises(RequestError, match="a grammar over 82 tokens; this model has 200"):
        limits.check(small, "request")
    # "B" is no token, so nothing can follow "a"; and a sample that breaks its grammar cannot go on.
    impossible = structured_outputs.source_of(structured_outputs.regex_part("aB"), "test")
    stop = (SamplingParams(9, stop_tokens=STOPS),)
    stuck = dataclasses.replace(requests()[5], grammar=compiler().compile(impossible), params=stop)
    broken = dataclasses.replace(requests()[5], num_partial=2)
    numbers = [engine.submit(each) for each in (stuck, broken, requests()[3])]
    errors, completions = {}, {}
    while engine.num_waiting or engine.num_active:
        for progress in engine.step(rollout_params()):
            if progress.error is not None:
                errors[progress.request] = progress.error
                assert progress.finish_reason == "error"
            kept = completions.setdefault((progress.request, progress.sample), [])
            kept += progress.tokens
    assert set(errors) == set(numbers[:2])
    assert all(isinstance(error, GrammarError) for error in errors.values())
    assert str(errors[numbers[0]]) == "grammar: no token of this model can follow"
    assert [completions[numbers[2], i] for i in (0, 1)] == [c.tokens for c in expected()[3]]


def test_a_batch_without_grammars_runs_the_chunk_program_alone():
    engine = engine_of()
    engine.generate(rollout_params(), requests()[1:2])
    programs = engine.programs
    assert programs.generate._cache_size() > 0
    for name in ("begin", "forward", "sample", "end"):
        assert getattr(programs, f"{name}_masked")._cache_size() == 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"fsdp": 4}, {"fsdp": 2, "tensor": 2}])
def test_mesh_does_not_matter(sizes):
    mesh = tiny.make_mesh(**sizes)
    engine = engine_of(mesh=mesh)
    assert_same(engine.generate(rollout_params(mesh), requests()), expected())
    count = engine.num_compilations()
    engine.generate(rollout_params(mesh), requests())
    assert engine.num_compilations() == count


@pytest.mark.slow
def test_supports_and_adjusted_logits_under_a_grammar():
    kept = SamplingParams(40, stop_tokens=STOPS, support_tokens=6, top_p=0.95)
    biased = dataclasses.replace(kept, logit_bias=((20, 4.0), (70, 4.0)), min_tokens=50)
    asked = constrained("regex", [kept, biased], 7)
    (found,) = engine_of().generate(rollout_params(), [asked])
    for params, completion in zip(asked.params, found, strict=True):
        support, tokens = np.concatenate(completion.support), completion.tokens
        assert support.shape == (len(tokens), 6)
        rows = np.array([[*asked.tokens, *tokens]])
        positions = jnp.arange(rows.shape[1])[None]
        hidden = tiny.hidden_states(tiny.NETWORK)(weights(), rows, positions, jnp.ones_like(rows))
        logits = np.array(tiny.NETWORK.logits(weights(), hidden))[0, len(asked.tokens) - 1 :]
        for token, bias in params.logit_bias:
            logits[:, token] += bias
        for token, log_prob, ids, row in zip(
            tokens, completion.log_probs, support, logits, strict=False
        ):
            ids = ids[ids >= 0]
            assert token in ids
            want = row[token] - np.logaddexp.reduce(row[ids])
            if params.min_tokens and {*ids} <= {*STOPS}:  # banned, but the grammar has ended
                want = -np.log(len(ids))
            assert log_prob == pytest.approx(want, abs=1e-4)
        text = character_tokenizer().decode([t for t in tokens if t not in STOPS])
        assert completion.finish_reason == "length" or re.fullmatch(r"[a-f]{3,30}/(x|y+)\.\d", text)
