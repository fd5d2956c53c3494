"""Traces become a picture of which device did what; the real ones are read by multihost tests."""

import types

import pytest
from jax import profiler

from jaxrl_llm.commands import view
from jaxrl_llm.commands.options import ViewOptions
from jaxrl_llm.viewer import timeline
from jaxrl_llm.viewer.timeline import NoTraceError, ProgramRun


def event(name, begin, end, **stats):
    return types.SimpleNamespace(
        name=name, start_ns=begin * 1e9, end_ns=end * 1e9, stats=list(stats.items())
    )


def profile(**planes):
    made = [
        types.SimpleNamespace(name=name, lines=[types.SimpleNamespace(name=n, events=e)])
        for name, (n, e) in planes.items()
    ]
    return types.SimpleNamespace(planes=made)


def operation(program, device, run, begin, end):
    of = {"hlo_module": program, "device_ordinal": device, "run_id": run}
    return event("fusion", begin, end, **of)


# As a CPU records, by operations; and as a TPU does, by programs.
CPU = {
    "/host:CPU": (
        "python",
        [
            operation("jit_generate", 1, 7, 1.0, 2.0),
            operation("jit_generate", 1, 7, 2.5, 3.0),
            operation("jit_generate", 1, 8, 3.0, 5.0),
            operation("jit_update", 0, 9, 3.0, 4.0),
            event("reshard", 4.0, 4.5),
            event("gen", 1.0, 3.0),
        ],
    )
}
TPU = {
    "/device:TPU:3": ("XLA Modules", [event("jit_update(18)", 2.0, 3.0)]),
    "/host:CPU": ("python", [event("reshard", 3.0, 3.5)]),
}


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A run of two processes, whose traces are these."""
    (tmp_path / "metrics.jsonl").touch()
    found = {}
    for process, planes in enumerate((CPU, TPU)):
        folder = tmp_path / f"profile/process_{process}/plugins"
        folder.mkdir(parents=True)
        (folder / "host.xplane.pb").write_bytes(b"%d" % process)
        found[b"%d" % process] = profile(**planes)
    read = types.SimpleNamespace(from_serialized_xspace=found.__getitem__)
    monkeypatch.setattr(profiler, "ProfileData", read)
    return tmp_path


def test_a_trace_is_read(workdir):
    first, second = timeline.read_traces(workdir)
    assert list(first.program_runs) == [
        ProgramRun("jit_generate", 1, 1.0, 3.0),
        ProgramRun("jit_generate", 1, 3.0, 5.0),
        ProgramRun("jit_update", 0, 3.0, 4.0),
    ]
    assert list(second.program_runs) == [ProgramRun("jit_update", 3, 2.0, 3.0)]
    assert (first.reshard_times_s, second.reshard_times_s) == ([4.5], [3.5])


def test_the_picture_says_who_was_at_work_and_how_long(workdir):
    path = workdir / "time.svg"
    view.main(ViewOptions(workdir=(str(workdir),), timeline=str(path)))
    text = path.read_text()
    # Matplotlib writes each text of a picture as a comment beside its shapes.
    for said in (
        "process 0, device 0, 25% at work",
        "process 0, device 1, 100% at work",
        "process 1, device 0, 25% at work",
        "sample",
        "learn",
    ):
        assert f"<!-- {said} -->" in text, said
    assert "<!-- score -->" not in text
    assert "#4477aa" in text and "#228833" in text


def test_timelines_that_cannot_be_drawn_are_refused(tmp_path, workdir):
    (tmp_path / "other").mkdir()
    with pytest.raises(NoTraceError, match=r"no trace of this run; record one with --config\.prof"):
        timeline.save_timeline(tmp_path / "other", "x.png")
    said = [
        text for _, text in ViewOptions(workdir=("a", "b"), timeline="x.gif", text=True).rules()
    ]
    assert said[0] == "'x.gif' must end in .png or .svg"
    assert said[1] == "is of one run, got 2 folders; give one"
    assert said[2] == "give it or --text, not both"
