"""Plans as text and JSON: a device of 16 GiB, and programs whose parts are round numbers."""

import dataclasses
import json

import pytest
import tiny

from jaxrl_llm.config import RLConfig, RLTrainerConfig
from jaxrl_llm.planning import plan_report, pool_placement
from jaxrl_llm.planning.accelerators import GIB, Device
from jaxrl_llm.planning.compiled_memory import CompiledProgram
from jaxrl_llm.planning.memory_plan import Advice, MemoryPlan
from jaxrl_llm.planning.run_setting import DEVICE_PARTS, MemoryParts, RunSetting
from jaxrl_llm.sharding.mesh import AXES

DEVICE = Device("x1", 16 * GIB, 1e14, 1e12, 1e11, domain=8, network_bandwidth=1e10)
CONFIG = RLConfig(trainer=RLTrainerConfig(num_steps=10))


def setting(**sizes):
    return RunSetting(CONFIG, tiny.SHAPE, (), {**dict.fromkeys(AXES, 1), **sizes})


PROGRAMS = {
    "sample": MemoryParts(weights=4 * GIB, cache=8 * GIB, host=2 * GIB),
    "update_policy": MemoryParts(
        weights=4 * GIB, gradients=2 * GIB, optimizer=1 * GIB, logits=1 * GIB
    ),
}
PLAN = MemoryPlan(CONFIG, {("policy", "rollout"): setting(fsdp=4, tensor=2)}, DEVICE, PROGRAMS)
SHORT = dataclasses.replace(PLAN, programs={"sample": MemoryParts(weights=20 * GIB)})


def test_headline_of_a_plan_that_fits():
    assert plan_report.headline(PLAN) == (
        "8 x x1 (fsdp 4 x tensor 2): 12.0 of 16.0 GiB a device, fits, 4.0 GiB free"
    )


def test_headline_of_a_plan_that_does_not_fit():
    assert plan_report.headline(SHORT).endswith(
        "20.0 of 16.0 GiB a device, does not fit, 4.0 GiB short"
    )


def test_headline_of_several_pools():
    pools = {("policy",): setting(fsdp=4), ("rollout", "reward"): setting()}
    plan = dataclasses.replace(PLAN, pools=pools)
    assert plan_report.headline(plan).startswith(
        "5 x x1 (policy: fsdp 4; rollout+reward: one device): 12.0 of"
    )


def test_table_has_a_column_for_every_part():
    head, *rows = [line.split() for line in plan_report.memory_table(PLAN, {}).splitlines()]
    assert head == ["GiB", "a", "device", *DEVICE_PARTS, "host", "total"]
    # Memory of the host is no part of the total.
    assert rows[0] == ["sample", "4.00", *["0.00"] * 4, "8.00", "0.00", "2.00", "12.00"]
    assert rows[1][0] == "update_policy" and rows[1][-1] == "8.00"
    assert (
        len({len(line) for line in plan_report.memory_table(PLAN, {}).splitlines()}) == 1
    )  # aligned


def test_table_compares_with_the_compiler():
    compiled = {
        "sample": CompiledProgram(13 * GIB),
        "update_policy": CompiledProgram(problem="no compiler"),
    }
    lines = plan_report.memory_table(PLAN, compiled).splitlines()
    assert lines[0].endswith("compiler")
    assert lines[1].endswith("13.00") and lines[2].endswith("8.00  no compiler")


def bars(plan):
    """The bar of each program without its name and total."""
    lines = plan_report.bar_chart(plan).splitlines()[:-1]
    width = max(14, *(len(name) + 1 for name in plan.programs))
    return [line[width:].rsplit(maxsplit=1) for line in lines]


def test_bars_are_scaled_to_the_device():
    # 48 characters are 16 GiB, so that three are one GiB.
    (sample, sample_gib), (update, update_gib) = bars(PLAN)
    assert sample == "W" * 12 + "C" * 24 + " " * 12 + "|"
    assert update == "W" * 12 + "G" * 6 + "O" * 3 + "L" * 3 + " " * 24 + "|"
    assert (sample_gib, update_gib) == ("12.0", "8.0")


def test_bars_cross_the_limit_of_a_device_that_is_too_small():
    # 48 characters are the peak of 20 GiB; the device ends at 16/20 of them, rounded: 38.
    ((bar, _),) = bars(SHORT)
    assert bar == "W" * 38 + "|" + "W" * 10


def test_rounding_never_shifts_later_parts():
    """Each part ends where the sum of all parts so far does."""
    parts = MemoryParts(**{part: 0.16 * GIB for part in DEVICE_PARTS})  # half a character each
    plan = dataclasses.replace(PLAN, programs={"sample": parts})
    ((bar, _),) = bars(plan)
    assert len(bar.rstrip("| ")) == round(7 * 0.16 / 16 * 48)


def test_every_part_has_a_letter_of_its_own():
    legend = plan_report.bar_chart(PLAN).splitlines()[-1].split(";")[0]
    letters = [entry.split() for entry in legend.split(",")]
    assert [name for _, name in letters] == list(DEVICE_PARTS)
    assert len({letter for letter, _ in letters}) == len(DEVICE_PARTS)


def test_times_and_dollars():
    speed = pool_placement.step_speed(PLAN)
    lines = plan_report.time_table(PLAN, price=2.0).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == list(speed.phases)
    assert f"{speed.tokens_per_s_per_device:.0f} tokens/s/device" in lines[-2]
    # 10 steps on 8 devices at 2 dollars a device and hour.
    dollars = 10 * speed.step_s * 8 * 2.0 / 3600
    assert lines[-1] == f"10 steps: {dollars:,.0f} dollars at 2.0 a device and hour"
    assert plan_report.to_json(PLAN, Advice({}, PLAN), 2.0)["dollars"] == pytest.approx(dollars)
    assert len(plan_report.time_table(PLAN, price=0.0).splitlines()) == len(lines) - 1


def test_json_has_bytes_and_the_advice():
    advice = Advice({"model.remat": "full"}, PLAN)
    document = json.loads(json.dumps(plan_report.to_json(SHORT, advice, 0.0)))
    assert (document["peak_bytes"], document["room_bytes"]) == (20 * GIB, -4 * GIB)
    assert not document["fits"] and "dollars" not in document
    assert document["programs"]["sample"]["weights"] == 20 * GIB
    assert document["programs"]["sample"]["total"] == 20 * GIB
    assert document["advice"] == {
        "changes": {"model.remat": "full"},
        "device": "x1",
        "num_devices": 8,
        "peak_bytes": 12 * GIB,
    }
    assert document["pools"]["policy+rollout"]["fsdp"] == document["mesh"]["fsdp"] == 4


def test_json_has_no_speed_of_an_unknown_device():
    unknown = dataclasses.replace(PLAN, device=dataclasses.replace(DEVICE, flops=0.0))
    assert "speed" not in plan_report.to_json(unknown, Advice({}, unknown), 2.0)
    assert "speed" in plan_report.to_json(PLAN, Advice({}, PLAN), 0.0)


def test_charts_are_png_files_in_folders_that_exist(tmp_path):
    assert list(plan_report.chart_problems(str(tmp_path / "plan.png"))) == []
    (format_problem,) = plan_report.chart_problems(str(tmp_path / "plan.pdf"))
    assert format_problem[0] == "chart" and "must end in .png" in format_problem[1]
    (folder_problem,) = plan_report.chart_problems(str(tmp_path / "missing" / "plan.png"))
    assert "no such folder" in folder_problem[1]
