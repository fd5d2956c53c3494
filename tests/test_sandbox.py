"""What a program that nobody has read can do: compute, and little else."""

import os
import pathlib
import socket
import time

import pytest

from jaxrl_llm import sandbox
from jaxrl_llm.sandbox import Limits, run_python

LIMITS = Limits(wall_s=8.0, cpu_s=1.0, memory_gib=0.5, file_bytes=1 << 16, output_bytes=1000)


def test_a_program_reads_and_answers():
    ended = run_python("print(int(input()) ** 2)", "12\n", LIMITS)
    assert (ended.output, ended.errors, ended.succeeded) == ("144\n", "", True)


def test_its_end_is_told():
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
    sleeping = run_python("import time; time.sleep(60)", "", Limits(wall_s=0.5))
    assert sleeping.failure == "more than 0.5 s" and time.monotonic() - begin < 5


def test_output_is_bounded():
    ended = run_python("print('x' * 10**7)", "", LIMITS)
    assert ended.output == "x" * 1000 and ended.succeeded


def test_what_it_started_does_not_outlive_it():
    program = "import subprocess; print(subprocess.Popen(['sleep', '77.25']).pid)"
    begin = time.monotonic()
    assert run_python(program, "", LIMITS).succeeded and time.monotonic() - begin < 5
    running = []  # a process that has ended and was not reaped has an empty line
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            running.append(path.read_bytes())
        except OSError:
            continue
    assert not [line for line in running if b"77.25" in line]


def test_it_cannot_read_the_run_s_environment(monkeypatch):
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


def test_it_starts_in_an_empty_folder_that_goes_with_it():
    ended = run_python("import os; print(os.getcwd(), sorted(os.listdir()))", "", LIMITS)
    folder, _, listed = ended.output.strip().partition(" ")
    assert listed == "['main.py', 'proc']" and not pathlib.Path(folder).exists()


def test_means_that_are_not_in_force_are_said(monkeypatch):
    monkeypatch.setattr(sandbox, "protections", lambda: sandbox.Protections("python", "own"))
    ended = run_python("import socket; socket.socket()", "", LIMITS)
    assert "no network in the sandbox" in ended.errors
    assert str(sandbox.protections()) == "network off by python, files as own"
