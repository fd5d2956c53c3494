"""What a curriculum draws: weights by hand, shares, a user's function, exact resume, errors."""

import collections
import json

import numpy as np
import pytest

from jaxrl_llm.algorithms.lookup import FunctionError
from jaxrl_llm.config import CurriculumConfig, DataConfig
from jaxrl_llm.data import curriculum
from jaxrl_llm.data.curriculum import (
    Curriculum,
    level_weights,
    success_variance_weights,
    unsolved_weights,
)
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.mixtures import MixtureSchedule
from jaxrl_llm.data.prompt_stream import PromptIterator
from jaxrl_llm.data.streams import MixedRows
from jaxrl_llm.types import Prompt

SUCCESS = CurriculumConfig(choice="success")


def prompts(count, source="s"):
    return tuple(Prompt((i, 1), f"{source}{i}", source, None, {}, i) for i in range(count))


def indices(drawn):
    return [prompt.index for prompt in drawn]


def answered(drawn, rates, draw, num=4):
    """Returns scores of answers, each right with the probability of its prompt."""
    return [(draw.random(num) < rates[prompt.index]).astype(float) for prompt in drawn]


def run(cursor, rates, steps, seed=0):
    """Returns what was drawn, and lets the curriculum learn from answers by the step's number."""
    found = []
    for step in range(steps):
        drawn = cursor.take(8)
        cursor.learn(drawn, answered(drawn, rates, np.random.default_rng((seed, step))))
        found.append(indices(drawn))
    return found


def test_weights_by_hand():
    # (0.05 + 3) / 4.1 = 0.7439; 4 * 0.7439 * 0.2561 = 0.7620; (0.05 + 0) / 4.1: 0.0482
    found = success_variance_weights(
        np.array([0.0, 4.0, 4.0, 400.0]), np.array([0.0, 3.0, 0.0, 400.0]), floor=0.01
    )
    np.testing.assert_allclose(found, [1.0, 0.76205, 0.04819, 0.01], atol=1e-5)


def test_prompts_between_take_up_the_batch():
    rates = np.repeat([0.0, 0.5, 1.0], 40)
    cursor = Curriculum(prompts(120), SUCCESS, 0)
    drawn = run(cursor, rates, 100)
    assert all(len(set(batch)) == 8 for batch in drawn)  # none twice in a batch
    assert len({index for batch in drawn[:20] for index in batch}) > 90  # first what is not known
    late = collections.Counter(int(2 * rates[index]) for batch in drawn[20:] for index in batch)
    assert late[1] > 0.7 * 640  # a third of the prompts
    assert late[0] > 10 and late[2] > 10  # they are not given up
    found = curriculum.metrics([cursor])
    assert found["curriculum/answered"] == 1.0
    assert 0.28 < found["curriculum/solved"] < 0.42 and 0.28 < found["curriculum/unsolved"] < 0.42
    assert set(curriculum.metrics([Curriculum(prompts(3), SUCCESS, 0)]).values()) == {0.0}


def test_a_prompt_that_changes_is_noticed():
    cursor = Curriculum(prompts(2), CurriculumConfig(choice="success", memory=0.5), 0)
    both = cursor.take(2)
    for _ in range(5):
        cursor.learn(both, [np.zeros(4), np.ones(4)])
    before = cursor.weights()
    assert before.max() < 0.15
    cursor.learn(both[:1], [np.array([1.0, 0.0, 1.0, 0.0])])
    after = cursor.weights()
    assert after[both[0].index] > 0.5 and after[both[1].index] == before[both[1].index]


@pytest.mark.parametrize("taken", [0, 3, 11])
def test_resume_is_exact(taken):
    rates = np.linspace(0, 1, 30)
    whole = run(Curriculum(prompts(30), SUCCESS, 7), rates, 20)
    first = Curriculum(prompts(30), SUCCESS, 7)
    assert run(first, rates, taken) == whole[:taken]
    state = json.loads(json.dumps(first.get_state()))
    resumed = Curriculum(prompts(30), SUCCESS, 7)
    resumed.set_state(state)
    for step in range(taken, 20):
        drawn = resumed.take(8)
        assert indices(drawn) == whole[step]
        resumed.learn(drawn, answered(drawn, rates, np.random.default_rng((0, step))))
    assert run(Curriculum(prompts(30), SUCCESS, 8), rates, 20) != whole
    for other, message in (
        (Curriculum(prompts(31), SUCCESS, 7), "num_rows=30, this run has 31"),
        (Curriculum(prompts(30), SUCCESS, 8), "seed=7, this run has 8"),
    ):
        with pytest.raises(DataError, match=message):
            other.set_state(state)


def test_a_mixture_has_a_curriculum_in_each_part():
    parts = prompts(20, "a"), prompts(10, "b")
    rows = MixedRows(parts, MixtureSchedule((1.0, 3.0), (1.0, 3.0), 0))
    dataset = Dataset((*parts[0], *parts[1]), rows)

    def steps(iterator, count):
        found = []
        for _ in range(count):
            batch = iterator.next_batch(8).prompts
            found.append([prompt.text for prompt in batch])
            iterator.learn(batch, [np.full(2, prompt.index % 2) for prompt in batch])
        return found

    first = PromptIterator(dataset, DataConfig(), 0, SUCCESS)
    found = steps(first, 6)
    state = json.loads(json.dumps(first.get_state()))
    found += steps(first, 6)
    assert collections.Counter(text[0] for batch in found for text in batch) == {"a": 24, "b": 72}
    assert first.metrics()["curriculum/answered"] > 0.8
    again = PromptIterator(dataset, DataConfig(), 0, SUCCESS)
    again.set_state(state)
    assert steps(again, 6) == found[6:]
    assert PromptIterator(dataset, DataConfig(), 0).metrics() == {}


