"""`jaxrl_llm control`: what is no layout, and runs that cannot answer, are told at once."""

import json
import threading
import time

import pytest
import recipe_settings
from commands import call, refused

from jaxrl_llm.checkpoint.lock import exclusive_lock, is_held
from jaxrl_llm.config import layout_requests
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.workdir import SEAL_FILE, claim_workdir


@pytest.fixture
def workdir(tmp_path):
    values = recipe_settings.merged(recipe_settings.SUMS, {"trainer": {"num_steps": 7}})
    claim_workdir(from_config_dict(values), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mesh.fsdp={", "mesh.fsdp: '{' is not a value (expected the node content"),
        (
            "mesh.fsdp=!!python/object:os.system",
            "is not a value (could not determine a constructor",
        ),
        ("mesh.fsdp=!!bool", "mesh.fsdp: '!!bool' is not a value"),
        ("mesh.fsdp=!!timestamp", "mesh.fsdp: '!!timestamp' is not a value"),
        ("mesh.fsdp=!x", "mesh.fsdp: '!x' is not a value"),
        ("mesh.fsdp=*a", "mesh.fsdp: '*a' is not a value"),
        ("mesh.fsdp=", "mesh.fsdp: '' is not a single value; write a number or a name"),
        ("mesh.fsdp=&a", "mesh.fsdp: '&a' is not a single value"),
        ("mesh.fsdp=null", "mesh.fsdp: 'null' is not a single value"),
        ("mesh.fsdp=[1]", "mesh.fsdp: '[1]' is not a single value; write a number or a name"),
        ("mesh.fsdp={a:1}", "mesh.fsdp: '{a:1}' is not a single value"),
        ("mesh.fsdp=" + "[" * 4000, "is not a value"),
        ("mesh.fsdp=" + "9" * 4000, "config.mesh.fsdp"),
        ("mesh.fsdp=\x01", "is not a value"),
        ("mesh.fsdp=1:30", "config.mesh.fsdp: expected int, got '1:30'"),  # 90 in YAML 1.1
        ("mesh.fsdp=true", "config.mesh.fsdp: expected int, got True"),
        ("mesh.fsdp=0x2", "config.mesh.fsdp: expected int, got '0x2'"),
        ("placement.choice={", "placement.choice: '{' is not a value"),
        ("{", "'{' is not KEY=VALUE"),
    ],
)
def test_malformed_layout_gets_a_message(capsys, workdir, text, said):
    with exclusive_lock(workdir):
        assert said in refused(capsys, "control", f"--workdir={workdir}", "--wait_s=1", text)
    assert layout_requests.pending_request(workdir) is None


def test_a_run_that_is_not_running_is_told_at_once(capsys, workdir):
    begin = time.monotonic()
    message = refused(capsys, "control", f"--workdir={workdir}", "mesh.fsdp=1")
    assert "no process is at work on this run, which has saved 0 of 7 steps; start it" in message
    (workdir / "checkpoints" / "6").mkdir(parents=True)  # empty: nothing is saved
    (workdir / "lock").write_text("process 1 on a machine")  # of one that was killed
    message = refused(capsys, "control", f"--workdir={workdir}", "mesh.fsdp=1")
    assert "has saved 0 of 7 steps" in message
    (workdir / "checkpoints" / "7").mkdir()
    (workdir / "checkpoints" / "7" / SEAL_FILE).write_text("{}")
    message = refused(capsys, "control", f"--workdir={workdir}", "mesh.fsdp=1")
    assert "this run has ended, all 7 steps are done" in message
    assert time.monotonic() - begin < 10 and layout_requests.pending_request(workdir) is None


def test_a_run_that_ends_before_it_answers(capsys, workdir):
    may_end = threading.Event()

    def hold():
        with exclusive_lock(workdir):
            may_end.wait(30)

    run = threading.Thread(target=hold)
    run.start()
    while not is_held(workdir):
        time.sleep(0.01)
    asked = f"--workdir={workdir}", "mesh.fsdp=1", "--wait_s=0.1"
    code, out, _ = call(capsys, "control", *asked)
    assert code == 0 and "asked; the run looks at it before its next step" in out
    threading.Timer(0.5, may_end.set).start()
    message = refused(capsys, "control", f"--workdir={workdir}", "mesh.fsdp=1")
    run.join()
    assert "it ended before it answered" in message
    assert (
        layout_requests.pending_request(workdir) is None
    )  # a later run does not do what nobody waits for


def test_answer_to_a_request_is_printed(capsys, workdir):
    # A kill cut a line off, and one is no answer at all.
    (workdir / "layouts.jsonl").write_text('7\n{"step": 1, "layo')

    def answer():
        with exclusive_lock(workdir):
            while layout_requests.pending_request(workdir) is None:
                time.sleep(0.01)
            layout_requests.answer_request(workdir, 3, layout_requests.pending_request(workdir), "")

    run = threading.Thread(target=answer)
    run.start()
    while not is_held(workdir):
        time.sleep(0.01)
    code, out, _ = call(capsys, "control", f"--workdir={workdir}", "mesh.fsdp=1")
    run.join()
    assert code == 0 and "from step 3 on: mesh.fsdp=1" in out
    assert layout_requests.read_answers(workdir) == [
        {"step": 3, "layout": "mesh.fsdp=1", "refused": ""}
    ]


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "7", "\0", '{"job": 7}', '"\\ud800"'])
def test_a_config_that_is_none_is_a_message(capsys, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert "config" in refused(capsys, "control", f"--workdir={tmp_path}", "mesh.fsdp=1")


def test_a_request_that_is_none_is_no_request(workdir):
    for text in ("[" * 100_000, "{", "[]", "7", '{"layout"', json.dumps({"a": 1})):
        (workdir / "control.json").write_text(text)
        assert layout_requests.pending_request(workdir) is None
