"""A session alone: what it passes on to the engine loop, and what it refuses."""

import numpy as np
import pytest
import serving_model

from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.rollout.session_host import SessionRequest
from jaxrl_llm.serving.driver import RequestRejected
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.serving.sessions.session import ReplyParser, Session

TOKENIZER = serving_model.byte_tokenizer()
SERVED = ServedModel("m", TOKENIZER, (TOKENIZER.eos_token_id,), len(TOKENIZER), max_tokens=64)


def submit(params, **fields):
    """What a new session passes on, and its errors."""
    events = []
    session = Session(0, SERVED, ReplyParser(SERVED), 9, events.append, lambda *call: None)
    request = Request((5, 6), np.zeros((1, 2), np.uint32), (params,), **fields)
    try:
        session.submit([request], lambda event: None)
    finally:
        errors = dict(session.errors)
    return [event.request for event in events], errors


def test_log_probs_of_prompts_are_passed_on():
    params = SamplingParams(8, stop_tokens=(1,), num_top_log_probs=2)
    (passed,), errors = submit(params, num_prompt_top=3)
    assert passed == SessionRequest(0, (5, 6), 1, 8, (1,), (), 2, 3) and not errors


@pytest.mark.parametrize(
    "adjustment",
    [
        {"logit_bias": ((5, 1.0),)},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_tokens": 2},
        {"bad_words": ((5,),)},
    ],
    ids=str,
)
def test_adjusted_logits_are_not_the_policys(adjustment):
    (name,) = adjustment
    with pytest.raises(RequestRejected, match=f"from its policy, without {name}; leave it out"):
        submit(SamplingParams(8, **adjustment))
