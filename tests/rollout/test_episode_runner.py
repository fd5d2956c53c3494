"""Episodes that are paused and go on by other weights."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.rollout import episodes
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.rollout.episode_runner import EpisodeRunner
from jaxrl_llm.types import Prompt, Weights

TOKENIZER = character_tokenizer()
NETWORK = tiny.with_sizes(vocab_size=len(TOKENIZER))
SAMPLES = (SamplingParams(17, temperature=0.9), SamplingParams(11))
PROMPTS = [Prompt(tokens, "", "", None, {}, 0) for tokens in ((4, 5), (6, 7, 8, 9, 10), (11,) * 9)]


@functools.cache
def trained(seed):
    return tiny.params(NETWORK, seed)


@functools.cache
def weights(seed):
    """The version of weights is their seed."""
    return Weights(tiny.rollout_params(trained(seed), tiny.make_mesh(), NETWORK), seed)


@pytest.fixture(scope="module")
def engine():
    decode = functools.partial(TOKENIZER.decode, skip_special_tokens=True)
    made = Engine(
        NETWORK, tiny.make_mesh(), num_slots=4, max_tokens=32, chunk_steps=3, decode=decode
    )
    return made


def begun(engine, samples=SAMPLES):
    engine.reset()
    play, n = EpisodeRunner(engine, samples), len(samples)
    keys = episodes.sample_keys(jax.random.key(1), len(PROMPTS) * n)
    for i, prompt in enumerate(PROMPTS):
        play.start(prompt, i * n, keys[i * n : (i + 1) * n])
    return play


def test_log_probs_are_those_of_each_version(engine):
    """What an older version drew has its log-probs, and is read again by the newer one."""
    play = begun(engine)
    for version in (1, 2, 3):
        play.step(weights(version))
        play.pause()
        play.resume()
    list(play.run(weights(4)))
    spans = set()
    for (sequence,) in play.sequences.values():
        assert len(sequence.tokens) == sequence.params.max_tokens
        assert all(sequence.sampled) and sequence.versions == sorted(sequence.versions)
        whole = np.array([[*sequence.prompt, *sequence.tokens]])
        temperature = np.array([sequence.params.temperature], np.float32)
        for version in set(sequence.versions):
            wanted = tiny.teacher_forced(whole, temperature, NETWORK, trained(version))
            drawn = np.array(sequence.versions) == version
            found = np.array(sequence.log_probs, np.float32)[drawn]
            expected = np.asarray(wanted)[0, len(sequence.prompt) :][drawn]
            np.testing.assert_allclose(found, expected, atol=1e-5)  # rounding of 32 bits
        spans.add(tuple(sorted(set(sequence.versions))))
    # Some waited for a slot while others were interrupted three times.
    assert (1, 2, 3, 4) in spans and len(spans) > 1


def test_a_pause_changes_no_sample(engine):
    """By the same weights, whether nothing, a part or all is thrown away."""
    plain, paused, anew = (begun(engine.clone()) for _ in range(3))
    list(plain.run(weights(1)))
    for play, how in ((paused, False), (anew, True)):
        for _ in range(2):
            play.step(weights(1))
            play.pause()
            ended = {number for number, (_, has_ended) in play.snapshot().items() if has_ended}
            assert not play.is_running
            play.resume(restart=how)
        list(play.run(weights(1)))
        assert ended < play.sequences.keys()
        for number, (sequence,) in plain.sequences.items():
            (other,) = play.sequences[number]
            assert (other.tokens, other.stopped) == (sequence.tokens, sequence.stopped)
            np.testing.assert_allclose(other.log_probs, sequence.log_probs, atol=1e-5)


def test_copies_go_on_elsewhere(engine):
    """What a checkpoint holds continues in another process as it would have here."""
    here = begun(engine.clone())
    here.step(weights(1))
    elsewhere = EpisodeRunner(engine.clone(), SAMPLES)
    for sequence, has_ended in here.snapshot().values():
        elsewhere.restore(sequence, has_ended)
    assert [e for _, e in elsewhere.snapshot().values()] == [e for _, e in here.snapshot().values()]
    here.pause()
    for play in (here, elsewhere):
        play.resume()
        list(play.run(weights(2)))
    for number, (sequence,) in here.sequences.items():
        (other,) = elsewhere.sequences[number]
        assert other.tokens == sequence.tokens and other.versions == sequence.versions
        assert other.log_probs == sequence.log_probs


def test_stop_strings_may_begin_before_a_pause(engine):
    plain = begun(engine.clone())
    list(plain.run(weights(1)))
    tokens = plain.sequences[0][0].tokens
    stop = TOKENIZER.decode(tokens[3:5], skip_special_tokens=True)  # the pause is between them
    assert len(stop) == 2
    samples = tuple(dataclasses.replace(params, stop_strings=(stop,)) for params in SAMPLES)
    play = begun(engine.clone(), samples)
    play.step(weights(1))
    place = next(i for i in range(len(tokens)) if stop in TOKENIZER.decode(tokens[: i + 1]))
    sequence = play.sequences[0][0]
    play.pause()
    assert len(sequence.tokens) < place + 1
    play.resume()
    list(play.run(weights(1)))
    assert sequence.tokens == tokens[: place + 1] and sequence.stopped
