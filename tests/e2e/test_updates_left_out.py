"""Updates that must not be taken: what they would leave is not finite."""

import dataclasses

import jax
import numpy as np
import pytest
import recipe_settings
import runs

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.trainer import rl

QUICK = {
    "warm_start.num_steps": 1,
    "trainer.num_steps": 1,
    "trainer.minibatch_size": 16,
    "evaluation.every": 0,
    "checkpoint.every": 0,
}


@pytest.mark.slow
def test_what_the_optimizer_makes_of_gradients_decides(tmp_path, one_device, caplog):
    # Each is finite, and so are the gradients; decay of 1e60 in a step is not. No config file may
    # say so.
    config = runs.config("grpo_tiny", QUICK)
    wild = {
        name: dataclasses.replace(
            getattr(config, name),
            optimizer=OptimizerConfig(learning_rate=1e30, weight_decay=1e30),
        )
        for name in ("trainer", "warm_start")
    }
    state = rl.train(dataclasses.replace(config, **wild), tmp_path / "run")
    assert "sft: 1 of 1 updates were skipped" in caplog.text
    found = recipe_settings.metrics(tmp_path / "run")[1]
    assert found["actor/skipped_updates"] == found["alerts/nonfinite"] == 1
    assert np.isfinite(found["actor/grad_norm"]) and state.policy.num_updates == 0
    assert jax.tree.all(jax.tree.map(lambda a: bool(np.isfinite(a).all()), state))
    assert "updated weights not finite" in caplog.text
