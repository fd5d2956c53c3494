"""Plans of runs whose roles have pools of their own, and of what rests in the host's memory."""

import dataclasses

import pytest

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.planning import memory, memory_plan, plan_report, pool_placement
from jaxrl_llm.planning.accelerators import DEVICES
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import ScoringModel

VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 1},
    "model": {"compute_dtype": "bfloat16", "remat": "full"},
    "data": {"max_prompt_tokens": 512},
    "rollout": {"max_response_tokens": 512, "num_slots": 64},
    "trainer": {"prompts_per_step": 256, "minibatch_size": 128, "max_tokens_per_microbatch": 2048},
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
}
SHAPE = SHAPES["Llama-3.1-8B"]


def plan(**groups) -> memory_plan.MemoryPlan:
    config = from_config_dict(VALUES | groups)
    return memory_plan.make_plan(
        config, SHAPE, (ScoringModel(SHAPE, "scalar"),), DEVICES["v5p"], 16
    )


def test_resident_memory_is_the_sum_over_roles():
    setting = plan().setting
    each = [memory.resident_memory(setting, (role,)).total for role in ROLES]
    assert memory.resident_memory(setting).total == pytest.approx(sum(each))
    assert all(each)


def test_old_weights_that_go_on_sampling_are_counted():
    """By "drain", and where the copy of the new ones arrives in a pool of its own."""

    def weights(choice, **trainer):
        apart = {
            "choice": "by_hand",
            "pools": {"learn": {"devices": 8}, "sample": {"devices": 8}},
            "roles": {**dict.fromkeys(ROLES, "learn"), "rollout": "sample"},
        }
        placed = apart if choice == "apart" else {"choice": choice}
        made = plan(placement=placed, trainer=VALUES["trainer"] | trainer)
        return {n.partition(" ")[0]: p.weights for n, p in made.programs.items()}["decode"]

    copy = plan().setting.rollout_bytes
    ahead = {"sampling": "async"}
    assert weights("colocate", **ahead) == weights("colocate")
    assert weights("colocate", **ahead, new_weights="drain") == weights("colocate") + copy
    assert weights("apart", **ahead) == 2 * weights("apart")
    assert weights("apart", **ahead, max_staleness=0) == weights("apart")


@pytest.mark.parametrize("choice, num_pools", [("split", 2), ("hybrid", 2)])
def test_every_role_is_planned_where_it_lives(choice, num_pools):
    made = plan(placement={"choice": choice})
    assert len(made.pools) == num_pools and made.num_devices == 16
    assert sorted(role for roles in made.pools for role in roles) == sorted(ROLES)
    assert all(setting.num_devices == 16 // num_pools for setting in made.pools.values())
    trained = [name for name in made.programs if name.startswith("train")]
    assert len(trained) == 2  # policy and critic, each by a program of its own
    assert all(parts.total > 0 for parts in made.programs.values())
    assert "; " in plan_report.headline(made) and "critic" in plan_report.memory_table(made, {})


def test_a_pool_of_every_role_is_a_colocated_run():
    by_hand = {
        "choice": "by_hand",
        "pools": {"all": {"devices": -1}},
        "roles": dict.fromkeys(ROLES, "all"),
    }
    assert plan(placement=by_hand).programs == plan().programs
    assert (
        pool_placement.step_speed(plan(placement=by_hand)).step_s
        == pool_placement.step_speed(plan()).step_s
    )


def test_pools_work_at_the_same_time():
    """A step is as long as its slowest pools, so shorter than all phases after each other."""
    speed = pool_placement.step_speed(plan(placement={"choice": "split"}))
    assert speed.step_s < sum(cost.seconds for cost in speed.phases.values())
    assert 0 < speed.mfu < 1


def test_offloaded_state_is_on_the_device_in_use():
    usual = plan().programs
    resting = plan(mesh={"on_host": ("optimizer", "reference")}).programs
    reference = usual["train"].total - resting["train"].total
    assert reference == pytest.approx(4 * 8.03e9 / 16, rel=0.01)  # float32 weights
    assert resting["train"].optimizer == usual["train"].optimizer
    assert resting["decode"].optimizer == 0
    assert resting["score"].weights == usual["score"].weights
    moved = resting["decode"].host
    assert usual["decode"].total - resting["decode"].total == pytest.approx(moved)


def test_a_placement_is_told_to_a_run_by_hand():
    setting = plan().setting
    apart = next(
        place
        for place in pool_placement.rank_placements(setting, DEVICES["v5p"], 16)
        if place.fits and len(place.grouping) == 3
    )
    config = dataclasses.replace(setting.config, placement=apart.config())
    made = memory_plan.make_plan(
        config, SHAPE, (ScoringModel(SHAPE, "scalar"),), DEVICES["v5p"], 16
    )
    assert not list(config.placement.problems())
    assert made.peak_bytes == max(pool.peak_bytes for pool in apart.pools)
    assert pool_placement.step_speed(made).step_s == pytest.approx(apart.step_s)
