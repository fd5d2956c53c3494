"""Placements and times: what must hold whatever the figures."""

import dataclasses
import time

import pytest

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import memory_plan, plan_report, pool_placement, step_time
from jaxrl_llm.planning.accelerators import DEVICES
from jaxrl_llm.planning.compiled_memory import CompiledProgram
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import ScoringModel

VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 1},
    "model": {"compute_dtype": "bfloat16", "remat": "full"},
    "data": {"max_prompt_tokens": 1024},
    "rollout": {"max_response_tokens": 1024, "num_slots": 256},
    "trainer": {
        "prompts_per_step": 1024,
        "minibatch_size": 256,
        "max_tokens_per_microbatch": 4096,
    },
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
}


def plan(name="Llama-3.1-8B", device="v5p", count=16, **groups):
    values = {**VALUES, **{g: {**VALUES.get(g, {}), **v} for g, v in groups.items()}}
    shape = SHAPES[name]
    return memory_plan.make_plan(
        from_config_dict(values), shape, (ScoringModel(shape, "scalar"),), DEVICES[device], count
    )


def test_fifteen_groupings_each_role_in_one_group():
    found = list(pool_placement.groupings())
    assert len(found) == len({frozenset(map(frozenset, g)) for g in found}) == 15
    assert all(sorted(sum(grouping, ())) == sorted(pool_placement.ROLES) for grouping in found)


@pytest.mark.parametrize(
    "name, count",
    [("Llama-3.1-8B", 16), pytest.param("Llama-3.1-70B", 128, marks=pytest.mark.slow)],
)
def test_all_placements_are_ranked_and_what_fits_fits(name, count):
    made = plan(name, count=count)
    start = time.process_time()
    ranking = pool_placement.rank_placements(made.setting, made.device, made.num_devices)
    assert time.process_time() - start < 30
    assert len(ranking) == 15
    seconds = [one.step_s for one in ranking]
    assert seconds == sorted(seconds) and ranking[0].fits
    for one in ranking:
        assert all(pool.peak_bytes <= made.device.memory_bytes for pool in one.pools)
        assert not one.fits or sum(pool.setting.num_devices for pool in one.pools) == count
    assert pool_placement.ranking_table(ranking).count("devices idle") == sum(
        one.fits for one in ranking
    )


def test_models_that_a_run_does_not_have_are_not_placed():
    made = plan(algorithm={"recipe": "grpo", "samples_per_prompt": 4, "kl_in": "none"})
    setting = dataclasses.replace(made.setting, scorers=())
    assert [
        place.grouping
        for place in pool_placement.rank_placements(setting, made.device, made.num_devices)
    ] == [(("policy",),)]


def test_pools_take_as_many_devices_of_every_host():
    made = plan(count=16)
    for place in pool_placement.rank_placements(made.setting, made.device, 16, num_hosts=4):
        assert all(pool.setting.num_devices % 4 == 0 for pool in place.pools)


def test_too_little_memory_leaves_no_placement():
    made = plan("Llama-3.1-70B", device="v5e", count=8)
    ranking = pool_placement.rank_placements(made.setting, made.device, made.num_devices)
    assert not any(one.fits for one in ranking)
    assert "does not fit" in ranking[0].explanation()


def test_time_follows_the_work():
    made = plan()
    step = pool_placement.step_speed(made)
    faster = dataclasses.replace(
        made.device,
        flops=2 * made.device.flops,
        memory_bandwidth=2 * made.device.memory_bandwidth,
        link_bandwidth=2 * made.device.link_bandwidth,
    )
    halved = pool_placement.step_speed(dataclasses.replace(made, device=faster))
    assert halved.step_s == pytest.approx(step.step_s / 2)
    assert 0 < step.mfu < step_time.EFFICIENCY["flops"]
    kept = plan(model={"compute_dtype": "bfloat16", "remat": "none"})
    train = step_time.phase_costs(kept.setting, kept.device)["train"]
    assert train.flops == train.useful_flops
    assert step.phases["train"].flops == pytest.approx(train.flops * 4 / 3)


def test_every_scorer_takes_its_time():
    made = plan()
    (one,) = made.setting.scorers
    twice = dataclasses.replace(made.setting, scorers=(one, one))
    costs = [
        step_time.phase_costs(each, made.device)["score_reward"] for each in (made.setting, twice)
    ]
    assert costs[1].seconds == pytest.approx(2 * costs[0].seconds) and costs[0].seconds > 0
    assert costs[1].flops == 2 * costs[0].flops
    assert costs[1].num_devices == costs[0].num_devices


def test_reports_say_the_same():
    made = plan()
    found = plan_report.to_json(made, memory_plan.nearest_fit(made), 3.0)
    assert found["peak_bytes"] == max(p["total"] for p in found["programs"].values())
    assert found["dollars"] == pytest.approx(3.0 * 16 * 100 * found["speed"]["step_s"] / 3600)
    assert "MFU" in plan_report.time_table(made, 3.0) and "dollars" in plan_report.time_table(
        made, 3.0
    )
    assert plan_report.headline(made).startswith("16 x v5p (fsdp 16)")
    compiled = {"train": CompiledProgram(made.peak_bytes)}
    assert plan_report.memory_table(made, compiled).count("\n") == len(made.programs)
    assert plan_report.bar_chart(made).count("|") == len(made.programs) + 1


def test_the_chart_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plan_report.save_chart(plan(), str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
