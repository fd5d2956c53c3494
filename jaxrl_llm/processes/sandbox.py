"""Runs untrusted programs, such as those that a policy writes, in a process with few rights.

It has limits on time, memory, files and processes, an empty folder of its own, and none of the
run's environment. Where the system permits it, it has no network and runs as nobody; `protections`
tells. Only a virtual machine protects against a flaw of the kernel.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import pathlib
import resource
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jaxrl_llm.processes import supervisor
from jaxrl_llm.processes.supervisor import PR_SET_PDEATHSIG, libc

_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
_CLONE_NEWNS, _CLONE_NEWPID = 0x00020000, 0x20000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _NUM_CAPABILITIES = 38, 24, 41
_NOBODY = 65534
_NUM_FILES = 64
_END_S = 2.0  # for what a program has started to be gone
_NO_NETWORK = """
import socket, sys
def _refuse(*_, **__):
    raise PermissionError("no network in the sandbox")
socket.socket = socket.create_connection = socket.getaddrinfo = _refuse
sys.modules["_socket"] = sys.modules["socket"]
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use; when it asks for more it is refused or ended."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_gib: float = 1.0  # address space
    file_bytes: int = 1 << 20  # size of any file that it writes
    output_bytes: int = 1 << 16  # of stdout and of stderr; the rest is dropped
    processes: int = 64  # of its user; without effect on root that cannot become nobody


class Ended(NamedTuple):
    """How a program ended."""

    output: str
    errors: str
    exit_code: int  # negative: the signal that ended it
    failure: str  # "": it ended by itself; else what the sandbox had to do

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and not self.failure


class Protections(NamedTuple):
    """Which means are in force on this machine beside the limits, which always are."""

    # "namespace": it has no network, cannot read the run's environment in /proc, and sees only its
    # own processes, which end with it. "python": its socket module refuses, /proc is as the user
    # may read it, and a process that leaves its group lives on within the limits, until the
    # process that started the program ends.
    network: str
    user: str  # "nobody": it can read what all may read; "own": what the run may read

    def __str__(self) -> str:
        return f"network off by {self.network}, files as {self.user}"


@functools.cache
def protections() -> Protections:
    """Returns what this machine permits; tried once, in a short process."""

    def works(prepare: Callable[[], None]) -> bool:
        command = [sys.executable, "-I", "-S", "-c", ""]
        try:
            subprocess.run(command, preexec_fn=prepare, timeout=20, check=True, cwd="/")
        except (subprocess.SubprocessError, OSError):
            return False
        return True

    user = "nobody" if os.geteuid() == 0 and works(_become_nobody) else "own"
    with tempfile.TemporaryDirectory() as empty:

        def leave() -> None:
            _leave_system(empty)
            _fork_and_keep(math.inf)

        network = "namespace" if works(leave) else "python"
    return Protections(network, user)


def restrict(limits: Limits) -> None:
    """Bounds this process for good; for a child before its program begins."""
    for what, wanted in (
        (resource.RLIMIT_AS, limits.memory_gib * 2**30),
        (resource.RLIMIT_CPU, max(1, limits.cpu_s)),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_CORE, 0),
    ):
        bound = resource.RLIM_INFINITY if math.isinf(wanted) else math.ceil(wanted)
        _, hard = resource.getrlimit(what)
        if hard != resource.RLIM_INFINITY:
            bound = hard if bound == resource.RLIM_INFINITY else min(bound, hard)
        # At the soft bound of the processor time, the kernel sends a signal that names the reason.
        above = bound if bound == hard or what != resource.RLIMIT_CPU else bound + 1
        resource.setrlimit(what, (bound, above))


def _leave_system(empty: str) -> None:
    """Enters namespaces without a network, in which /proc is the folder `empty`.

    When the next child ends, the kernel ends all that it has started; it sees no other process.
    """
    own_user = _CLONE_NEWUSER if os.geteuid() != 0 else 0
    flags = _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWNS | _CLONE_NEWPID | own_user
    for failed in (
        libc.unshare(flags),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(os.fsencode(empty), b"/proc", None, _MS_BIND, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "namespaces")


def _fork_and_keep(cpu_s: float) -> None:
    """Returns in a child; this process stays outside, ends it when told, and ends as it did.

    After `cpu_s` of processor time the kernel kills the child. The first process of a system does
    not get the signal that gives this reason, so this process ends by that signal instead.
    """
    notices = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, notices)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # the caller may be killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = libc.fork()  # that of `os` would run, and print, what libraries have to say to it
    if child < 0:
        raise OSError(ctypes.get_errno(), "fork")
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, notices)
        os.setsid()  # a leader stays in its group, so that the group's end is its own
        return
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    signal.sigwait(notices)
    os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime >= cpu_s:
        code = -signal.SIGXCPU
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    supervisor.end_as(code)


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)


def run_python(program: str, stdin: str = "", limits: Limits = Limits()) -> Ended:
    """Runs the text of an untrusted Python program.

    The interpreter is this one, isolated (`-I`): its path holds neither the run's modules nor the
    user's site-packages, and its environment is empty.
    """
    kept = [b"", b""]
    source = f"exec(compile({program!r}, 'program', 'exec'))\n"
    with tempfile.TemporaryFile() as given:
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        with _program(source, given, limits) as process:
            failure = _read(process, limits, kept)
    if not failure and process.returncode == -signal.SIGXCPU:
        failure = f"more than {limits.cpu_s:g} s of processor time"
    output, errors = (data.decode(errors="replace") for data in kept)
    return Ended(output, errors, process.returncode, failure)


