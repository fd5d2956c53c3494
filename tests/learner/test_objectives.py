"""Routers in the jobs on given answers: the losses of RL, on the same tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config.bridge import JOBS
from jaxrl_llm.config.learner import RouterConfig, RouterLossConfig, SupervisedTrainerConfig
from jaxrl_llm.learner import (
    job_models,
    objectives,
    predict,
    preferences,
    router_replay,
    update,
    weights,
)
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.objectives import SupervisedBatch
from jaxrl_llm.models.architecture import Experts, LayerType
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.types import Example

SHAPE = dataclasses.replace(
    tiny.SHAPE,
    layers=(LayerType(), LayerType(experts=True)),
    experts=Experts(num=4, per_token=2, size=12, scores="sigmoid", selection_bias=True),
)
ROUTER = RouterLossConfig(balance_coef=0.3, z_coef=0.2, bias_rate=0.25)
MAKE = {"sft": objectives.sft, "dpo": preferences.dpo, "reward_model": objectives.reward_model}


def batch_of(job):
    random = np.random.default_rng(0)
    rows = [
        tuple(
            Example(tuple(random.integers(1, 96, n).tolist()), tuple(i > 3 for i in range(int(n))))
            for n in random.integers(8, 15, 1 if job == "sft" else 2)
        )
        for _ in range(4)
    ]
    return SupervisedBatch.from_rows(rows, Packer(64, 1))


@pytest.mark.slow
@pytest.mark.parametrize("job", MAKE)
def test_router_losses_are_those_of_rl_on_the_same_tokens(job):
    of_rl = RouterConfig(**dataclasses.asdict(ROUTER))
    trainer = SupervisedTrainerConfig(num_steps=2, batch_size=4)
    config = JOBS[job](router=ROUTER, trainer=trainer)
    head = "scalar" if job == "reward_model" else "lm"
    network = Network(SHAPE, head=head)
    made = job_models.make_models(JOBS[job](trainer=trainer))
    made = dataclasses.replace(made, policy=network, value=network)
    objective = dataclasses.replace(MAKE[job](config, made), mesh=tiny.make_mesh())
    batch = jax.tree.map(jnp.asarray, batch_of(job))
    params = jax.tree.map(jnp.asarray, tiny.params(network))
    state = weights.make_trainable(params, trainer.optimizer, 2, objective.mesh)

    def losses(params, config):
        plain = MAKE[job](config, made)
        found = jax.jit(lambda p, m: plain.loss(p, m, batch)[0])
        m = batch.packed.microbatches
        count = int(batch.packed.count)
        return sum(
            found(params, jax.tree.map(lambda a, i=i: jnp.asarray(a[i]), m)) for i in range(count)
        )

    @jax.jit
    def rl_penalty(params, microbatch):
        told = router_replay.router_inputs(of_rl, microbatch, batch.mask)
        forward = predict.ForwardSpec(network, batch.tokens, lambda microbatch: told)
        routed = forward.run(params, microbatch).routed
        return router_replay.router_loss(of_rl, routed, batch.mask)[0]

    first = lambda p: [  # noqa: E731
        rl_penalty(p, jax.tree.map(lambda a, i=i: jnp.asarray(a[i]), batch.packed.microbatches))
        for i in range(int(batch.packed.count))
    ]
    without = dataclasses.replace(config, router=RouterLossConfig())
    extra = losses(params, config) - losses(params, without)
    np.testing.assert_allclose(extra, sum(first(params)), rtol=2e-4)

    for step in (1, 2):
        before = jax.device_get(state.params["layers"]["1"]["mlp"]["router"]["selection_bias"])
        state, found = jax.jit(
            lambda state: update.with_router_update(
                ROUTER,
                SHAPE,
                *update.optimizer_step(
                    state, trainer.optimizer, 2, batch.packed, objective.forward_spec(batch),
                    lambda p, m: objective.loss(p, m, batch), "float32", job,
                ),
                job,
            )
        )(state)  # fmt: skip
        after = state.params["layers"]["1"]["mlp"]["router"]["selection_bias"]
        load = np.array([found[f"router/load/{e:03d}"] for e in range(4)])
        np.testing.assert_allclose(after - before, 0.25 * np.sign(1 - load)[None], atol=1e-6)
        assert found["router/balance_loss"] > 0 and "routers" not in found, step
    measured = objectives.make_metrics_program(objective)(state.params, {}, batch)
    assert not any(name.startswith("router") for name in measured)
