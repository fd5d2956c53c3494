"""Sandbox for untrusted programs, such as those that a policy writes.

The process has limits on time, memory, files and processes, an empty folder of its own, and none of
the run's environment. Where the system permits it, it has no network and runs as nobody;
`protections` says so. Only a virtual machine protects against a flaw of the kernel.
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
_KILL_TIMEOUT_S = 2.0  # until the descendants of a program are gone
_NO_NETWORK = """
import socket, sys
def _refuse(*_, **__):
    raise PermissionError("no network in the sandbox")
socket.socket = socket.create_connection = socket.getaddrinfo = _refuse
sys.modules["_socket"] = sys.modules["socket"]
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resource limits of one program; beyond them a request fails or the program is killed."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_gib: float = 1.0  # address space
    file_bytes: int = 1 << 20  # of each file that it writes
    output_bytes: int = 1 << 16  # of stdout and of stderr; the rest is dropped
    processes: int = 64  # of its user; no effect on root if it cannot become nobody


class ProgramResult(NamedTuple):
    """The output of a program and how it ended."""

    output: str
    errors: str
    exit_code: int  # negative: killed by that signal
    failure: str  # the limit for which the sandbox killed it; "" if it did not

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and not self.failure


class Protections(NamedTuple):
    """The protections in force on this machine, besides the limits, which always apply."""

    # "namespace": no network, no view of the run's environment in /proc, and only the program's own
    # processes are visible, which end with it. "python": only the socket module is disabled, /proc
    # is readable as for the user, and a process that leaves its group survives, within the limits,
    # until the process that started the program ends.
    network: str
    user: str  # "nobody": can read world-readable files; "own": all files of the run's user

    def __str__(self) -> str:
        return f"network off by {self.network}, files as {self.user}"


@functools.cache
def protections() -> Protections:
    """The protections that this machine permits, tested once in a short process."""

    def is_permitted(prepare: Callable[[], None]) -> bool:
        command = [sys.executable, "-I", "-S", "-c", ""]
        try:
            subprocess.run(command, preexec_fn=prepare, timeout=20, check=True, cwd="/")
        except (subprocess.SubprocessError, OSError):
            return False
        return True

    user = "nobody" if os.geteuid() == 0 and is_permitted(_become_nobody) else "own"
    with tempfile.TemporaryDirectory() as empty:

        def enter_namespaces() -> None:
            _enter_namespaces(empty)
            _fork_and_supervise(math.inf)

        network = "namespace" if is_permitted(enter_namespaces) else "python"
    return Protections(network, user)


def apply_limits(limits: SandboxLimits) -> None:
    """Applies the limits to this process, irrevocably; called in a child before exec."""
    for kind, limit in (
        (resource.RLIMIT_AS, limits.memory_gib * 2**30),
        (resource.RLIMIT_CPU, max(1, limits.cpu_s)),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, _NUM_FILES),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_CORE, 0),
    ):
        soft = resource.RLIM_INFINITY if math.isinf(limit) else math.ceil(limit)
        _, ceiling = resource.getrlimit(kind)
        if ceiling != resource.RLIM_INFINITY:
            soft = ceiling if soft == resource.RLIM_INFINITY else min(soft, ceiling)
        # At the soft limit of CPU time the kernel sends SIGXCPU, which identifies the reason, at
        # the hard limit only SIGKILL.
        hard = soft if soft == ceiling or kind != resource.RLIMIT_CPU else soft + 1
        resource.setrlimit(kind, (soft, hard))


def _enter_namespaces(empty: str) -> None:
    """Enters namespaces without a network, with the folder `empty` mounted over /proc.

    The next child is process 1 of the PID namespace: it sees no other process, and when it ends the
    kernel kills all its descendants.
    """
    user_flag = _CLONE_NEWUSER if os.geteuid() != 0 else 0
    flags = _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWNS | _CLONE_NEWPID | user_flag
    for error_code in (
        libc.unshare(flags),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(os.fsencode(empty), b"/proc", None, _MS_BIND, None),
    ):
        if error_code:
            raise OSError(ctypes.get_errno(), "namespaces")


def _fork_and_supervise(cpu_s: float) -> None:
    """Forks and returns in the child; this process kills it on SIGTERM, and exits as it did.

    After `cpu_s` of CPU time the kernel kills the child. Process 1 of a PID namespace does not get
    SIGXCPU, the signal that identifies this reason, so this process exits by that signal instead.
    """
    notices = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, notices)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # in case the caller is killed
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child = libc.fork()  # `os.fork` would run hooks of libraries, which may print warnings
    if child < 0:
        raise OSError(ctypes.get_errno(), "fork")
    if not child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, notices)
        os.setsid()  # a session leader cannot leave its group, so killing the group kills it
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
    supervisor.exit_as(code)


def _become_nobody() -> None:
    os.setgroups([])
    os.setgid(_NOBODY)
    os.setuid(_NOBODY)


def run_python(
    program: str, stdin: str = "", limits: SandboxLimits = SandboxLimits()
) -> ProgramResult:
    """Runs the source of an untrusted Python program.

    The interpreter is this one, isolated (`-I`): its path holds neither the run's modules nor the
    user's site-packages, and its environment is empty.
    """
    streams = [b"", b""]
    source = f"exec(compile({program!r}, 'program', 'exec'))\n"
    with tempfile.TemporaryFile() as stdin_file:
        stdin_file.write(stdin.encode(errors="replace"))
        stdin_file.seek(0)
        with _running_program(source, stdin_file, limits) as process:
            failure = _read_output(process, limits, streams)
    if not failure and process.returncode == -signal.SIGXCPU:
        failure = f"more than {limits.cpu_s:g} s of processor time"
    output, errors = (data.decode(errors="replace") for data in streams)
    return ProgramResult(output, errors, process.returncode, failure)


