"""The supervisor of a job: real processes that end in all ways, and what it makes of each."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_llm.processes import job_supervisor, progress
from jaxrl_llm.processes.job_supervisor import JobSupervisor, Limits

# A job: its start number is in the file `starts`; `ends` says how each start ends.
JOB = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
process = os.environ.get("JAX_PROCESS_ID", "0")
starts = folder / f"starts{process}"
start = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (start + 1))
report = pathlib.Path(os.environ["JAXRL_LLM_PROGRESS"])
ends = sys.argv[2 + int(process)].split(",")
step, end = ends[min(start, len(ends) - 1)].split(":")
report.write_text(step)
if end == "hang":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
    (folder / "hanging").touch()
    time.sleep(60)
elif end == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
elif int(end) < 0:
    os.kill(os.getpid(), -int(end))
sys.exit(int(end))
"""
LIMITS = Limits(failures=2, pause_s=0.01, hang_s=1.5)


@pytest.fixture
def job(tmp_path):
    """Runs a job whose processes end as told: STEP:CODE for each start, the last one again."""

    def run(*ends, limits=LIMITS):
        command = [sys.executable, "-c", JOB, str(tmp_path), *ends]
        return JobSupervisor(command, len(ends), limits).run()

    run.starts = lambda process=0: len((tmp_path / f"starts{process}").read_text())
    run.folder = tmp_path
    return run


@pytest.mark.parametrize("code", [0, 1, 3, 75])
def test_a_final_end_is_not_repeated(job, code):
    assert job(f"4:{code}") == code and job.starts() == 1


def test_failures_are_survived_while_there_is_progress(job, capfd):
    assert job("1:-9,2:70,3:-11,4:70,5:137,6:0") == 0
    assert job.starts() == 6
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("jaxrl_llm run: the process ended with signal SIGKILL (failure 1)")
    assert "exit code 70 (failure 2)" in said[1] and len(said) == 5


def test_failures_without_progress_end_it(job, capfd):
    assert job("3:-9,5:70,5:-9,5:70") == 70
    assert job.starts() == 4  # the second made progress; two more are allowed
    said = capfd.readouterr().err
    assert "given up after 3 failures without a finished step" in said
    assert "starting again in 0.02 s" in said  # pauses double


def test_all_processes_start_again_when_one_fails(job, capfd):
    assert job("1:hang,2:0", "1:-9,2:0") == 0
    assert job.starts(0) == job.starts(1) == 2
    assert "process 1 ended with signal SIGKILL" in capfd.readouterr().err


def test_a_fault_of_the_user_wins_over_what_it_does_to_the_others(job):
    assert job("1:70", "1:1") == 1 and job.starts() == 1


@pytest.mark.parametrize("end", ["hang", "stop"])
def test_a_stuck_process_is_killed(job, end, capfd):
    assert job(f"1:{end},2:0") == 0 and job.starts() == 2
    assert "no progress for 1.5 s" in capfd.readouterr().err


def test_a_signal_is_passed_on_and_its_end_is_the_end(job):
    def send():
        while not (job.folder / "hanging").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    assert job("1:hang", limits=Limits(hang_s=30)) == 75 and job.starts() == 1


def test_a_signal_in_a_pause_ends_it(job):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert job("1:-9", limits=Limits(pause_s=20.0)) == 75 and job.starts() == 1


def test_no_process_outlives_a_killed_supervisor(tmp_path):
    program = (
        "import sys; from jaxrl_llm.processes.job_supervisor import JobSupervisor;"
        f"JobSupervisor([sys.executable, '-c', {JOB!r}, {str(tmp_path)!r}, '1:hang']).run()"
    )
    outer = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not (tmp_path / "hanging").exists():
            assert outer.poll() is None
            time.sleep(0.01)
        children = pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        assert len(children) == 1
    finally:
        outer.kill()
        outer.wait()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{children[0]}/fd/0"):  # a zombie has none
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_progress_is_read_as_it_was_reported(tmp_path, monkeypatch):
    progress.report(3)  # nobody listens
    assert progress.read(tmp_path / "none") == (0, 0.0)
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "report"))
    progress.report(12)
    step, when = progress.read(tmp_path / "report")
    assert step == 12 and abs(when - time.time()) < 10


def test_processes_of_one_host_meet_at_one_address():
    first, second = job_supervisor._environments(2)
    assert first["JAX_COORDINATOR_ADDRESS"] == second["JAX_COORDINATOR_ADDRESS"]
    assert (first["JAX_PROCESS_ID"], second["JAX_PROCESS_ID"]) == ("0", "1")
    assert job_supervisor._environments(1) == [{}]
