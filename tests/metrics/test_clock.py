"""Phases add up, also when one of them fails."""

import pytest

from jaxrl_llm.metrics.clock import Clock


def test_phases_add_up_and_survive_an_error():
    ticks = iter([0.0, 1.0, 2.0, 5.0, 9.0, 10.0])
    clock = Clock(now=lambda: next(ticks))
    with clock("gen"):
        pass
    with pytest.raises(RuntimeError), clock("gen"):
        raise RuntimeError
    # 1 to 2 and 5 to 9
    assert clock.seconds() == {"timing_s/gen": 5.0, "timing_s/step": 10.0}
