"""Workers of a Ray cluster, for what the cores of this host are not enough (extra `ray`)."""

import contextlib
import importlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.errors import UserError, check_package
from jaxrl_llm.processes.child import START_TIMEOUT_S

Handle = Any  # of an actor


class WorkersError(UserError, RuntimeError):
    """Ray's workers cannot be used; the text says why."""


def connected(where: str) -> Any:
    """Returns the package, connected to the cluster of RAY_ADDRESS, or to one on this machine."""
    check_package("ray", "ray", f"{where}.ray_workers")
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        with _own_signals():
            ray.init(include_dashboard=False, logging_level="warning")
    return ray


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keeps the run's answer to SIGTERM, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)


class Workers:
    """So many actors of a class, each on cores of its own; one that dies is replaced."""

    def __init__(
        self, where: str, actor: type, count: int, cores: int, *given: Any, at_once: int = 1
    ):
        """`open(*given)` of each actor returns what is wrong with it, "" if nothing is.

        An actor works on `at_once` calls, more than 1 if its methods are coroutines.

        WorkersError if the cluster has no room for all of them, or something is wrong. `where` is
        the group of the config that asks for them.
        """
        self.ray = connected(where)
        self._given = given
        # Not all on one machine.
        self._actor = self.ray.remote(actor).options(
            num_cpus=cores, max_concurrency=at_once, scheduling_strategy="SPREAD"
        )
        self.handles: list[Handle] = []
        problem = ""
        try:
            opened = [self._add() for _ in range(count)]
            problem = next(filter(None, self.ray.get(opened, timeout=START_TIMEOUT_S)), "")
        except self.ray.exceptions.GetTimeoutError:
            has = self.ray.cluster_resources().get("CPU", 0)
            problem = (
                f"the Ray cluster did not start {count} workers of {cores} cores within"
                f" {START_TIMEOUT_S:g} s, it has {has:g} cores; use fewer, or a larger cluster"
            )
        except self.ray.exceptions.RayError as error:
            problem = f"a worker ended when it began: {error}"
        if problem:
            self.end()
            raise WorkersError(f"{where}.ray_workers: {problem}")

    def _add(self) -> Any:
        handle = self._actor.remote()
        self.handles.append(handle)
        return handle.open.remote(*self._given)

    def replace(self, handle: Handle) -> None:
        """Puts a new worker in the place of one that has died."""
        if handle in self.handles:
            self.handles.remove(handle)
            self._add()

    def end(self) -> None:
        """Ends all workers, and with them what they have started."""
        for handle in self.handles:
            self.ray.kill(handle)
        self.handles = []
