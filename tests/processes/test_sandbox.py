"""What a program that nobody has read can do: compute, and little else."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from jaxrl_llm.processes import sandbox
from jaxrl_llm.processes.sandbox import SandboxLimits, run_python

ROOT = pathlib.Path(__file__).parents[2]
LIMITS = SandboxLimits(
    wall_s=60.0, cpu_s=1.0, memory_gib=0.5, file_bytes=1 << 16, output_bytes=1000
)


def test_a_program_reads_and_answers():
    ended = run_python("print(int(input()) ** 2)", "12\n", LIMITS)
    assert (ended.output, ended.errors, ended.succeeded) == ("144\n", "", True)


def test_exit_status_is_reported():
    ended = run_python("import sys; print('half'); sys.exit(3)", "", LIMITS)
    assert (ended.output, ended.exit_code, ended.succeeded) == ("half\n", 3, False)
    assert "ZeroDivisionError" in run_python("1 / 0", "", LIMITS).errors


@pytest.mark.parametrize(
    "program, said",
    [
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("open('f', 'wb').write(b'x' * (1 << 20))", "File too large"),
        ("[open('/dev/null') for _ in range(100)]", "Too many open files"),
    ],
)
def test_memory_and_files_are_bounded(program, said):
    ended = run_python(program, "", LIMITS)
    assert said in ended.errors and not ended.succeeded


def test_time_is_bounded():
    assert "s of processor time" in run_python("while True: pass", "", LIMITS).failure
    begin = time.monotonic()
    sleeping = run_python("import time; time.sleep(200)", "", SandboxLimits(wall_s=0.5))
    assert sleeping.failure == "more than 0.5 s" and time.monotonic() - begin < 20


def test_output_is_bounded():
    ended = run_python("print('x' * 10**7)", "", LIMITS)
    assert ended.output == "x" * 1000 and ended.succeeded


def is_running(word: bytes) -> bool:
    """Returns whether the command line of a process holds `word`."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:  # a process that has ended and was not reaped has an empty line
            if word in path.read_bytes():
                return True
        except OSError:
            continue
    return False


def test_child_processes_do_not_outlive_it():
    program = "import subprocess; print(subprocess.Popen(['sleep', '77.25']).pid)"
    begin = time.monotonic()
    assert run_python(program, "", LIMITS).succeeded and time.monotonic() - begin < 20
    assert not is_running(b"77.25")


needs_namespaces = pytest.mark.skipif(
    sandbox.protections().network != "namespace", reason="namespaces are not permitted here"
)


@needs_namespaces
@pytest.mark.parametrize("then", ["pass", "time.sleep(60)", "import ctypes; ctypes.string_at(0)"])
def test_processes_that_leave_its_group_do_not_outlive_it(then):
    program = (
        "import os, subprocess, time\n"
        "for _ in range(2):\n"
        "    subprocess.Popen(['sleep', '78.25'], start_new_session=True)\n"
        f"{then}\n"
    )
    ended = run_python(program, "", SandboxLimits(wall_s=3.0))
    assert ended.errors == "" and ended.succeeded == (then == "pass")
    assert not is_running(b"78.25")


@needs_namespaces
def test_other_processes_are_invisible():
    """It could end the run and other programs of its user otherwise."""
    with subprocess.Popen(["sleep", "79.25"]) as other:
        program = f"import os; os.getpid() == 1 and os.kill({other.pid}, 9)"
        assert "ProcessLookupError" in run_python(program, "", LIMITS).errors
        assert other.poll() is None
        other.kill()


@needs_namespaces
def test_sandbox_ends_with_its_caller():
    caller = (
        "from jaxrl_llm.processes.sandbox import *\n"
        "run_python('import time; print(80.25); time.sleep(60)', '', SandboxLimits(wall_s=60))"
    )
    with subprocess.Popen([sys.executable, "-c", caller], cwd=ROOT) as process:
        wait_for(lambda: is_running(b"main.py"))
        process.kill()
    wait_for(lambda: not is_running(b"main.py"))


def wait_for(condition) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_environment_of_the_run_is_unreadable(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-run")
    program = (
        "import os, pathlib\n"
        "print(sorted(os.environ))\n"
        "for pid in (os.getppid(), " + str(os.getpid()) + "):\n"
        "    try:\n"
        "        print(pathlib.Path(f'/proc/{pid}/environ').read_text())\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
    )
    ended = run_python(program, "", LIMITS)
    assert ended.succeeded and "WANDB" not in ended.output
    if sandbox.protections().network == "namespace":
        assert "secret-of-the-run" not in ended.output
        assert ended.output.count("NotFoundError") == 2


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        address = server.getsockname()
        ended = run_python(f"import socket; socket.create_connection({address})", "", LIMITS)
        assert not ended.succeeded
        assert (
            "refused" in ended.errors
            or "unreachable" in ended.errors
            or "Permission" in ended.errors
        )
        with pytest.raises(TimeoutError):
            server.accept()


def test_sandbox_has_an_empty_temporary_folder():
    ended = run_python("import os; print(os.getcwd(), sorted(os.listdir()))", "", LIMITS)
    folder, _, listed = ended.output.strip().partition(" ")
    assert listed == "['main.py', 'proc']" and not pathlib.Path(folder).exists()


def test_missing_protections_are_reported(monkeypatch):
    monkeypatch.setattr(sandbox, "protections", lambda: sandbox.Protections("python", "own"))
    ended = run_python("import socket; socket.socket()", "", LIMITS)
    assert "no network in the sandbox" in ended.errors
    assert str(sandbox.protections()) == "network off by python, files as own"
