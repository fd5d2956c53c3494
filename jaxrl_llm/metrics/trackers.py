"""Trackers of experiments: Weights & Biases, MLflow, trackio, each by its own package.

A run is known to a tracker by an id that is kept in its folder: a resumed run goes on in the same
record. Where the records go is the tracker's own setting (`WANDB_MODE`, `MLFLOW_TRACKING_URI`,
`TRACKIO_DIR`).
"""

import importlib
import math
import pathlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.config.folder import replace_text
from jaxrl_llm.errors import check_package

Sink = Callable[[int, Mapping[str, float]], None]
Opened = tuple[Sink, Callable[[], None]]  # writes the numbers of a step; ends

_MLFLOW_PARAMS = 100  # in one call
_MLFLOW_CHARACTERS = 500  # of a value


def _wandb(workdir: pathlib.Path, project: str, name: str, settings: Mapping[str, Any]) -> Opened:
    wandb = importlib.import_module("wandb")
    run = wandb.init(
        project=project,
        name=name,
        config=dict(settings),
        dir=str(workdir),
        id=_id(workdir / "wandb_id"),
        resume="allow",
    )
    return lambda step, data: run.log(dict(data), step=step), run.finish


def _trackio(workdir: pathlib.Path, project: str, name: str, settings: Mapping[str, Any]) -> Opened:
    trackio = importlib.import_module("trackio")
    # Its runs are known by their names.
    unique = f"{name}-{_id(workdir / 'trackio_id')[:6]}"
    run = trackio.init(
        project=project, name=unique, config=dict(settings), resume="allow", embed=False
    )
    return lambda step, data: run.log(_finite(data), step=step), run.finish


def _mlflow(workdir: pathlib.Path, project: str, name: str, settings: Mapping[str, Any]) -> Opened:
    mlflow = importlib.import_module("mlflow")
    client = mlflow.MlflowClient()
    path = workdir / "mlflow_id"
    if path.exists():
        run_id = path.read_text()
        client.update_run(run_id, status="RUNNING")
    else:
        found = client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else client.create_experiment(project)
        run_id = client.create_run(experiment, run_name=name).info.run_id
        flat = flatten_dict(settings, sep=".")
        params = [
            mlflow.entities.Param(key, str(value)[:_MLFLOW_CHARACTERS])
            for key, value in flat.items()
        ]
        for first in range(0, len(params), _MLFLOW_PARAMS):
            client.log_batch(run_id, params=params[first : first + _MLFLOW_PARAMS])
        replace_text(path, run_id)

    def sink(step: int, data: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [
            mlflow.entities.Metric(key.replace("@", "_at_"), value, now, step)
            for key, value in _finite(data).items()
        ]
        client.log_batch(run_id, metrics=metrics)

    return sink, lambda: client.set_terminated(run_id)


# Package, which is also the name of its extra -> its setting, what opens it.
_TRACKERS: Mapping[str, tuple[str, Callable[..., Opened]]] = {
    "wandb": ("wandb_project", _wandb),
    "mlflow": ("mlflow_experiment", _mlflow),
    "trackio": ("trackio_project", _trackio),
}


def opened(
    config: MetricsConfig, workdir: pathlib.Path, settings: Mapping[str, Any]
) -> Iterator[Opened]:
    """Yields each tracker that the config names, told the run's name and its settings."""
    for setting, begin in _TRACKERS.values():
        if project := getattr(config, setting):
            yield begin(workdir, project, run_name(config, workdir), settings)


def run_name(config: MetricsConfig, workdir: pathlib.Path) -> str:
    """Returns what trackers call the run."""
    return config.run_name or workdir.absolute().name


def check(config: MetricsConfig) -> None:
    """Raises ConfigError if a tracker needs a package that is not there; before any work."""
    for package, (setting, _) in _TRACKERS.items():
        if project := getattr(config, setting):
            check_package(package, package, f"config.metrics.{setting}: {project!r}")


def _id(path: pathlib.Path) -> str:
    if not path.exists():
        replace_text(path, uuid.uuid4().hex)
    return path.read_text()


def _finite(data: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in data.items() if math.isfinite(value)}
