"""The program that runs vLLM for a run, in the interpreter of vLLM's own environment.

Started by the run with `--fd`, or by hand, on this or another host, with `--listen=HOST:PORT`; then
both sides need the secret of `wire.KEY_VARIABLE` in their environment, and one run at a time is
served.
"""

import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys
from multiprocessing.connection import Connection, Listener

_PACKAGE = pathlib.Path(__file__).parents[2]


def _make_package_importable() -> None:
    """Makes `import jaxrl_llm` find this package, and nothing else that is installed beside it.

    The run's site-packages on the module path would hide the packages of this environment. Also
    runs in the processes that vLLM spawns, which import this file as their main module.
    """
    if _PACKAGE.name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        _PACKAGE.name, _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
    )
    assert spec and spec.loader
    sys.modules[_PACKAGE.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_PACKAGE.name])


def serve(connection_fd: int) -> None:
    """Serves the run at the other end of a socket until it closes."""
    from jaxrl_llm.rollout.vllm_engine import vllm_backend, worker_loop

    with Connection(connection_fd) as connection:
        worker_loop.WorkerLoop(connection, vllm_backend.VllmBackend).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries of accelerators may hang in their clean-up


def listen(address: str) -> None:
    """Serves runs that connect to `address`, one after the other, each with a fresh process."""
    from jaxrl_llm.rollout.vllm_engine import wire

    key = os.environ.get(wire.KEY_VARIABLE, "")
    if not key:
        sys.exit(f"error: set {wire.KEY_VARIABLE} in the environment to a secret of your choice")
    host, _, port = address.rpartition(":")
    with Listener((host.strip("[]"), int(port)), "AF_INET", authkey=key.encode()) as listener:
        print(f"listening at {listener.address[0]}:{listener.address[1]}", flush=True)
        while True:
            try:
                connection = listener.accept()
            except Exception as error:  # another secret, or no run at all
                print(f"refused a connection: {type(error).__name__}: {error}", flush=True)
                continue
            with connection:
                fd = connection.fileno()
                subprocess.run([sys.executable, __file__, f"--fd={fd}"], pass_fds=[fd], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--fd", type=int, help="file descriptor of a connected socket")
    group.add_argument("--listen", metavar="HOST:PORT", help="address to listen at")
    arguments = parser.parse_args()
    if arguments.listen:
        listen(arguments.listen)
    else:
        serve(arguments.fd)


# Not the folder of this file, whose modules would hide others of the same name.
if (
    sys.path
    and pathlib.Path(sys.path[0] or ".").resolve() == pathlib.Path(__file__).resolve().parent
):
    del sys.path[0]
_make_package_importable()

if __name__ == "__main__":
    main()
