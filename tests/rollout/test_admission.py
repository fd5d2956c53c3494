"""The arrays of an insert, and what stands in the places that nobody takes."""

import numpy as np

from jaxrl_llm.rollout import scheduler
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS, SamplingParams


def test_two_samples_in_room_for_three():
    drawn = [
        (np.array([1, 2], np.uint32), SamplingParams(7, 0.5, top_k=3, stop_tokens=(9, 4))),
        (np.array([3, 4], np.uint32), SamplingParams(5, top_p=0.9, min_p=0.1)),
    ]
    found = scheduler.admission(drawn, slots=[6, 0], prompts=[1, 1], size=3, num_slots=8)
    # The third goes past the last slot: nowhere.
    assert found.slots.tolist() == [6, 0, 8]
    assert found.prompts.tolist() == [1, 1, 0]
    assert found.limits.tolist() == [7, 5, 1]
    assert found.stops.shape == (3, NUM_STOP_TOKENS)
    assert found.stops[0, :3].tolist() == [9, 4, -1]
    assert (found.stops[1:] == -1).all()
    assert found.sampler.keys.tolist() == [[1, 2], [3, 4], [0, 0]]
    assert found.sampler.temperature.tolist() == [0.5, 1.0, 1.0]
    assert found.sampler.top_k.tolist() == [3, 0, 0]
    np.testing.assert_allclose(found.sampler.top_p, [1.0, 0.9, 1.0])
    np.testing.assert_allclose(found.sampler.min_p, [0.0, 0.1, 0.0])


def test_nobody_enters():
    found = scheduler.admission([], [], [], 2, 4)
    assert found.slots.tolist() == [4, 4]
