"""From prompts to `Rollouts`: where tokens, masks, log-probs and texts stand, turn by turn."""

import copy
import dataclasses

import jax
import numpy as np
import pytest
import tiny
from talk import APPENDED, Talk

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine import host_inputs
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.types import Prompt, PromptBatch, Weights

TOKENIZER = character_tokenizer()
NETWORK = tiny.with_sizes(vocab_size=len(TOKENIZER))
SAMPLES = (
    SamplingParams(9, stop_tokens=(1,)),
    SamplingParams(20, stop_tokens=tuple(range(40, 48))),
    SamplingParams(4, temperature=0.0),
)


@pytest.fixture(scope="module")
def setup():
    mesh = tiny.make_mesh()
    engine = Engine(NETWORK, mesh, num_slots=4, max_tokens=64)
    return engine, Weights(tiny.rollout_params(tiny.params(NETWORK), mesh, NETWORK), 7)


def prompts(*texts):
    rows = []
    for index, text in enumerate(texts):
        tokens = tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])
        rows.append(Prompt(tokens, text, "test", None, {}, index))
    return PromptBatch(tuple(rows))


def test_shorter_and_longer_prompts_of_one_dataset_have_one_shape(setup, compilations):
    engine, shapes, counts = copy.copy(setup[0]), set(), []
    engine.prompt_shapes = host_inputs.prefill_shapes(2, 43, engine.max_tokens)
    for text in ("two words", "and a prompt of more than thirty-two tokens", "a"):
        batch = PromptBatch(prompts(text).prompts, max_prompt_tokens=43)
        of = engine, setup[1], TOKENIZER, batch, SAMPLES
        rollouts, _ = episodes.rollout(*of, jax.random.key(3))
        shapes.add(rollouts.tokens.shape)
        counts.append(compilations.count("jit(prefill)"))
    assert shapes == {(3, 64)} and counts == counts[:1] * 3


