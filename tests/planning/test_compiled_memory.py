"""The programs that a planner lowers are those that the loop runs."""

import jax
import numpy as np
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.learner import job_models, weights
from jaxrl_llm.planning import compiled_memory, resolve_sizes
from jaxrl_llm.sampling import policy_sampler

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
    return job_models.make_models(config)


@pytest.fixture(scope="module")
def abstract(config, real):
    return compiled_memory.abstract_models(config, real.policy.shape, jax.devices())


def described(tree):
    return jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding.spec), tree)


def test_the_abstract_state_is_the_first_state(config, real, abstract):
    state = weights.initial_state(config, real, weights.initial_policy(config, real))
    assert described(compiled_memory.abstract_state(config, abstract)) == described(state)
    params = policy_sampler.make_sampler(config, real, {}).weights(state.policy.params)
    resharder = policy_sampler.make_sampler(config, abstract, {}).resharder
    assert described(resharder.abstract()) == described(params)


PROGRAMS = {"prefill", "decode", "score", "score_critic", "train", "reshard", "reshard_layer"}


def test_every_program_lowers_and_the_update_consumes_its_state(config, abstract):
    programs = compiled_memory.program_lowerings(config, abstract)
    assert set(programs) == PROGRAMS
    made = {name: lower() for name, lower in programs.items()}
    compiled = made["train"].compile().memory_analysis()
    held = sum(
        int(np.prod(a.sharding.shard_shape(a.shape))) * a.dtype.itemsize
        for a in jax.tree.leaves(compiled_memory.abstract_state(config, abstract))
    )
    assert compiled.alias_size_in_bytes >= 0.9 * held


def test_no_critic_no_program_for_it(abstract):
    grpo = from_config_dict({**VALUES, "algorithm": {"recipe": "grpo", "samples_per_prompt": 2}})
    without = compiled_memory.abstract_models(grpo, abstract.policy.shape, jax.devices())
    assert set(compiled_memory.program_lowerings(grpo, without)) == PROGRAMS - {"score_critic"}


def test_programs_of_several_pools_are_not_compiled():
    apart = from_config_dict(VALUES | {"placement": {"choice": "split"}, "mesh": {"fsdp": -1}})
    plan = resolve_sizes.make_plan(apart, resolve_sizes.topology_target("v5e:2x4", "", 0))
    with pytest.raises(ConfigError, match=r"programs of several pools.*placement.choice=colocate"):
        compiled_memory.compiled_programs(plan, "v5e:2x4")
