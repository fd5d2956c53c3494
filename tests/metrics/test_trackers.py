"""Trackers of experiments, with packages that take notes in their place."""

import sys
import types

import pytest

from jaxrl_llm.config import MetricsConfig
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.metrics import trackers
from jaxrl_llm.metrics.writer import Writer

SETTINGS = {"seed": 3, "trainer": {"num_steps": 2}}
NUMBERS = {"a/b": 1, "val/mean@4": 0.5, "bad": float("nan")}
FINITE = {"a/b": 1.0, "val/mean@4": 0.5}


def config(**of_trackers):
    return MetricsConfig(console=False, tensorboard=False, **of_trackers)


def two_starts(workdir, config):
    """Writes a step, and another after a restart."""
    for step in (1, 2):
        with Writer(workdir, config, first_step=step, settings=SETTINGS) as writer:
            writer.write(step, NUMBERS)


@pytest.mark.parametrize(
    "setting, package",
    [("wandb_project", "wandb"), ("mlflow_experiment", "mlflow"), ("trackio_project", "trackio")],
)
def test_a_package_is_named_when_missing(monkeypatch, setting, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{setting}: 'mine' needs .*jaxrl_llm\[{package}\]"):
        trackers.check(config(**{setting: "mine"}))


def noting(begun, logged):
    """Returns a package with `init`, as wandb and trackio have it."""

    def init(**arguments):
        begun.append(arguments)
        return types.SimpleNamespace(
            log=lambda data, step: logged.append((step, data)), finish=lambda: logged.append("end")
        )

    return types.SimpleNamespace(init=init)


def test_wandb_continues_its_run_with_name_and_settings(tmp_path, monkeypatch):
    begun, logged = [], []
    monkeypatch.setitem(sys.modules, "wandb", noting(begun, logged))
    two_starts(tmp_path / "mine", config(wandb_project="all"))
    assert begun[0] == begun[1] and len(begun[0]["id"]) == 32
    assert (begun[0]["project"], begun[0]["name"], begun[0]["config"]) == ("all", "mine", SETTINGS)
    assert [each if each == "end" else each[0] for each in logged] == [1, "end", 2, "end"]
    assert FINITE.items() <= logged[0][1].items()


def test_trackio_continues_its_run_by_its_name(tmp_path, monkeypatch):
    begun, logged = [], []
    monkeypatch.setitem(sys.modules, "trackio", noting(begun, logged))
    for folder in ("a", "b"):
        two_starts(tmp_path / folder, config(trackio_project="all", run_name="same"))
    names = [each["name"] for each in begun]
    assert names[0] == names[1] != names[2] == names[3] and names[0].startswith("same-")
    assert begun[0]["resume"] == "allow" and begun[0]["config"] == SETTINGS
    assert logged[:4] == [(1, FINITE), "end", (2, FINITE), "end"]


def test_mlflow_continues_its_run(tmp_path, monkeypatch):
    calls = []

    class MlflowClient:
        def __getattr__(self, name):
            return lambda *given, **named: calls.append((name, *given, named))

        def create_experiment(self, name):
            return f"experiment {name}"

        def create_run(self, experiment, run_name):
            calls.append(("create_run", experiment, run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="id"))

    entities = types.SimpleNamespace(Metric=lambda *a: a, Param=lambda *a: a)
    fake = types.SimpleNamespace(MlflowClient=MlflowClient, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    two_starts(tmp_path, config(mlflow_experiment="all", run_name="mine"))
    assert [call[0] for call in calls] == [
        "get_experiment_by_name", "create_run", "log_batch", "log_batch", "set_terminated",
        "update_run", "log_batch", "set_terminated",
    ]  # fmt: skip
    assert calls[1] == ("create_run", "experiment all", "mine")
    assert calls[2][2]["params"] == [("seed", "3"), ("trainer.num_steps", "2")]
    # MLflow allows no "@" in a name.
    wanted = [("a/b", 1.0, 2), ("val/mean_at_4", 0.5, 2)]
    assert [(name, value, step) for name, value, _, step in calls[6][2]["metrics"]] == wanted
