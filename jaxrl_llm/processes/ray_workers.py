"""Workers on a Ray cluster, for work that needs more cores than this host has (extra `ray`)."""

import contextlib
import importlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from jaxrl_llm.errors import UserError, check_package
from jaxrl_llm.processes.child import START_TIMEOUT_S

ActorHandle = Any  # handle of a Ray actor


class RayWorkersError(UserError, RuntimeError):
    """Ray workers cannot be used; the message says why."""


def connect_to_ray(where: str) -> Any:
    """The `ray` package, connected to the cluster of RAY_ADDRESS, or to a new local one."""
    check_package("ray", "ray", f"{where}.ray_workers")
    ray = importlib.import_module("ray")
    if not ray.is_initialized():
        with _preserved_sigterm_handler():
            ray.init(include_dashboard=False, logging_level="warning")
    return ray


@contextlib.contextmanager
def _preserved_sigterm_handler() -> Iterator[None]:
    """Preserves the run's SIGTERM handler, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


class RayWorkers:
    """A number of actors of a class, each with its own cores; an actor that dies is replaced."""

    def __init__(
        self,
        where: str,
        actor: type,
        count: int,
        cores: int,
        *open_args: Any,
        max_concurrency: int = 1,
    ):
        """Starts `count` actors; `open(*open_args)` of each returns its problem, "" if none.

        `where` is the config group that requests them. An actor runs up to `max_concurrency` calls
        at a time; more than 1 needs coroutine methods. WorkersError if the cluster has too few
        cores or an actor reports a problem.
        """
        self.ray = connect_to_ray(where)
        self._open_args = open_args
        # SPREAD: not all on one machine.
        self._actor_class = self.ray.remote(actor).options(
            num_cpus=cores, max_concurrency=max_concurrency, scheduling_strategy="SPREAD"
        )
        self.handles: list[ActorHandle] = []
        problem = ""
        try:
            problems = [self._start_actor() for _ in range(count)]
            problem = next(filter(None, self.ray.get(problems, timeout=START_TIMEOUT_S)), "")
        except self.ray.exceptions.GetTimeoutError:
            total = self.ray.cluster_resources().get("CPU", 0)
            problem = (
                f"the Ray cluster did not start {count} workers of {cores} cores within"
                f" {START_TIMEOUT_S:g} s, it has {total:g} cores; use fewer, or a larger cluster"
            )
        except self.ray.exceptions.RayError as error:
            problem = f"a worker ended when it began: {error}"
        if problem:
            self.end()
            raise RayWorkersError(f"{where}.ray_workers: {problem}")

    def _start_actor(self) -> Any:
        handle = self._actor_class.remote()
        self.handles.append(handle)
        return handle.open.remote(*self._open_args)

    def replace(self, handle: ActorHandle) -> None:
        """Replaces a worker that has died."""
        if handle in self.handles:
            self.handles.remove(handle)
            self._start_actor()

    def end(self) -> None:
        """Kills all workers, and with them their child processes."""
        for handle in self.handles:
            self.ray.kill(handle)
        self.handles = []