# What an interpreter runs that takes one piece of code after the other: a line with a mark, and
# the code as JSON. It prints the mark after what a piece has printed.
_INTERPRETER = """
import ast, json, os, sys, traceback
pieces = os.fdopen(os.dup(0), "rb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(1, 2)
names, own = {"__name__": "__main__"}, os.getpid()
for line in pieces:
    mark, code = json.loads(line)
    try:
        tree = ast.parse(code, "code")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "code", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "code", "eval"), names)
            if value is not None:
                print(repr(value))
    except BaseException as error:
        shown = traceback.format_exception(error)
        sys.stdout.write("".join([shown[0], *shown[2:]] if len(shown) > 2 else shown))
    try:
        sys.stdout.flush()
    except BaseException:
        pass
    if os.getpid() != own:  # a copy that the code has made
        os._exit(0)
    os.write(1, mark.encode())
"""
_PIECES = 64  # of the limit of processor time, that an interpreter may use in all


class Session:
    """An interpreter in the sandbox that runs one piece of untrusted code after the other.

    It ends with this object's last reference, or when a piece goes over a limit.
    """

    def __init__(self, limits: Limits = Limits()):
        """`limits` are of one piece of code; the memory is that of all together."""
        self._limits, self._stack = limits, contextlib.ExitStack()
        whole = dataclasses.replace(limits, cpu_s=limits.cpu_s * _PIECES)
        self._process = self._stack.enter_context(_program(_INTERPRETER, subprocess.PIPE, whole))
        self.ended = False

    def run(self, code: str) -> str:
        """Returns what a piece of code prints, with its errors; says so if it had to be ended."""
        assert self._process.stdin and self._process.stdout
        mark = secrets.token_hex(16)
        said = b""
        deadline = time.monotonic() + self._limits.wall_s
        problem = "the interpreter has ended" if self.ended else ""
        try:
            self._process.stdin.write(json.dumps([mark, code]).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # closed
            problem = "the interpreter has ended"
        with selectors.DefaultSelector() as selector:
            if not problem:
                selector.register(self._process.stdout, selectors.EVENT_READ)
            while not problem:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    problem = f"ended after {self._limits.wall_s:g} s"
                    break
                block = os.read(self._process.stdout.fileno(), 1 << 16)
                said = said + block
                if said.endswith(mark.encode()):
                    break
                if len(said) > self._limits.output_bytes + len(mark):  # keeps a mark at its end
                    said = said[: self._limits.output_bytes] + said[-len(mark) :]
                if not block:
                    problem = "the interpreter has ended"
        if problem:
            self.close()
        text = said.removesuffix(mark.encode())[: self._limits.output_bytes]
        shown = text.decode(errors="replace").rstrip("\n")
        return "\n".join(filter(None, [shown, problem and f"({problem}; names are lost)"]))

    def close(self) -> None:
        """Ends the interpreter and what it has started."""
        self.ended = True
        self._stack.close()

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def _program(source: str, stdin: Any, limits: Limits) -> Iterator[subprocess.Popen]:
    """Gives a process that runs a program in a folder of its own; ends it and all it started."""
    found = protections()
    if found.network == "python":
        source = _NO_NETWORK + source
    with tempfile.TemporaryDirectory(prefix="sandbox_", ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        (folder / "main.py").write_text(source, encoding="utf-8", errors="replace")
        (folder / "main.py").chmod(0o444)
        (folder / "proc").mkdir()
        folder.chmod(0o777)
        process = _started(folder, stdin, limits, found)
        try:
            yield process
        finally:
            if found.network == "namespace":
                process.terminate()  # it ends the program's system and waits for that
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            _end_group(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    with contextlib.suppress(OSError):  # unread commands
                        pipe.close()


def _started(
    folder: pathlib.Path, stdin: Any, limits: Limits, found: Protections
) -> subprocess.Popen:
    def prepare() -> None:
        if found.network == "namespace":
            _leave_system(str(folder / "proc"))
            _fork_and_keep(limits.cpu_s)
        restrict(limits)
        if found.user == "nobody":
            _become_nobody()
        for capability in range(_NUM_CAPABILITIES):  # root would have them again after exec
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user clears it

    return subprocess.Popen(
        [sys.executable, "-I", "-B", "main.py"],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "LANG": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",  # threads count as processes
        },
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
        start_new_session=True,
    )


def _end_group(process: subprocess.Popen) -> None:
    """Ends a process and what it has started, and returns when they are gone."""
    deadline = time.monotonic() + _END_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < deadline:  # orphans: the system ends and reaps them
            os.killpg(process.pid, 0)
            time.sleep(0.005)
    process.wait()


def _read(process: subprocess.Popen, limits: Limits, kept: list[bytes]) -> str:
    """Keeps stdout and stderr of a process until it ends; returns why it must be ended, or ""."""
    deadline = time.monotonic() + limits.wall_s
    late = f"more than {limits.wall_s:g} s"
    assert process.stdout and process.stderr
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, 0)
        selector.register(process.stderr, selectors.EVENT_READ, 1)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return late
            ended = process.poll() is not None
            # A child of its own may hold the pipes open after it has ended.
            ready = selector.select(min(left, 0.05 if ended else 0.5))
            if ended and not ready:
                return ""
            for key, _ in ready:
                block = os.read(key.fd, 1 << 16)
                if not block:
                    selector.unregister(key.fileobj)
                room = limits.output_bytes - len(kept[key.data])
                kept[key.data] += block[: max(0, room)]
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return late
    return ""
