"""Requests and device outputs for the scheduler on its own, and text of tokens."""

import numpy as np

from jaxrl_llm.rollout.engine.device_programs import Outputs
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams


def text_of(tokens):
    return "".join(chr(ord("a") + token) for token in tokens)


def request(*budgets, prompt=(7, 8), stops=(), strings=(), top=0):
    params = tuple(
        SamplingParams(b, stop_tokens=stops, stop_strings=strings, num_top_log_probs=top)
        for b in budgets
    )
    return Request(tuple(prompt), np.zeros((len(budgets), 2), np.uint32), params)


def outputs(columns, steps, slots, remaining):
    """What `generate` gives: slots without a column are idle. Log-probs are -token / 10."""
    tokens = np.full((steps, slots), -1, np.int32)
    for slot, column in columns.items():
        tokens[: len(column), slot] = column
    log_probs = np.where(tokens >= 0, tokens / -10.0, 0.0)
    tops = np.stack([tokens, tokens + 1], -1)
    nothing = np.zeros((steps, slots, 0), np.int16)
    return Outputs(tokens, log_probs, tops, tops / -10.0, nothing, nothing, np.array(remaining))


def first(tokens, remaining):
    return outputs(dict(enumerate([t] for t in tokens)), 1, len(tokens), remaining)
