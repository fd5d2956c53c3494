"""Replies of a model that samples at random, for two hundred schemas that others have written."""

import json
import pathlib

import cfnlint
import jax
import jsonschema
import numpy as np
import pytest
import tiny
from serving_structured import MAX_TOKENS, NETWORK, SERVED, weights

from jaxrl_llm.rollout import structured_outputs
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.grammars import GrammarError
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

COUNT, PROMPT, MAX_ATTEMPTS = 200, (5, 6, 7), 6
# Of the resources of CloudFormation, as cfn-lint publishes them.
SCHEMAS = pathlib.Path(cfnlint.__file__).parent / "data" / "schemas" / "resources"


def accepted_schemas():
    """The first schemas that llguidance can follow, with their grammars."""
    accepted = []
    for path in sorted(SCHEMAS.glob("*.json")):
        schema = json.loads(path.read_text())
        part = structured_outputs.json_part(schema, " ?")
        try:
            grammar = SERVED.grammars.compile(structured_outputs.source_of(part, path.name))
        except GrammarError:
            continue
        accepted.append((path.name, schema, grammar))
        if len(accepted) == COUNT:
            break
    return accepted


@pytest.mark.nightly
def test_every_complete_reply_is_valid_by_its_schema():
    accepted = accepted_schemas()
    assert len(accepted) == COUNT
    engine = Engine(NETWORK, tiny.make_mesh(), num_slots=64, max_tokens=MAX_TOKENS)
    params = (SamplingParams(MAX_TOKENS - len(PROMPT), stop_tokens=SERVED.eos_tokens),)
    remaining = accepted
    for attempt in range(MAX_ATTEMPTS):  # with other keys, where a limit has cut the reply
        keys = jax.random.key_data(jax.random.split(jax.random.key(attempt), len(remaining)))
        requests = [
            Request(PROMPT, np.asarray(key)[None], params, grammar=grammar)
            for key, (_, _, grammar) in zip(keys, remaining, strict=True)
        ]
        cut = []
        completions = engine.generate(weights(), requests)
        for each, (completion,) in zip(remaining, completions, strict=True):
            if completion.finish_reason == "length":
                cut.append(each)
                continue
            text = SERVED.tokenizer.decode(completion.tokens, skip_special_tokens=True)
            jsonschema.Draft202012Validator(each[1]).validate(json.loads(text))
        remaining = cut
    assert not remaining, [name for name, *_ in remaining]