USERS = """
import numpy as np

def hardest(answers, successes, prompts):
    \"\"\"Unknown prompts first, then those with the fewest successes.\"\"\"
    known = np.where(answers == 0, 1e6, 1.0 / (1.0 + successes))
    return known * np.array([prompt.index for prompt in prompts])

def few(prompts): return np.arange(len(prompts)) < 3
def nothing(prompts): return np.zeros(len(prompts))
def wrong_shape(batch): return np.ones(batch)
def negative(prompts): return -np.ones(len(prompts))
def not_finite(prompts): return [float("nan")] * len(prompts)
def raising(floor): return 1 / 0
def asking(tokens): return tokens
"""


def test_a_function_of_the_users(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USERS)
    named = lambda name: CurriculumConfig(choice=f"{path}:{name}")  # noqa: E731
    cursor = Curriculum(prompts(10), named("hardest"), 0)
    drawn = [cursor.take(3) for _ in range(3)]
    assert all(prompt.index for batch in drawn for prompt in batch)  # weight 0 never comes
    again = indices(Curriculum(prompts(10), named("few"), 0).take(7))
    assert set(again) == {0, 1, 2} and again[:3] == again[3:6]
    curriculum.check_curriculum(named("few"), prompts(4))
    for name, error, message in (
        ("nothing", DataError, "gave every prompt the weight 0"),
        ("wrong_shape", DataError, r"each of the 4 prompts, got an array of shape \(1,\)"),
        ("negative", DataError, "got -1.0 for prompt 0"),
        ("not_finite", DataError, "got nan for prompt 0"),
        ("raising", DataError, "raised ZeroDivisionError: division by zero; correct it"),
        ("asking", FunctionError, "parameter 'tokens' is not available; available: answers, batch"),
        ("absent", DataError, "has no 'absent'"),
    ):
        with pytest.raises(error, match=message) as found:
            curriculum.check_curriculum(named(name), prompts(4))
        assert str(found.value).startswith("config.curriculum.choice: ")
    curriculum.check_curriculum(CurriculumConfig(), ())


def test_curriculum_config_is_validated():
    ((field, message),) = CurriculumConfig(choice="succes").problems()
    assert field == "choice"
    assert "unknown choice 'succes'; known: success, unsolved, levels; or your own" in message


def test_solved_prompts_are_not_drawn_again():
    found = unsolved_weights(np.array([0.0, 10.0, 10.0, 4.0]), np.array([0.0, 9.0, 8.0, 4.0]))
    np.testing.assert_array_equal(found, [1.0, 0.0, 1.0, 0.0])
    np.testing.assert_array_equal(unsolved_weights(np.ones(2), np.ones(2)), [1.0, 1.0])
    config = CurriculumConfig(choice="unsolved", memory=1.0)
    drawn = Curriculum(prompts(4), config, 0)
    drawn.learn(drawn.take(4)[:1], [np.ones(8)])
    (solved,) = np.flatnonzero(drawn.statistics.successes)
    for _ in range(3):
        assert solved not in indices(drawn.take(3))


def test_levels_rise_when_they_are_mastered_and_fall_when_they_are_forgotten():
    """Two generators with three levels of two prompts each, and prompts without levels."""
    prompts = [
        Prompt((1,), "", source, "", {"level": level}, i)
        for i, (source, level) in enumerate((s, n) for s in "ab" for n in (0, 1, 2) for _ in "12")
    ]
    answers, successes, last_batch = np.zeros(12), np.zeros(12), np.full(12, 9.0)

    def weights():
        return level_weights(answers, successes, last_batch, 10, prompts, 0.1).tolist()

    assert weights() == [1, 1, 0, 0, 0, 0] * 2
    answers[0], successes[0] = 8, 4  # half of them: enough, and the other prompt need not come
    assert weights() == [0.1, 0.1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]
    answers[2:4], successes[2:4] = 8, (8, 0)
    answers[6], successes[6] = 8, 3
    assert weights() == [0.1, 0.1, 0.1, 0.1, 1, 1, 1, 1, 0, 0, 0, 0]
    successes[0] = 3  # forgotten
    assert weights() == [1, 1, 0, 0, 0, 0] * 2
    answers[:6], successes[:6] = 8, 8  # all are mastered
    assert weights()[:6] == [0.1, 0.1, 0.1, 0.1, 1, 1]
    last_batch[:], successes[0] = 9, 3
    last_batch[0] = 2  # a failure of long ago fades
    assert weights()[:2] == [0.1, 0.1]
    plain = [Prompt((1,), "", prompt.data_source, "", {}, 0) for prompt in prompts]
    assert level_weights(answers, successes, last_batch, 10, plain, 0.1).tolist() == [1.0] * 12
    config = CurriculumConfig(choice="levels", memory=1.0)
    curriculum = Curriculum(prompts, config, 0)
    assert {prompt.extra_info["level"] for prompt in curriculum.take(4)} == {0}
