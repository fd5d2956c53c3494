"""What surrounds the loop of every job: its folder, checkpoints, metrics, alerts, and its end.

with Run(config, workdir) as run:
    ...                                    # checks; what the job begins with
    run.claim(models, datasets)            # from here on the folder is this job's
    state = run.resume(state, source, packer)
    for step in run.steps():
        clock = run.begin(step, state)
        ...
        run.end(step, state, numbers, evaluation)
"""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

import jax
from absl import logging

from jaxrl_llm import console
from jaxrl_llm.checkpoint.lock import locked
from jaxrl_llm.checkpoint.saver import Saver
from jaxrl_llm.config import JobConfig
from jaxrl_llm.config.bridge import to_dict
from jaxrl_llm.config.folder import check_workdir, claim_workdir
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.learner import stored
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.models import Models
from jaxrl_llm.metrics import alerts as alerts_lib
from jaxrl_llm.metrics import trackers
from jaxrl_llm.metrics.alerts import Alerts
from jaxrl_llm.metrics.clock import Clock, Profiler
from jaxrl_llm.metrics.writer import Writer
from jaxrl_llm.models import finite
from jaxrl_llm.sharding import hosts, telling
from jaxrl_llm.trainer import report
from jaxrl_llm.trainer.interruption import Interruption

State = TypeVar("State")
Numbers = Mapping[str, Any]


class Tracked(Protocol):
    """Something with a position in the checkpoint, made of what JSON can hold."""

    def get_state(self) -> Mapping[str, Any]: ...
    def set_state(self, state: Any, /) -> None: ...


