"""Who enters which slot and how their tokens are drawn, as the arrays that `insert` takes."""

from typing import Any

import numpy as np

from jaxrl_llm.rollout.programs import Admission
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS, SamplingParams
from jaxrl_llm.rollout.sampling import SamplerState


def lay_out(
    drawn: list[tuple[np.ndarray, SamplingParams]],
    slots: list[int],
    places: list[int],
    size: int,
    num_slots: int,
) -> Admission:
    """Returns the arrays of an insert of `size` samples; what is not used goes nowhere.

    Args:
      drawn: Key and parameters of each sample.
      slots: Where each goes; `num_slots` is nowhere.
      places: Which prompt of the prefix each begins with.
    """
    filler = [(np.zeros(2, np.uint32), SamplingParams(max_tokens=1))] * (size - len(drawn))
    keys, params = zip(*drawn, *filler, strict=True)

    def column(values, fill, dtype):
        return np.array([*values, *[fill] * len(filler)], dtype)

    stops = np.full((size, NUM_STOP_TOKENS), -1, np.int32)
    for i, p in enumerate(params):
        stops[i, : len(p.stop_tokens)] = p.stop_tokens
    sampler: dict[str, Any] = {
        "keys": np.stack(keys).astype(np.uint32),
        "temperature": np.array([p.temperature for p in params], np.float32),
        "top_k": np.array([p.top_k for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
    }
    fields: dict[str, Any] = {
        "prompts": column(places, 0, np.int32),
        "slots": column(slots, num_slots, np.int32),
        "limits": np.array([p.max_tokens for p in params], np.int32),
        "stops": stops,
    }
    return Admission(**fields, sampler=SamplerState(**sampler))
