"""The frame around the loop of every job: folder, checkpoints, metrics, alerts, interruption.

with TrainingRun(config, workdir) as run:
    ...                                # checks; initial weights
    run.claim(models, datasets)        # from here on this job owns the folder
    state = run.resume(state, source, packer)
    for step in run.steps():
        clock = run.begin_step(step, state)
        ...
        run.commit_step()              # the weights change after this
        ...
        run.end_step(step, state, numbers, evaluation)
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import jax
from absl import logging

from jaxrl_llm import console
from jaxrl_llm.checkpoint.lock import exclusive_lock
from jaxrl_llm.checkpoint.memory_copies import MemoryCopies
from jaxrl_llm.checkpoint.saver import Saver
from jaxrl_llm.config import JobConfig
from jaxrl_llm.config.bridge import to_dict
from jaxrl_llm.config.stop_condition import stop_condition
from jaxrl_llm.config.workdir import check_workdir, claim_workdir
from jaxrl_llm.data.datasets import Dataset
from jaxrl_llm.learner import layer_restacking
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.metrics import alerts as alerts_lib
from jaxrl_llm.metrics import trackers
from jaxrl_llm.metrics.alerts import Alerts
from jaxrl_llm.metrics.goodput import GoodputLog
from jaxrl_llm.metrics.timers import Clock, Profiler
from jaxrl_llm.metrics.writer import Writer
from jaxrl_llm.models import finite
from jaxrl_llm.processes import progress
from jaxrl_llm.sharding import kv_store_broadcast, multihost
from jaxrl_llm.storage import files
from jaxrl_llm.trainer import run_banner
from jaxrl_llm.trainer.interruption import InterruptionHandler
from jaxrl_llm.trainer.stop_check import StopCheck

State = TypeVar("State")
Numbers = Mapping[str, Any]


class Checkpointable(Protocol):
    """An object whose state, JSON values, is part of the checkpoint."""

    def get_state(self) -> Mapping[str, Any]: ...
    def set_state(self, state: Any, /) -> None: ...


class TrainingRun(contextlib.ExitStack):
    """The frame of one job; a context that closes what it opened."""

    def __init__(
        self, config: JobConfig, workdir: str | os.PathLike[str], outer: "TrainingRun | None" = None
    ):
        """A run of `config`; `outer` is the run, if any, that this is a stage of."""
        super().__init__()
        self.config = config
        self.workdir = files.run_path(workdir)
        self._check_owner: Callable[[], None] = outer._check_owner if outer else lambda: None
        self.resumed_step = 0  # completed steps when this process began
        self.total_steps = config.trainer.num_steps
        self.stop_check = StopCheck(stop_condition(config.trainer.stop_when))
        self._outer = outer
        self._completed_steps = 0
        self._began = time.time()
        self._stages_s = 0.0  # seconds of stages that have ended
        self.goodput: GoodputLog | None = None  # in the loop of a whole run
        grace_s = config.checkpoint.grace_s
        self.interruption: InterruptionHandler = (
            outer.interruption if outer else InterruptionHandler(grace_s)
        )

    def __enter__(self) -> "TrainingRun":
        if not self._outer:
            self.enter_context(self.interruption)
            for warning in self.config.warnings():
                logging.warning("%s", warning)
        else:
            self.callback(self._outer.add_stage, self)
        trackers.check(self.config.metrics)
        alerts_lib.check(self.config.alerts)
        check_workdir(self.config, self.workdir)
        return self

    def add_stage(self, stage: "TrainingRun") -> None:
        """Counts the time of a stage that ends now."""
        self._stages_s += time.time() - stage._began

    def claim(self, models: Models, *datasets: Dataset, planned_bytes: float = 0.0) -> None:
        """Takes the folder for this job and prints the banner. Nothing is written there before.

        All processes must have read the same `datasets`. `planned_bytes` is the peak per device.

        Raises:
          ConfigError, OccupiedError: If the folder belongs to another job, or to another process.
        """
        start_facts = {
            "the version of jax": jax.__version__,
            "the number of devices": jax.local_device_count(),
            **{f"config.{group}": value for group, value in to_dict(self.config).items()},
            **{f"dataset {i}": dataset.identity for i, dataset in enumerate(datasets)},
        }
        multihost.assert_equal(multihost.START, start_facts)
        if multihost.is_first() and not self._outer:
            self._check_owner = self.enter_context(exclusive_lock(self.workdir))
        claim_workdir(self.config, self.workdir, write=multihost.is_first())
        self._saver = Saver(
            self.workdir / "checkpoints",
            self.config.checkpoint,
            check_owner=self._check_owner,
            memory=MemoryCopies(self.workdir) if self._copies_every > 0 else None,
        )
        self.planned_bytes = planned_bytes
        self._shape = models.policy.shape
        self._print_result: Callable[[int, str, str], None] = lambda *_: None
        if not self._outer:
            self._print_result = run_banner.print_banner(
                self.config, models, planned_bytes, self.workdir
            )

    def resume(self, state: State, source: Checkpointable, packer: Checkpointable) -> State:
        """The state of the last checkpoint, or `state` if there is none.

        Restores source and packer from the same checkpoint; opens metrics, alerts and profiler.
        """
        saved: Mapping[str, Any] = {}
        if self._saver.has_steps:
            with console.show_progress("reading the last checkpoint"):
                state, saved, self.resumed_step = layer_restacking.restore_restacked(
                    self._saver.restore, weights_lib.abstract_arrays(state), self._shape
                )
            remedy = (
                "remove this step to go on from the one before it, or start in another --workdir"
            )
            finite.check(state, f"{self.workdir}/checkpoints/{self.resumed_step}", remedy)
            logging.info("resumed after step %d", self.resumed_step)
            if self.resumed_step >= self.total_steps and not self._outer:
                message = "%s: all %d steps of this run are done; for more, raise trainer.num_steps"
                logging.warning(message, self.workdir, self.total_steps)
        config, workdir = self.config, self.workdir
        self._tracked: dict[str, Checkpointable] = {}
        self.alerts = self.enter_context(
            Alerts(config.alerts, workdir, self.interruption.request_stop)
        )
        self._tracked |= {"source": source, "packer": packer, "alerts": self.alerts}
        if self.stop_check.condition is not None:
            self._tracked["stop_when"] = self.stop_check
        for name, tracked in self._tracked.items():
            if name in saved:
                tracked.set_state(saved[name])
        if self.stop_check.reason:
            self.total_steps = self.resumed_step
            message = "%s: this run has ended: %s; for more steps, change trainer.stop_when"
            logging.warning(message, self.workdir, self.stop_check.reason)
        # A fresh run writes its evaluation before the first step as step 0.
        first = self.resumed_step + 1 if self.resumed_step else 0
        writer_state = saved.get("metrics", {})
        self.writer = self.enter_context(
            Writer(
                workdir,
                config.metrics,
                first,
                self.total_steps,
                position=writer_state,
                settings=to_dict(config),
                check_owner=self._check_owner,
            )
        )
        self._profiler = self.enter_context(Profiler(config.profiler, workdir / "profile"))
        if not self._outer:  # a stage is a part of its run's time
            self.goodput = self.enter_context(
                GoodputLog(
                    workdir if multihost.is_first() else None,
                    self._began,
                    self.resumed_step,
                    self._stages_s,
                    self._check_owner,
                )
            )
        return state

    def replace_sources(self, source: Checkpointable, packer: Checkpointable) -> None:
        """Replaces source and packer by those of another layout, with the same state."""
        for name, tracked in {"source": source, "packer": packer}.items():
            tracked.set_state(self._tracked[name].get_state())
            self._tracked[name] = tracked

    def wait_for_save(self) -> None:
        """Waits for a save in progress, which reads the job's arrays; call it before they move."""
        self._saver.wait()

    def steps(self) -> Iterator[int]:
        """Yields the remaining step numbers, counted from 1; then closes the checkpoints."""
        step = self.resumed_step
        while step < self.total_steps:  # which `end_step` may lower
            step += 1
            yield step
        with console.show_progress("saving the last step"):
            self._saver.close()
        goodput = ""
        if self.goodput is not None:
            self.goodput.end()
            goodput = self.goodput.summary()
        self._print_result(self.total_steps, self.stop_check.reason, goodput)

    def begin_step(self, step: int, state: Any) -> Clock:
        """Begins a step: a stop before `commit_step` saves `state` and raises `Interrupted`."""
        self._check_owner()
        self._report_progress(step - 1)
        clock = Clock()
        if self.goodput is not None:
            self.goodput.begin_step()
        position = self._checkpoint_state()

        def save() -> None:
            self.writer.flush()
            self._saver.ensure_saved(step - 1, state, position)

        self.interruption.set_resume_point(step - 1, save)
        self._profiler.begin(step)
        return clock

    def commit_step(self) -> None:
        """Commits to the step, as weights are about to change: it is completed before a stop.

        Raises `Interrupted` if a stop was requested that could not be acted on before.
        """
        with self._timed_save():
            self._saver.wait_before_donation()
        self.interruption.commit_step()
        self._report_progress()

    def should_evaluate(self, step: int) -> bool:
        """Whether to evaluate after `step` completed steps."""
        evaluation = self.config.evaluation
        if step == 0:
            return evaluation.before and not self.resumed_step
        if step == self.total_steps:
            return evaluation.after
        return evaluation.every > 0 and step % evaluation.every == 0

    @property
    def _copies_every(self) -> int:
        """Steps between copies in memory; 0: none. A stage has none: it is short."""
        return 0 if self._outer else self.config.checkpoint.memory_every

    def should_copy(self, step: int) -> bool:
        """Whether `step` is copied to the hosts' memory, unless a checkpoint of it is due."""
        return self._copies_every > 0 and step % self._copies_every == 0

    def end_step(self, step: int, state: Any, numbers: Numbers, evaluation: Numbers) -> None:
        """Ends a step: checks alerts, writes metrics and checkpoint when due.

        The run ends with this step if `trainer.stop_when` holds.

        `numbers` (with `Clock.seconds()`) and those of the `evaluation` may be on devices.
        """
        numbers = kv_store_broadcast.device_get({**numbers, **evaluation})
        if self.goodput is not None:
            self.goodput.add("evaluation", float(numbers.get("timing_s/testing", 0.0)))
            numbers = {**numbers, "perf/goodput": self.goodput.goodput}
        alert_metrics = self.alerts.check(step, numbers)
        stop_metrics = self.stop_check.check(step, numbers, bool(evaluation))
        if self.stop_check.reason:
            self.total_steps = step
        is_noteworthy = any({**alert_metrics, **stop_metrics}.values())
        if self.writer.is_due(step) or evaluation or is_noteworthy:
            self.writer.write(step, numbers, alert_metrics, stop_metrics)
        # Save last: every step in a checkpoint then has its metrics written.
        is_due = self._saver.should_save(step, self.total_steps, numbers)
        if self.interruption.step_exceeds_grace(self._saver.is_saving) or is_due:
            with self._timed_save():
                self.writer.flush()
                self._saver.save(step, state, self._checkpoint_state())
        elif self.should_copy(step):
            with self._timed_save():
                self.writer.flush()
                self._saver.copy_to_memory(step, state, self._checkpoint_state())
        if self.goodput is not None:
            self.goodput.end_step(step)
        self._report_progress(step)

    def _report_progress(self, step: int | None = None) -> None:
        """Tells the supervisor, if any, that the run goes on; steps of a stage are none of it."""
        if step is not None and not self._outer:
            self._completed_steps = step
        progress.report(self._completed_steps)

    def _timed_save(self) -> contextlib.AbstractContextManager[None]:
        """Counts the time of a block as that of a save."""
        return contextlib.nullcontext() if self.goodput is None else self.goodput.part("save")

    def _checkpoint_state(self) -> dict[str, Mapping[str, Any]]:
        """The checkpointed state beside the arrays."""
        states = {name: tracked.get_state() for name, tracked in self._tracked.items()}
        layers = {layer_restacking.LAYERS_KEY: layer_restacking.layers_by_stack(self._shape)}
        return {**states, "metrics": self.writer.get_state(), **layers}