def test_fields(setup):
    batch = prompts("a", "two words", "and a longer one than those")
    rollouts, _ = episodes.rollout(*setup, TOKENIZER, batch, SAMPLES, jax.random.key(3))
    np.testing.assert_array_equal(rollouts.group_ids, np.repeat([0, 1, 2], 3))
    assert rollouts.prompts == batch.prompts
    assert rollouts.tokens.shape[1] in (32, 64)
    columns = np.arange(rollouts.tokens.shape[1])
    for row, params in enumerate(SAMPLES * 3):
        prompt, length = rollouts.prompts[rollouts.group_ids[row]], rollouts.lengths[row]
        assert prompt is batch.prompts[row // 3]
        tokens, start = rollouts.tokens[row], len(prompt.tokens)
        assert tuple(tokens[:start]) == prompt.tokens
        assert (tokens[length:] == 0).all()
        inside = (columns >= start) & (columns < length)
        np.testing.assert_array_equal(rollouts.response_mask[row], inside)
        assert (rollouts.rollout_log_probs[row][~inside] == 0).all()
        assert (rollouts.rollout_log_probs[row][inside] < 0).all()
        np.testing.assert_array_equal(rollouts.versions[row], np.where(inside, 7, 0))
        assert rollouts.stopped[row] == (tokens[length - 1] in params.stop_tokens)
        assert rollouts.stopped[row] or inside.sum() == params.max_tokens
        text = TOKENIZER.decode(tokens[inside].tolist(), skip_special_tokens=True)
        assert rollouts.responses[row] == text
    assert 0 < rollouts.stopped.sum() < 9


def test_sample_depends_on_key_and_number_only(setup):
    one, two = (
        episodes.rollout(*setup, TOKENIZER, prompts("x", last), SAMPLES[:2], jax.random.key(0))[0]
        for last in ("yz", "something else")
    )
    other, _ = episodes.rollout(
        *setup, TOKENIZER, prompts("x", "yz"), SAMPLES[:2], jax.random.key(1)
    )
    width = min(one.tokens.shape[1], two.tokens.shape[1])
    np.testing.assert_array_equal(one.tokens[:2, :width], two.tokens[:2, :width])
    assert one.responses[:2] != other.responses[:2]


def test_keys_are_the_folded_ones():
    key = jax.random.key(5)
    found = episodes._fold_in_each(key, np.arange(3, dtype=np.uint32))
    for i in range(3):
        np.testing.assert_array_equal(found[i], jax.random.key_data(jax.random.fold_in(key, i)))


def test_parameters_of_a_run():
    config = RolloutConfig(
        max_response_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        stop_tokens=(4, 2),
        stop_strings=("so.",),
    )
    want = SamplingParams(7, 0.5, 3, 0.9, 0.1, stop_tokens=(2, 9, 4), stop_strings=("so.",))
    assert episodes.sampling_params(config, (2, 9)) == want


@pytest.mark.parametrize("late", [0, 2])
def test_an_episode_of_several_turns(setup, late):
    """Ids are never made anew; a turn is sampled as a request that begins where it does."""
    engine, weights = setup
    batch = prompts("ask", "and another")
    often = SamplingParams(44, stop_tokens=tuple(range(40, 56)))
    samples, key = (often, often, SamplingParams(20, stop_tokens=often.stop_tokens)), 5
    answers = [0, 2, 99] * 2  # 99: until there is no room
    talk = Talk(answers, late)
    rollouts, done = episodes.rollout(
        engine, weights, TOKENIZER, batch, samples, jax.random.key(key), talk
    )
    num_turns = sum(map(len, talk.turns))  # prefill samples the first token
    assert done.decode_tokens + num_turns == rollouts.response_mask.sum()
    # Every turn reads what is new, and the last token that was sampled before it.
    prompt_tokens = sum(len(prompt.tokens) for prompt in batch.prompts)
    new = prompt_tokens + (num_turns - 6) * (len(APPENDED) + 1)
    assert new <= done.prefill_tokens == new + done.recomputed_tokens
    assert sorted(talk.ended) == [number for number, count in enumerate(answers) if count == 99]
    assert [log.num_turns for log in rollouts.episode_logs] == list(map(len, talk.turns))
    forced = np.asarray(
        tiny.teacher_forced(rollouts.tokens, np.ones(6, np.float32), NETWORK, tiny.params(NETWORK))
    )
    for row, (turns, params) in enumerate(zip(talk.turns, samples * 2, strict=True)):
        prompt = rollouts.prompts[rollouts.group_ids[row]].tokens
        response, chosen = list(turns[0]), [True] * len(turns[0])
        for turn in turns[1:]:
            response += [*APPENDED, *turn]
            chosen += [False] * 3 + [True] * len(turn)
        tokens, start, length = rollouts.tokens[row], len(prompt), rollouts.lengths[row]
        assert tokens[:length].tolist() == [*prompt, *response]
        assert not tokens[length:].any()
        mask = np.zeros(len(tokens), bool)
        mask[start:length] = chosen
        np.testing.assert_array_equal(rollouts.response_mask[row], mask)
        np.testing.assert_array_equal(rollouts.versions[row], np.where(mask, 7, 0))
        np.testing.assert_allclose(
            rollouts.rollout_log_probs[row], np.where(mask, forced[row], 0.0), atol=1e-4
        )
        assert rollouts.responses[row] == TOKENIZER.decode(response, skip_special_tokens=True)
        # All turns together keep the limit, and the policy has the last word.
        assert mask[length - 1] and len(response) <= params.max_tokens
        if answers[row] < 99:
            assert len(turns) == 1 + answers[row]
        else:
            assert len(turns) > 1 and len(response) + 3 >= params.max_tokens
        assert rollouts.stopped[row] == (tokens[length - 1] in params.stop_tokens)
        # As somebody would sample it who knows nothing of the turns before.
        begins = (*prompt, *turns[0], *APPENDED)
        if len(turns) > 1:
            room = dataclasses.replace(params, max_tokens=params.max_tokens + start - len(begins))
            own = jax.random.key_data(jax.random.fold_in(jax.random.key(key), row))
            request = Request(begins, np.asarray(own)[None], (room,))
            assert engine.generate(weights.params, [request])[0][0].tokens == turns[1]
    assert rollouts.stopped.sum() > 0 and len({*map(len, talk.turns)}) > 2