class Run(contextlib.ExitStack):
    """The frame of one job; a context that ends what it began."""

    def __init__(
        self, config: JobConfig, workdir: str | os.PathLike[str], outer: "Run | None" = None
    ):
        """Frames a job; `outer` is the run that it is a stage of, which holds the folder."""
        super().__init__()
        self.config = config
        self.workdir = pathlib.Path(workdir)
        self.first = 0  # completed steps when this process began
        self.total = config.trainer.num_steps
        self._outer = outer
        grace_s = config.checkpoint.grace_s
        self.interruption: Interruption = outer.interruption if outer else Interruption(grace_s)

    def __enter__(self) -> "Run":
        if not self._outer:
            self.enter_context(self.interruption)
            for warning in self.config.warnings():
                logging.warning("%s", warning)
        trackers.check(self.config.metrics)
        alerts_lib.check(self.config.alerts)
        check_workdir(self.config, self.workdir)
        return self

    def claim(self, models: Models, *datasets: Dataset, planned_bytes: float = 0.0) -> None:
        """Makes the folder this job's and prints what it is. Nothing is written there before.

        All processes must have read the same `datasets`. `planned_bytes` is the peak of a device.

        Raises:
          ConfigError, OccupiedError: If the folder belongs to another job, or to another process.
        """
        begins_with = {
            "the version of jax": jax.__version__,
            "the number of devices": jax.local_device_count(),
            **{f"config.{group}": value for group, value in to_dict(self.config).items()},
            **{f"dataset {i}": dataset.identity for i, dataset in enumerate(datasets)},
        }
        hosts.agree("start", begins_with)
        if hosts.is_first() and not self._outer:
            self.enter_context(locked(self.workdir))
        claim_workdir(self.config, self.workdir, write=hosts.is_first())
        self._saver = Saver(self.workdir / "checkpoints", self.config.checkpoint)
        self.planned_bytes = planned_bytes
        self._shape = models.policy.shape
        self._tell_end = lambda: None
        if not self._outer:
            self._tell_end = report.opened(self.config, models, planned_bytes, self.workdir)

    def resume(self, state: State, source: Tracked, packer: Tracked) -> State:
        """Returns the state that the loop begins with: of the last checkpoint, or the given one.

        Moves source and packer to where that was saved; opens metrics, alerts and profile.
        """
        saved: Mapping[str, Any] = {}
        if self._saver.latest_step():
            with console.work("reading the last checkpoint"):
                wanted = weights_lib.abstract(state), self._shape
                state, saved, self.first = stored.restored(self._saver.restore, *wanted)
            remedy = (
                "remove this step to go on from the one before it, or start in another --workdir"
            )
            finite.check(state, f"{self.workdir}/checkpoints/{self.first}", remedy)
            logging.info("resumed after step %d", self.first)
            if self.first >= self.total and not self._outer:
                done = "%s: all %d steps of this run are done; for more, raise trainer.num_steps"
                logging.warning(done, self.workdir, self.total)
        config, workdir = self.config, self.workdir
        self._tracked: dict[str, Tracked] = {}
        self.alerts = self.enter_context(Alerts(config.alerts, workdir, self.interruption.request))
        self._tracked |= {"source": source, "packer": packer, "alerts": self.alerts}
        for name, thing in self._tracked.items():
            if name in saved:
                thing.set_state(saved[name])
        # A run that begins writes its evaluation before the first step as step 0.
        first = self.first + 1 if self.first else 0
        of_writer = saved.get("metrics", {})
        self.writer = self.enter_context(
            Writer(workdir, config.metrics, first, self.total, of_writer, to_dict(config))
        )
        self._profiler = self.enter_context(Profiler(config.profiler, workdir / "profile"))
        return state

    def replace(self, source: Tracked, packer: Tracked) -> None:
        """Goes on with those of another layout, in the positions of the old ones."""
        for name, thing in {"source": source, "packer": packer}.items():
            thing.set_state(self._tracked[name].get_state())
            self._tracked[name] = thing

    def wait_for_save(self) -> None:
        """Waits for a save that reads the arrays of the job; to be called before they move."""
        self._saver.wait()

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the steps that are left, from 1; then closes the checkpoints."""
        yield from range(self.first + 1, self.total + 1)
        with console.work("saving the last step"):
            self._saver.close()
        self._tell_end()

    def begin(self, step: int, state: Any) -> Clock:
        """Begins a step: until `hold`, a request to end raises `Interrupted` and saves `state`."""
        clock = Clock()
        save = functools.partial(self._saver.ensure, step - 1, state, self._position())
        self.interruption.resume_point(step - 1, save)
        self._profiler.begin(step)
        return clock

    def hold(self) -> None:
        """The weights are about to change: from here the step is completed before the job ends.

        Raises `Interrupted` if the end was asked for while that could not be noticed.
        """
        self._saver.release()
        self.interruption.hold()

    def evaluates(self, step: int) -> bool:
        """Returns whether to evaluate after `step` completed steps."""
        evaluation = self.config.evaluation
        if step == 0:
            return evaluation.before and not self.first
        if step == self.total:
            return evaluation.after
        return evaluation.every > 0 and step % evaluation.every == 0

    def end(self, step: int, state: Any, numbers: Numbers, evaluation: Numbers) -> None:
        """Ends a step: alerts, metrics, checkpoint, each where it is due.

        `numbers` (`Clock.seconds()` among them) and those of its `evaluation` may be on devices.
        """
        numbers = telling.fetched({**numbers, **evaluation})
        of_alerts = self.alerts.check(step, numbers)
        if self.writer.due(step) or evaluation or any(of_alerts.values()):
            self.writer.write(step, numbers, of_alerts)
        # Last, so that a step that was saved is a step whose numbers were written.
        due = self._saver.due(step, self.total, numbers)
        if self.interruption.outlasts_grace(self._saver.saving) or due:
            self._saver.save(step, state, self._position())

    def _position(self) -> dict[str, Mapping[str, Any]]:
        """Returns where the job stands, beside its arrays."""
        states = {name: thing.get_state() for name, thing in self._tracked.items()}
        layers = {stored.KEY: stored.numbers(self._shape)}
        return {**states, "metrics": self.writer.get_state(), **layers}
