"""Conditions on metrics: their forms, and metrics that no run has."""

import math

import pytest

from jaxrl_llm.config.learner import RLTrainerConfig, SupervisedTrainerConfig
from jaxrl_llm.config.stop_condition import METRIC_NAMES, stop_condition


@pytest.mark.parametrize(
    ("text", "met", "unmet"),
    [
        ("val-core/arithmetic/mean@4 >= 0.9", (0.9, 1.0), (0.89, math.nan)),
        ("  val/sft/loss<0.5 ", (0.4, -1.0), (0.5, math.inf)),
        ("actor/entropy <= 1e-3", (1e-3, 0.0), (2e-3,)),
        ("critic/score/mean > 0", (1e-9,), (0.0, -1.0)),
        ("val/score/mean >= -1", (0.0,), (-2.0,)),
        ("router/load/12 > 3", (4.0,), (3.0,)),
    ],
)
def test_values_meet_a_condition(text, met, unmet):
    condition = stop_condition(text)
    assert all(condition.is_met({condition.metric: value, "other": -1e9}) for value in met)
    assert not any(condition.is_met({condition.metric: value}) for value in unmet)
    assert not condition.is_met({"other": met[0]})
    assert stop_condition(str(condition)) == condition


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("reward", "'reward' is not 'METRIC >= NUMBER'"),
        ("critic/score/mean = 0.9", "is not 'METRIC >= NUMBER'"),
        ("critic/score/mean >= high", "is not 'METRIC >= NUMBER'"),
        ("critic/score/mean >= nan", "is not 'METRIC >= NUMBER'"),
        ("critic/score/mean >= 0.9 and val/sft/loss < 1", "is not 'METRIC >= NUMBER'"),
        ("critic/scores/mean >= 1", "did you mean 'critic/score/mean'"),
        ("val-core/sums/mean >= 1", "'val-core/SOURCE/mean@K'"),
        ("sft/losses < 1", "did you mean 'sft/loss'"),
        ("zzz > 1", "no run has a metric 'zzz'; docs/metrics.md lists all metrics"),
    ],
)
def test_what_is_no_condition_is_refused(text, said):
    for kind in (RLTrainerConfig, SupervisedTrainerConfig):
        problems = dict(kind(stop_when=text).problems())
        assert said in problems["stop_when"], problems
    with pytest.raises(ValueError, match=r"metric|METRIC"):
        stop_condition(text)


def test_names():
    assert stop_condition("") is None
    assert len(set(METRIC_NAMES)) == len(METRIC_NAMES) > 150
