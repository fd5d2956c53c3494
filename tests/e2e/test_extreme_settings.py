"""What the config admits takes a step: extremes of its numbers, many in one run."""

import itertools
import math
from typing import Any

import pytest
import runs
from config_fields import declared

from jaxrl_llm.algorithms.requirements import loss_hyperparameters
from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.validation import Range
from jaxrl_llm.trainer import rl

NUMBERS = (math.inf, -1, 0, 1e-30, 1e30)
# What the run must have for its size, and -1 as "the rest" of devices, of which there is one.
SIZES = ("mesh", "placement", "preference", "warm_start.num_steps")
BASE = {
    **runs.SAFE_RLHF,
    "rewards.cost_functions": {"long": {"function": "length"}},
    "evaluation.num_prompts": 2,
    "warm_start.num_steps": 1,
}


def extremes(number: float, loss: str = "vanilla") -> dict[str, Any]:
    """Returns the fields and the hyperparameters of a loss that admit a number, at that number."""
    found = {
        key: number
        for key, hint, rule, _ in declared(RLConfig)
        if isinstance(rule, Range) and "NAME" not in key and not key.startswith(SIZES)
        if number in rule and (hint is float or (hint is int and isinstance(number, int)))
    }
    found.update(
        {
            f"algorithm.loss_args.{name}": number
            for name, each in loss_hyperparameters(loss).items()
            if number in each.range
        }
    )
    if not number:  # greedy samples of a prompt would be the same
        found.update({"algorithm.samples_per_prompt": 1, "trainer.minibatch_size": 2})
    # Of models with experts, and biases that select them.
    for name in ("balance_coef", "z_coef", "bias_rate"):
        found.pop(f"router.{name}", None)
    if found.get("algorithm.correction_high") == 0:
        found["algorithm.correction_high"] = 1.0
    return found


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(n, marks=pytest.mark.slow if n in (0, math.inf) else pytest.mark.nightly)
        for n in NUMBERS
    ],
)
def test_all_fields_at_an_extreme_take_a_step(number, tmp_path, one_device):
    changed = extremes(number)
    assert changed
    rl.train(runs.config("grpo_tiny", {**BASE, **changed}), tmp_path / "run")
    assert max(runs.metrics(tmp_path / "run")) == 1


LOSSES = ("vanilla", "sapo", "dro", "clip_cov", "kl_cov", "cispo", "gspo", "geo_mean")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "number, loss", list(itertools.product(NUMBERS, LOSSES)), ids=lambda value: str(value)
)
def test_every_extreme_alone_takes_a_step(number, loss, tmp_path, one_device):
    for i, (key, value) in enumerate(extremes(number, loss).items()):
        changes = {**BASE, "algorithm.policy_loss": loss, key: value}
        if key.endswith("temperature"):
            changes.update({"algorithm.samples_per_prompt": 1, "trainer.minibatch_size": 2})
        workdir = tmp_path / str(i)
        rl.train(runs.config("grpo_tiny", changes), workdir)
        assert max(runs.metrics(workdir)) == 1, key
