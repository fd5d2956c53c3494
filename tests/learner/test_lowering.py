"""The programs that a planner lowers are those that the loop runs."""

import jax
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.learner import lowering, planned, sampler, weights
from jaxrl_llm.learner import models as models_lib

VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 2},
    "data": {"max_prompt_tokens": 16},
    "rollout": {"max_response_tokens": 16, "num_slots": 8},
    "trainer": {
        "prompts_per_step": 8,
        "minibatch_size": 8,
        "max_tokens_per_microbatch": 64,
    },
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
    "mesh": {"fsdp": 4, "tensor": 2},
}


@pytest.fixture(scope="module")
def config():
    return from_config_dict(VALUES)


@pytest.fixture(scope="module")
def real(config):
    return models_lib.of_job(config)


@pytest.fixture(scope="module")
def abstract(config, real):
    return lowering.abstract_models(config, real.policy.shape, jax.devices())


def described(tree):
    return jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding.spec), tree)


def test_the_abstract_state_is_the_first_state(config, real, abstract):
    state = weights.initial_state(config, real, weights.initial_policy(config, real))
    assert described(lowering.abstract_state(config, abstract)) == described(state)
    params = sampler.build(config, real, {}).weights(state.policy.params)
    resharder = sampler.build(config, abstract, {}).resharder
    assert described(resharder.abstract()) == described(params)


PROGRAMS = {"prefill", "decode", "score", "score_critic", "train", "reshard", "reshard_layer"}


def test_every_program_lowers_and_the_update_consumes_its_state(config, abstract):
    programs = lowering.lowered(config, abstract)
    assert set(programs) == PROGRAMS
    made = {name: lower() for name, lower in programs.items()}
    compiled = made["train"].compile().memory_analysis()
    held = sum(
        int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize
        for a in jax.tree.leaves(lowering.abstract_state(config, abstract))
    )
    assert compiled.alias_size_in_bytes >= 0.9 * held


def test_no_critic_no_program_for_it(abstract):
    grpo = from_config_dict({**VALUES, "algorithm": {"recipe": "grpo", "samples_per_prompt": 2}})
    without = lowering.abstract_models(grpo, abstract.policy.shape, jax.devices())
    assert set(lowering.lowered(grpo, without)) == PROGRAMS - {"score_critic"}


def test_programs_of_several_pools_are_not_compiled():
    apart = from_config_dict(VALUES | {"placement": {"choice": "split"}, "mesh": {"fsdp": -1}})
    plan = planned.plan(apart, planned.elsewhere("v5e:2x4", "", 0))
    with pytest.raises(ConfigError, match=r"programs of several pools.*placement.choice=colocate"):
        lowering.compiled_bytes(plan, "v5e:2x4")
