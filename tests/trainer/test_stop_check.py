"""When a run ends by a metric, and what it says."""

from jaxrl_llm.config.stop_condition import stop_condition
from jaxrl_llm.trainer.stop_check import StopCheck


def test_a_metric_ends_a_run_once_it_is_there(caplog):
    check = StopCheck(stop_condition("val-core/sums/mean@1 >= 0.9"))
    assert check.check(1, {"critic/score/mean": 1.0}, False) == {"training/stop_when": 0.0}
    assert check.check(2, {"val-core/sums/mean@1": 0.5}, True) == {"training/stop_when": 0.0}
    assert not check.reason and not caplog.text
    assert check.check(3, {"val-core/sums/mean@1": 0.95}, True) == {"training/stop_when": 1.0}
    said = "val-core/sums/mean@1 is 0.95 after step 3 (stop_when: val-core/sums/mean@1 >= 0.9)"
    assert check.reason == said
    # A later start has ended too, unless it has another condition.
    again = StopCheck(check.condition)
    again.set_state(check.get_state())
    assert again.reason == said
    further = StopCheck(stop_condition("val-core/sums/mean@1 >= 0.99"))
    further.set_state(check.get_state())
    assert not further.reason


def test_a_metric_that_does_not_come_is_named_once(caplog):
    check = StopCheck(stop_condition("val-core/sum/mean@1 >= 0.9"))
    check.check(1, {"critic/score/mean": 1.0}, False)
    assert not caplog.text  # nothing was evaluated
    for step in (2, 3):
        check.check(step, {"val-core/sums/mean@1": 1.0}, True)
    assert caplog.text.count("has no metric 'val-core/sum/mean@1'") == 1
    assert "did you mean 'val-core/sums/mean@1'" in caplog.text
    check = StopCheck(stop_condition("actor/entropi < 1"))  # perhaps of the user's own loss
    check.check(1, {"actor/entropy": 1.0}, False)
    assert "step 1 has no metric 'actor/entropi', so it cannot end; did you mean" in caplog.text


def test_no_condition_costs_nothing():
    check = StopCheck(stop_condition(""))
    assert check.check(1, {"critic/score/mean": 1.0}, True) == {} and not check.reason
