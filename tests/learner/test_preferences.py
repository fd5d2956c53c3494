"""Preference optimization of a network: however its batch is cut, and on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxrl_llm.config import recipes
from jaxrl_llm.config.algorithm import PreferenceLossConfig
from jaxrl_llm.config.job import DPOConfig
from jaxrl_llm.config.learner import SupervisedTrainerConfig
from jaxrl_llm.learner import job_models, objectives, preferences
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.types import Example

ROWS = 8
ONE = tiny.make_mesh()
# Those whose loss looks at the whole batch, and one that reads prompts too.
SUBTLE = ("aot", "aot_unpaired", "kto", "bco", "orpo")


def config_of(loss):
    smoothing = 0.1 if loss in recipes.SMOOTHED_LOSSES else 0.0
    loss_args = {"nll_on_prompt": 1.0} if loss == "orpo" else {}
    return DPOConfig(
        dpo=PreferenceLossConfig(loss=loss, label_smoothing=smoothing, loss_args=loss_args),
        trainer=SupervisedTrainerConfig(batch_size=ROWS, max_sequence_tokens=32),
    )


def rows_of(config):
    random = np.random.default_rng(0)
    count = 1 if config.dpo.reads_labels else 2

    def example(index):
        tokens = tuple(random.integers(1, 96, random.integers(8, 15)).tolist())
        return Example(tokens, tuple(i > 3 for i in range(len(tokens))), desirable=index % 3 > 0)

    return [tuple(example(index) for _ in range(count)) for index in range(ROWS)]


@functools.cache
def models_of():
    return job_models.make_models(config_of("sigmoid"))


def learned(loss, mesh=ONE, budget=256):
    """The summed metrics of a batch and its gradient."""
    config = config_of(loss)
    objective = preferences.dpo(config, dataclasses.replace(models_of(), policy=tiny.NETWORK))
    objective = dataclasses.replace(objective, mesh=mesh)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    batch = objective.make_batch(rows_of(config), Packer(budget, shards))
    params = tiny.sharded(tiny.params(seed=0, scale=2.0), mesh)
    reference = tiny.sharded(tiny.params(seed=1, scale=2.0), mesh)

    class Watch:
        def __call__(self, name):
            return self

        def __enter__(self):
            return lambda value: value

        def __exit__(self, *error):
            return None

    batch = objectives.reference_log_prob_adder(objective, reference)(batch, Watch())
    with jax.set_mesh(mesh):
        batch = jax.jit(objective.with_baselines)(params, batch)
        find = jax.jit(
            jax.value_and_grad(
                lambda p, microbatch, batch: objective.loss(p, microbatch, batch), has_aux=True
            )
        )
        total, gradient = None, None
        for index in range(int(batch.packed.count)):
            microbatch = jax.tree.map(lambda a, i=index: a[i], batch.packed.microbatches)
            (value, metrics), part = find(params, microbatch, batch)
            each = {"loss": value, **metrics}, jax.tree.map(np.asarray, part)
            first = total is None
            total, gradient = each if first else jax.tree.map(jnp.add, (total, gradient), each)
    return {name: float(v) for name, v in total.items()}, gradient, int(batch.packed.count)


reference_run = functools.cache(learned)


@pytest.mark.slow
@pytest.mark.parametrize("loss", SUBTLE)
@pytest.mark.parametrize(
    "sizes, budget", [({}, 32), ({"data": 2, "fsdp": 2, "tensor": 2}, 32)], ids=["cut", "mesh"]
)
def test_neither_the_cut_nor_the_mesh_matters(loss, sizes, budget):
    metrics, gradient, count = learned(loss, tiny.make_mesh(**sizes), budget)
    wanted, whole, one = reference_run(loss)
    assert one == 1 and (count > 1 or sizes)
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    difference = optax.tree.norm(optax.tree.sub(gradient, whole))
    assert float(optax.tree.norm(whole)) > 1e-4
    assert float(difference) < 2e-5 * float(optax.tree.norm(whole))


def test_rows_of_labels_get_the_answers_of_others():
    rows = [
        (Example((1, 2, 3), (False, False, True)),),
        (Example((4, 5, 6, 7), (False, True, True, True)),),
        (Example((8, 9), (False, True)),),
    ]
    found = objectives.mismatched_rows(rows, max_tokens=4)
    assert [row[0].tokens for row in found] == [(1, 2, 9), (4, 3), (8, 5, 6, 7)]
    assert next(row[0].mask for row in found) == (False, False, True)
    assert objectives.mismatched_rows(rows, max_tokens=3)[2][0].tokens == (8, 5, 6)


def test_a_reference_is_there_only_for_losses_that_read_one():
    for loss in (*recipes.PAIR_LOSSES, *recipes.LABEL_LOSSES):
        config = config_of(loss)
        config = dataclasses.replace(
            config, dpo=dataclasses.replace(config.dpo, label_smoothing=0.0)
        )
        objective = preferences.dpo(config, models_of())
        has_reference = loss not in ("sft", "cpo", "simpo", "orpo")
        assert objective.needs_reference == has_reference == (config.reference_folder is not None)
        assert objective.mismatches == (loss == "kto")
        assert (objective.baselines is not None) == (loss in ("aot", "aot_unpaired", "kto", "bco"))
