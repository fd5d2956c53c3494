"""The files of a run become curves and samples, while they are written too."""

import json
import math

import made_runs
import pytest
from rich.console import Console

from jaxrl_llm.viewer import curve_plot, terminal
from jaxrl_llm.viewer.runs import NotARunError, RecordedRun, SampleFilter, default_curves


@pytest.fixture
def folder(tmp_path):
    return made_runs.make(tmp_path / "run", 40, 6, dumps=[1, 20, 40])


def test_curves_and_alerts(folder):
    run = RecordedRun(folder)
    assert run.curve("critic/score/mean")[0] == list(range(1, 41)) and run.last_step == 40
    assert run.curve("actor/ppo_kl")[1][6] is None and run.curve("unknown") == ([], [])
    assert run.alerts() == [{"alert": "kl", "first": 30, "last": 31, "steps": 2}]
    assert run.memory()["perf/planned_memory_gb"] == 2.0
    titles = [title for title, _ in default_curves([run])]
    assert titles[:2] == ["reward", "KL to the start of the step"] and "entropy" in titles


def test_each_run_has_its_own_kl_to_the_reference(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "data": {"actor/kl_loss": 0.1}}\n')
    names = [name for _, name in default_curves([RecordedRun(folder), RecordedRun(other)])]
    assert {"actor/reward_kl_penalty", "actor/kl_loss"} <= set(names)
    assert len(names) == len(set(names))


def test_a_long_curve_keeps_its_extremes(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": s, "data": {"a": 100.0 if s == 777 else math.sin(s)}}) + "\n"
            for s in range(1000)
        )
    )
    steps, values = RecordedRun(tmp_path).curve("a", max_points=50)
    assert len(steps) <= 50 and steps == sorted(steps)
    assert max(values) == 100.0 and steps[values.index(100.0)] == 777


def test_a_running_run_grows_and_a_resumed_one_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"a": 1}}\n{"step": 2, "da')
    run = RecordedRun(tmp_path)
    assert run.curve("a") == ([1], [1.0])
    with path.open("a") as file:
        file.write('ta": {"a": 2}}\nno record\n')
    run.refresh()
    assert run.curve("a") == ([1, 2], [1.0, 2.0])
    path.unlink()
    path.write_text('{"step": 1, "data": {"a": 5}}\n' * 4)
    run.refresh()
    assert run.curve("a")[1] == [5.0] * 4
    path.unlink()
    run.refresh()
    assert run.curve("a") == ([], [])


@pytest.mark.parametrize(
    "wanted, rows",
    [
        (SampleFilter(), [0, 1, 2, 3, 4, 5]),
        (SampleFilter(text="ADD THE"), [1, 4]),
        (SampleFilter(text="<b>3</b>"), [3]),
        (SampleFilter(max_score=0.5), [2, 5]),
        (SampleFilter(min_score=0.5, data_source="sums"), [1, 3]),
        (SampleFilter(stopped="no"), [0, 5]),
        (SampleFilter(order="score"), [2, 5, 0, 1, 3, 4]),
        (SampleFilter(order="-score"), [4, 3, 1, 0, 5, 2]),
    ],
)
def test_filters(folder, wanted, rows):
    found = RecordedRun(folder).search(20, wanted)
    assert [sample["row"] for sample in found["samples"]] == rows and found["total"] == len(rows)
    assert found["data_sources"] == ["stories", "sums"]


def test_samples_of_all_steps_and_of_none(folder):
    run = RecordedRun(folder)
    assert run.dumped_steps() == [1, 20, 40] and run.read_sample(40, 2)["advantages"] == [-1.0] * 4
    found = run.search(None, SampleFilter(max_score=0.0), count=3)
    assert [(each["step"], each["row"]) for each in found["samples"]] == [(40, 2), (40, 5), (20, 2)]
    assert run.search(3, SampleFilter())["samples"] == [] and run.read_sample(40, 99) == {}
    (folder / "rollouts" / "20.jsonl").write_text('{"score": null}\nhalf a li')
    assert run.search(20, SampleFilter())["total"] == 1
    assert run.search(20, SampleFilter(min_score=0))["total"] == 0


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(NotARunError, match=r"not a run folder, it has no metrics\.jsonl"):
        RecordedRun(tmp_path)


def test_the_terminal_and_the_picture_show_the_same(folder, tmp_path):
    console = Console(record=True, width=110, file=open("/dev/null", "w"))  # noqa: SIM115
    terminal.print_runs([RecordedRun(folder)], console)
    said = console.export_text()
    assert "reward" in said and "█" in said and "alert kl in 2 steps, from 30 to 31" in said
    assert "step 40, score 1.0" in said and "<b>0</b>" in said
    curve_plot.save_curves([RecordedRun(folder)], str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
