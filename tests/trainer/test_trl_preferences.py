"""Ten steps of every preference loss, and of DFT, are those of TRL's own trainers.

The folder `TRL_GOLDENS_2` is made by `tests/goldens/make_trl.py`, for any seed.
"""

import itertools
import json
import os
import pathlib

import pytest
import runs
from hf_checkpoints import change_norms
from supervised_runs import train_on_rows

from jaxrl_llm.config import recipes
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.types import Example

FOLDER = pathlib.Path(os.environ.get("TRL_GOLDENS_2", ""))
needs_goldens = pytest.mark.skipif(
    "TRL_GOLDENS_2" not in os.environ,
    reason="TRL_GOLDENS_2 names no folder; make one with tests/goldens/make_trl.py",
)
# The run of TRL and the loss that it is here.
RUNS = {
    **{
        f"dpo_{loss}": {"loss": loss}
        for loss in recipes.PAIR_LOSSES
        if loss not in ("cpo", "simpo", "orpo")
    },
    "dpo_aot_smoothed": {"loss": "aot"},
    "dpo_discopop_tau": {"loss": "discopop", "loss_args": {"tau": 0.5}},
    "kto": {"loss": "kto"},
    "kto_weighted": {
        "loss": "kto",
        "loss_args": {"desirable_weight": 1.33, "undesirable_weight": 0.7},
    },
    "kto_apo_zero_unpaired": {"loss": "apo_zero_unpaired"},
    "cpo": {"loss": "cpo"},
    "cpo_smoothed": {"loss": "cpo", "loss_args": {"nll_coef": 0.5}},
    "simpo": {"loss": "simpo"},
    "cpo_simpo": {"loss": "simpo", "loss_args": {"gamma": 1.0, "nll_coef": 1.0}},
    "alphapo": {"loss": "simpo", "loss_args": {"alpha": 0.25}},
    "orpo": {"loss": "orpo", "loss_args": {"nll_on_prompt": 1}},
    "sft_dft": {"loss": "dft"},
    "sft_nll": {"loss": "cross_entropy"},
}
OF_REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
# TRL logs the reference's rewards for "sft", and log-probs per token where the loss is of those.
UNLIKE = {
    "dpo_sft": OF_REWARDS,
    **dict.fromkeys(("orpo", "simpo", "cpo_simpo", "alphapo"), ("logps/chosen", "logps/rejected")),
}


def rows(theirs):
    """The rows as TRL tokenized them."""
    sides = [
        [Example(tuple(row["tokens"]), tuple(map(bool, row["mask"]))) for row in each]
        for side, each in theirs["rows"].items()
        if side != "label"
    ]
    labels = theirs["rows"].get("label", [True] * len(sides[0]))
    return [
        tuple(example._replace(desirable=label) for example in row)
        for *row, label in zip(*sides, labels, strict=True)
    ]


def config(loss, theirs):
    given, kind = theirs["settings"], "sft" if theirs["kind"] == "sft" else "dpo"
    values = {
        "job": kind,
        "model": {"path": str(FOLDER / "policy")},
        "data": {"shuffle": False},
        "trainer": {
            "num_steps": given["max_steps"],
            "batch_size": given["per_device_train_batch_size"],
            "optimizer": {
                "learning_rate": given["learning_rate"],
                "beta2": 0.999,
                "weight_decay": given["weight_decay"],
                "weight_decay_on": "matrices",
                "max_grad_norm": given["max_grad_norm"],
            },
        },
        "evaluation": {"before": False, "after": False},
        "metrics": {"tensorboard": False, "console": False},
    }
    if kind == "sft":
        return from_config_dict({**values, **loss})
    smoothing = given.get("label_smoothing", 0.0)
    beta = {"beta": given["beta"], "label_smoothing": smoothing}
    return from_config_dict({**values, "dpo": {**beta, **loss}})


@pytest.mark.slow
@needs_goldens
@pytest.mark.parametrize("name", RUNS)
def test_ten_steps_are_those_of_trl(name, tmp_path, monkeypatch):
    theirs = json.loads((FOLDER / "expected.json").read_text())["runs"][name]
    given, job = rows(theirs), config(RUNS[name], theirs)
    state, objective, before = train_on_rows(job, given, tmp_path / "run", monkeypatch)

    found = runs.metrics(tmp_path / "run")
    kind, steps = job.job, theirs["steps"]
    assert objective.needs_reference == (theirs["kind"] in ("dpo", "kto") and name != "dpo_sft")
    for theirs_name, ours in {
        "loss": f"{kind}/loss",
        "grad_norm": f"{kind}/grad_norm",
        "kl": "dpo/baseline",
        **{each: each for each in (*OF_REWARDS, "logps/chosen", "logps/rejected")},
    }.items():
        if theirs_name not in steps or theirs_name in UNLIKE.get(name, ()):
            continue
        got = [found[i + 1][ours] for i in range(10)]
        # Differences of sums around 100: float32 leaves 1e-5 of them open. A reward is one times
        # beta, which is 0.1 in `test_trl_parity.py`, whose tolerance is the same.
        tolerance = {"rel": 1e-4}
        if "rewards" in theirs_name:
            tolerance = {"abs": 1e-4 * theirs["settings"]["beta"]}
        if theirs_name == "kl":
            tolerance = {"abs": 1e-4}
        assert got == pytest.approx(steps[theirs_name], **tolerance), theirs_name
    changes = change_norms(objective.network, before, state.params)
    assert changes == pytest.approx(theirs["update_norms"], rel=1e-4)


@needs_goldens
def test_every_loss_has_a_run():
    made = json.loads((FOLDER / "expected.json").read_text())["runs"]
    assert made.keys() == RUNS.keys()
    run_losses = {loss["loss"] for loss in RUNS.values()}
    ours = {*itertools.chain(recipes.PAIR_LOSSES, recipes.LABEL_LOSSES)}
    # TRL 1.16 has no BCO on single answers.
    assert ours - run_losses == {"bco"}
