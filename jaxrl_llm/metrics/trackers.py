"""Experiment trackers: Weights & Biases, MLflow, trackio, each through its own package.

A tracker identifies a run by an id stored in the run's folder, so that a resumed run continues the
same record. The destination of the records is the tracker's own setting (`WANDB_MODE`,
`MLFLOW_TRACKING_URI`, `TRACKIO_DIR`).
"""

import importlib
import math
import pathlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from flax.traverse_util import flatten_dict

from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.errors import check_package
from jaxrl_llm.storage import files

Sink = Callable[[int, Mapping[str, float]], None]
OpenTracker = tuple[Sink, Callable[[], None]]  # writes the metrics of a step; ends the run


class TrackerFactory(Protocol):
    """Opens the record of a run in a tracker, or resumes it by the id kept in `workdir`."""

    def __call__(
        self, workdir: pathlib.Path, project: str, name: str, settings: Mapping[str, Any], /
    ) -> OpenTracker:
        """Opens a run of the tracker; returns functions that log a step and finish the run.

        `name` is of the run, `settings` are those of its config, nested.
        """
        ...


_MLFLOW_PARAMS = 100  # in one call
_MLFLOW_CHARACTERS = 500  # of a value


def _wandb(
    workdir: pathlib.Path, project: str, name: str, settings: Mapping[str, Any]
) -> OpenTracker:
    wandb = importlib.import_module("wandb")
    run = wandb.init(
        project=project,
        name=name,
        config=dict(settings),
        dir=tempfile.mkdtemp() if files.in_bucket(workdir) else str(workdir),
        id=_id(workdir / "wandb_id"),
        resume="allow",
    )
    return lambda step, data: run.log(dict(data), step=step), run.finish


def _trackio(
    workdir: pathlib.Path, project: str, name: str, settings: Mapping[str, Any]
) -> OpenTracker:
    trackio = importlib.import_module("trackio")
    # It identifies runs by name.
    unique = f"{name}-{_id(workdir / 'trackio_id')[:6]}"
    run = trackio.init(
        project=project, name=unique, config=dict(settings), resume="allow", embed=False
    )
    return lambda step, data: run.log(_finite(data), step=step), run.finish


def _mlflow(
    workdir: pathlib.Path, project: str, name: str, settings: Mapping[str, Any]
) -> OpenTracker:
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient()
    path = workdir / "mlflow_id"
    if files.exists(path):
        run_id = files.read_text(path)
        client.update_run(run_id, status="RUNNING")
    else:
        experiment_record = client.get_experiment_by_name(project)
        experiment = (
            experiment_record.experiment_id
            if experiment_record
            else client.create_experiment(project)
        )
        run_id = client.create_run(experiment, run_name=name).info.run_id
        flat = flatten_dict(settings, sep=".")
        params = [
            mlflow.entities.Param(key, str(value)[:_MLFLOW_CHARACTERS])
            for key, value in flat.items()
        ]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            client.log_batch(run_id, params=params[first : first + _MLFLOW_PARAMS])
        files.replace_text(path, run_id)

    def sink(step: int, data: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [
            mlflow.entities.Metric(key.replace("@", "_at_"), value, now, step)
            for key, value in _finite(data).items()
        ]
        client.log_batch(run_id, metrics=metrics)

    return sink, lambda: client.set_terminated(run_id)


# Package (also the name of the extra) -> key of its setting, function that opens it.
_TRACKERS: Mapping[str, tuple[str, TrackerFactory]] = {
    "wandb": ("wandb_project", _wandb),
    "mlflow": ("mlflow_experiment", _mlflow),
    "trackio": ("trackio_project", _trackio),
}


def open_trackers(
    config: MetricsConfig, workdir: pathlib.Path, settings: Mapping[str, Any]
) -> Iterator[OpenTracker]:
    """Opens each tracker that the config names, with the name and settings of the run."""
    for setting, open_tracker in _TRACKERS.values():
        if project := getattr(config, setting):
            yield open_tracker(workdir, project, run_name(config, workdir), settings)


def run_name(config: MetricsConfig, workdir: pathlib.Path) -> str:
    """The name of the run in trackers."""
    return config.run_name or files.absolute(workdir).name


def check(config: MetricsConfig) -> None:
    """Raises ConfigError if the package of a configured tracker is missing; before any work."""
    for package, (setting, _) in _TRACKERS.items():
        if project := getattr(config, setting):
            check_package(package, package, f"config.metrics.{setting}: {project!r}")


def _id(path: pathlib.Path) -> str:
    if not files.exists(path):
        files.replace_text(path, uuid.uuid4().hex)
    return files.read_text(path)


def _finite(data: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in data.items() if math.isfinite(value)}
