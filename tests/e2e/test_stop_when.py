"""A run that a metric ends: saved, with a reason, and it goes on if it is asked to."""

import jax
import numpy as np
import pytest
import runs

from jaxrl_llm.checkpoint import saver as saver_lib
from jaxrl_llm.config import CheckpointConfig
from jaxrl_llm.trainer import loops

pytestmark = pytest.mark.slow
FEW = {"warm_start.num_steps": 2, "trainer.num_steps": 5, "checkpoint.every": 4}
SUPERVISED = {"trainer.num_steps": 5, "checkpoint.every": 4, "evaluation.every": 3}
JOBS = {
    "sync": ("grpo_tiny", FEW | {"evaluation.every": 3}, "val-core/arithmetic/mean@1", 3),
    "async": (
        "grpo_tiny",
        FEW | {"trainer.sampling": "async", "evaluation.every": 0},
        "actor/loss",
        1,
    ),
    "sft": ("sft_tiny", SUPERVISED, "val/sft/loss", 3),
}


def saved_steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


@pytest.mark.parametrize("job", JOBS)
def test_a_metric_ends_a_run_that_can_go_on(job, tmp_path, one_device, caplog, capsys):
    name, settings, metric, last = JOBS[job]
    full, cut = tmp_path / "full", tmp_path / "cut"

    def train(workdir, **more):
        more = {key.replace("__", "."): value for key, value in more.items()}
        return loops.train(runs.config(name, {**settings, **more}), workdir)

    expected = train(full)
    condition = f"{metric} > -1e9"
    train(cut, trainer__stop_when=condition)
    assert saved_steps(cut) == [last]
    numbers = runs.metrics(cut)
    assert max(numbers) == last and numbers[last]["training/stop_when"] == 1
    assert f"ended: {metric} is" in capsys.readouterr().out
    # Started again, it has ended; with another condition or none it takes the steps that are left.
    train(cut, trainer__stop_when=condition)
    assert "this run has ended" in caplog.text and saved_steps(cut) == [last]
    train(cut, trainer__stop_when=f"{metric} > 1e9")
    expected_numbers = runs.metrics(full)
    for step, data in runs.metrics(cut).items():
        assert data.pop("training/stop_when", 0) == (step == last)
        assert runs.repeatable(data) == runs.repeatable(expected_numbers[step])
    saver = saver_lib.Saver(cut / "checkpoints", CheckpointConfig(), read_only=True)
    state, _, step = saver.restore(expected)
    assert step == 5
    for left, right in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(left, right)