# The main loop of an interpreter session. It reads lines of JSON, [mark, code], and prints the mark
# after the output of the code.
_SESSION_SOURCE = """
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
_SESSION_CPU_FACTOR = 64  # CPU time of a session, in multiples of the limit for one piece of code


class InterpreterSession:
    """A sandboxed interpreter that runs pieces of untrusted code and keeps their names.

    It ends with the last reference to this object, or when a piece exceeds a limit.
    """

    def __init__(self, limits: SandboxLimits = SandboxLimits()):
        """`limits` apply to one piece of code, the memory limit to the whole session."""
        self._limits, self._stack = limits, contextlib.ExitStack()
        session_limits = dataclasses.replace(limits, cpu_s=limits.cpu_s * _SESSION_CPU_FACTOR)
        self._process = self._stack.enter_context(
            _running_program(_SESSION_SOURCE, subprocess.PIPE, session_limits)
        )
        self.has_ended = False

    def run(self, code: str) -> str:
        """The output of a piece of code with its errors; notes if the interpreter ended."""
        assert self._process.stdin and self._process.stdout
        mark = secrets.token_hex(16)
        output = b""
        deadline = time.monotonic() + self._limits.wall_s
        problem = "the interpreter has ended" if self.has_ended else ""
        try:
            self._process.stdin.write(json.dumps([mark, code]).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # closed
            problem = "the interpreter has ended"
        with selectors.DefaultSelector() as selector:
            if not problem:
                selector.register(self._process.stdout, selectors.EVENT_READ)
            while not problem:
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    problem = f"ended after {self._limits.wall_s:g} s"
                    break
                block = os.read(self._process.stdout.fileno(), 1 << 16)
                output = output + block
                if output.endswith(mark.encode()):
                    break
                if len(output) > self._limits.output_bytes + len(mark):
                    # Keep the end, which may hold the mark.
                    output = output[: self._limits.output_bytes] + output[-len(mark) :]
                if not block:
                    problem = "the interpreter has ended"
        if problem:
            self.close()
        text = output.removesuffix(mark.encode())[: self._limits.output_bytes]
        shown_text = text.decode(errors="replace").rstrip("\n")
        return "\n".join(filter(None, [shown_text, problem and f"({problem}; names are lost)"]))

    def close(self) -> None:
        """Kills the interpreter and its descendants."""
        self.has_ended = True
        self._stack.close()

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def _running_program(source: str, stdin: Any, limits: SandboxLimits) -> Iterator[subprocess.Popen]:
    """Runs a program in a folder of its own; kills it and its descendants at the end."""
    active_protections = protections()
    if active_protections.network == "python":
        source = _NO_NETWORK + source
    with tempfile.TemporaryDirectory(prefix="sandbox_", ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        (folder / "main.py").write_text(source, encoding="utf-8", errors="replace")
        (folder / "main.py").chmod(0o444)
        (folder / "proc").mkdir()
        folder.chmod(0o777)
        process = _start_program(folder, stdin, limits, active_protections)
        try:
            yield process
        finally:
            if active_protections.network == "namespace":
                process.terminate()  # the outer process kills the namespace and waits
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_TIMEOUT_S)
            _kill_process_group(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    with contextlib.suppress(OSError):  # unread input
                        pipe.close()


def _start_program(
    folder: pathlib.Path, stdin: Any, limits: SandboxLimits, active_protections: Protections
) -> subprocess.Popen:
    def prepare() -> None:
        if active_protections.network == "namespace":
            _enter_namespaces(str(folder / "proc"))
            _fork_and_supervise(limits.cpu_s)
        apply_limits(limits)
        if active_protections.user == "nobody":
            _become_nobody()
        for capability in range(_NUM_CAPABILITIES):  # else root regains them at exec
            libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # setuid has cleared it

    return subprocess.Popen(
        [sys.executable, "-I", "-B", "main.py"],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "LANG": "C.UTF-8",
            "OPENBLAS_NUM_THREADS": "1",  # threads count towards RLIMIT_NPROC
        },
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
        start_new_session=True,
    )


def _kill_process_group(process: subprocess.Popen) -> None:
    """Kills the process group of a process; returns when it is gone."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while time.monotonic() < deadline:  # until init has reaped the orphans
            os.killpg(process.pid, 0)
            time.sleep(0.005)
    process.wait()


def _read_output(process: subprocess.Popen, limits: SandboxLimits, streams: list[bytes]) -> str:
    """Reads stdout and stderr until the process ends; returns the exceeded limit, "" if none."""
    deadline = time.monotonic() + limits.wall_s
    timeout_text = f"more than {limits.wall_s:g} s"
    assert process.stdout and process.stderr
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, 0)
        selector.register(process.stderr, selectors.EVENT_READ, 1)
        while selector.get_map():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return timeout_text
            has_ended = process.poll() is not None
            # A child of the program may hold the pipes open after it has ended.
            ready = selector.select(min(left_s, 0.05 if has_ended else 0.5))
            if has_ended and not ready:
                return ""
            for key, _ in ready:
                block = os.read(key.fd, 1 << 16)
                if not block:
                    selector.unregister(key.fileobj)
                bytes_left = limits.output_bytes - len(streams[key.data])
                streams[key.data] += block[: max(0, bytes_left)]
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return timeout_text
    return ""
