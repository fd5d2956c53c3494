"""A session: gradients and updates of the jobs, samples, checkpoints, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_sessions import CONFIG, MODEL, base, close, data, session

from jaxrl_llm.checkpoint.saver import CheckpointError
from jaxrl_llm.config import (
    AlgorithmConfig,
    ConfigError,
    LoraConfig,
    MeshConfig,
    OptimizerConfig,
)
from jaxrl_llm.config.job import SFTConfig
from jaxrl_llm.config.learner import SupervisedTrainerConfig
from jaxrl_llm.learner import gradients, objectives, optimizer, update
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.learner.adamw import AdamWError, AdamWParams
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.objectives import SupervisedBatch
from jaxrl_llm.models import lora as lora_lib
from jaxrl_llm.models.hf import peft_adapter
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.training_api import policy_base
from jaxrl_llm.training_api.loss_functions import LossError
from jaxrl_llm.training_api.training_data import Datum, TrainingDataError, make_batch
from jaxrl_llm.training_api.training_session import TrainingSession, TrainingSessionError
from jaxrl_llm.types import Example, Minibatch

SUMMED = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def test_cross_entropy_has_the_gradient_of_an_sft_job():
    made = session()
    rows = [
        (Example(each.tokens, tuple(i > 2 for i in range(len(each.tokens)))),) for each in data()
    ]
    count = sum(len(each.tokens) - 3 for each in data())
    weighted = [
        Datum(each.tokens, {"weights": [(i > 2) / count for i in range(len(each.tokens))]})
        for each in data()
    ]
    config = SFTConfig(
        model=MODEL, trainer=SupervisedTrainerConfig(max_tokens_per_microbatch=256, batch_size=7)
    )
    models = dataclasses.replace(base().models, policy=made.programs.network)
    objective = objectives.sft(config, models)
    packer = Packer(made._packer.max_tokens, made._packer.num_shards)
    batch = jax.tree.map(jnp.asarray, SupervisedBatch.from_rows(rows, packer))
    params, frozen = made.state.params, base().params

    @jax.jit
    def of_job(params):
        return gradients.loss_and_gradients(
            objective.forward_spec(batch),
            functools.partial(lora_lib.combine_params, frozen),
            params,
            batch.packed,
            lambda p, m: objective.loss(lora_lib.combine_params(frozen, p), m, batch),
            "float32",
        )

    with jax.set_mesh(objective.mesh):
        (loss, _), expected = of_job(params)
    result = made.forward_backward(weighted)
    assert result.loss == pytest.approx(float(loss), rel=1e-6)
    close(made.gradients, expected)


@pytest.mark.slow
def test_a_policy_loss_of_ours_has_the_gradient_of_an_rl_job(monkeypatch):
    """The program of an update of GRPO, with entropy bonus and KL, on the same sequences."""
    kept = optax.GradientTransformation(
        init=optax.tree.zeros_like, update=lambda g, state, params: (optax.tree.zeros_like(g), g)
    )
    monkeypatch.setattr(optimizer, "make_optimizer", lambda *settings: kept)
    algorithm = AlgorithmConfig(
        recipe="grpo",
        entropy_coef=0.1,
        kl_in="loss",
        kl_coef=0.5,
        policy_loss="vanilla",
        loss_args={"dual_clip": 3.0},
    )
    trainer = dataclasses.replace(CONFIG.trainer, epochs=2)  # reads the old log-probs
    made = session(algorithm=algorithm, trainer=trainer)
    with_reference = [
        Datum(
            d.tokens,
            {
                **d.fields,
                "ref_log_probs": d.fields["old_log_probs"] * 0.9,
                "mask": [i > 2 for i in range(len(d.tokens))],
            },
        )
        for d in data()
    ]
    made.forward_backward(with_reference, "algorithm")
    batch = make_batch(with_reference, made._packer, 104, 64)
    rows = {
        "tokens": batch.tokens,
        "lengths": batch.lengths,
        "response_mask": batch.mask,
        "loss_mask": batch.mask,
        **batch.fields,
        "rollout_log_probs": batch.fields["old_log_probs"],
        "correction_weights": np.ones(batch.tokens.shape, np.float32),
    }
    rows = {n: v for n, v in rows.items() if n in {f.name for f in dataclasses.fields(Minibatch)}}
    minibatch = dataclasses.replace(
        Minibatch.zeros(*batch.tokens.shape), **jax.tree.map(jnp.asarray, rows)
    )
    config = made.config
    state = weights_lib.initial_state(config, made._models, base().params)
    policy = dataclasses.replace(
        state.policy,
        params=jax.tree.map(jnp.copy, made.state.params),
        opt_state=optax.tree.zeros_like(made.state.params),
    )
    state = dataclasses.replace(state, policy=policy)
    updater = update.make_updater(config, made._models, base().params, state)
    chosen = updater.replicate_batch(minibatch)
    after, _ = updater.update(state, chosen, batch.packed, jax.random.key(0))
    close(made.gradients, after.policy.opt_state)


@pytest.mark.parametrize(
    "loss", ["ppo", *(pytest.param(n, marks=pytest.mark.slow) for n in SUMMED if n != "ppo")]
)
def test_a_pass_is_the_sum_of_its_parts(loss):
    """Values by hand from the log-probs; gradients of two passes are those of one."""
    made, other = session(), session()
    whole = made.forward_backward(data(), loss)
    parts = [other.forward_backward(data()[i::2], loss) for i in range(2)]
    assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-5)
    close(other.gradients, made.gradients, 2e-6)
    total = 0.0
    for datum, log_probs in zip(data(), whole.log_probs, strict=True):
        weights, a, old = (
            datum.fields[name][1:] for name in ("weights", "advantages", "old_log_probs")
        )
        p = log_probs[1:].astype(np.float64)
        ratios = np.exp(np.clip(p - old, -20, 20))
        clipped = np.clip(ratios, 0.8, 1.2)
        by_hand = {
            "cross_entropy": -weights * p,
            "importance_sampling": -a * ratios,
            "ppo": -np.minimum(a * ratios, a * clipped),
            "cispo": -clipped * a * p,
            "dro": 0.025 * (p - old) ** 2 - a * p,
        }
        total += by_hand[loss].sum()
    assert whole.loss == pytest.approx(total, rel=2e-5)
    assert made.forward(data(), loss).loss == pytest.approx(whole.loss, rel=1e-6)


@pytest.mark.slow
def test_a_loss_of_the_caller_and_targets_of_its_own():
    made, other = session(), session()

    def mean_square(log_probs, mask, advantages, scale):
        return scale * jnp.sum(jnp.where(mask, advantages * log_probs, 0.0)), {"count": mask.sum()}

    result = made.forward_backward(data(), mean_square, {"scale": 2.0})
    as_weights = [Datum(d.tokens, {"weights": -2.0 * d.fields["advantages"]}) for d in data()]
    expected = other.forward_backward(as_weights)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert result.metrics == {"count": sum(len(d.tokens) - 1 for d in data())}
    close(made.gradients, other.gradients)
    # The last target is no input: a sequence with another last token scores it the same.
    tokens = list(data()[0].tokens)
    changed = [*tokens[:-1], (tokens[-1] + 1) % 50]
    plain = made.log_probs([Datum(changed)])[0]
    scored = made.log_probs([Datum(tokens, targets=changed)])[0]
    np.testing.assert_allclose(scored, plain, atol=1e-6)


@pytest.mark.slow
def test_updates_are_those_of_the_jobs_optimizer():
    """AdamW with numbers that change from step to step, over several steps."""
    made = session()
    expected = jax.tree.map(np.array, made.state.params)
    settings = OptimizerConfig(
        learning_rate=0.01, weight_decay=0.1, beta2=0.99, eps=1e-8, max_grad_norm=0.5
    )
    transformation = optimizer.make_optimizer(settings, 10)
    opt_state = transformation.init(expected)
    params = AdamWParams(0.01, 0.9, 0.99, 1e-8, 0.1, 0.5)
    for step in range(4):
        made.forward_backward(data())
        gradients_now = jax.tree.map(np.array, made.gradients)
        updates, opt_state = transformation.update(gradients_now, opt_state, expected)
        expected = optax.apply_updates(expected, updates)
        metrics = made.optim_step(params)
        assert metrics["grad_norm"] > 0.5 and metrics["skipped_updates"] == 0.0
        close(made.state.params, expected, 2e-6)
        assert made.num_updates == step + 1
    changed = dataclasses.replace(params, learning_rate=0.0)
    made.forward_backward(data())
    made.optim_step(changed)
    close(made.state.params, expected, 2e-6)
    with pytest.raises(TrainingSessionError, match="no gradients; call forward_backward"):
        made.optim_step()


@pytest.mark.slow
def test_samples_have_the_log_probs_of_the_policy_and_follow_its_updates():
    made = session()
    prompts = [d.tokens[:4] for d in data()[:2]]
    params = SamplingParams(8)
    completions = made.sample(prompts, 2, params)
    assert [len(group) for group in completions] == [2, 2]
    for prompt, group in zip(prompts, completions, strict=True):
        for each in group:
            scored = made.log_probs([Datum((*prompt, *each.tokens))])[0]
            np.testing.assert_allclose(scored[len(prompt) :], each.log_probs, atol=2e-5)
    again = made.sample(prompts, 2, params, seed=1)
    assert [[c.tokens for c in g] for g in made.sample(prompts, 2, params, seed=1)] == [
        [c.tokens for c in g] for g in again
    ]
    sampled = Datum((*prompts[0], *completions[0][0].tokens), {"weights": [0.0] * 4 + [1.0] * 8})
    before = made.log_probs([sampled])[0][4:].sum()
    for _ in range(10):
        made.forward_backward([sampled])
        made.optim_step(AdamWParams(learning_rate=0.02))
    assert made.log_probs([sampled])[0][4:].sum() > before + 1.0
    (after,) = made.sample(prompts[:1], 1, params)[0]
    scored = made.log_probs([Datum((*prompts[0], *after.tokens))])[0]
    np.testing.assert_allclose(scored[4:], after.log_probs, atol=2e-5)


def test_a_checkpoint_continues_bit_for_bit(tmp_path):
    made = session()
    made.forward_backward(data())
    made.optim_step()
    made.save(tmp_path / "a")
    made.export_adapters(tmp_path / "peft")
    network = made.programs.network
    shardings = jax.tree.map(lambda a: a.sharding, made.state.params)
    stored = peft_adapter.load(tmp_path / "peft", network, shardings)
    jax.tree.map(np.testing.assert_array_equal, stored, made.state.params)
    other = session(seed=5)
    other.forward_backward(data())
    other.load(tmp_path / "a")
    assert not other.has_gradients
    for each in (made, other):
        each.forward_backward(data(9, 1))
        each.optim_step()
    jax.tree.map(np.testing.assert_array_equal, made.state, other.state)
    other.load(tmp_path / "a", optimizer=False)
    assert other.num_updates == 0 and not np.any(jax.tree.leaves(other.state.opt_state.mu)[0])
    with pytest.raises(CheckpointError, match="exists"):
        made.save(tmp_path / "a")
    with pytest.raises(CheckpointError):
        TrainingSession(base(), LoraConfig(rank=2)).load(tmp_path / "a")


@pytest.mark.slow
def test_sessions_over_one_base_do_not_touch_each_other():
    first, second = session(1), session(2)
    alone = session(1)
    for each in (first, second, first, second):
        each.forward_backward(data())
        each.optim_step()
    for _ in range(2):
        alone.forward_backward(data())
        alone.optim_step()
    jax.tree.map(np.testing.assert_array_equal, first.state, alone.state)


REFUSED = [
    ([], "data: empty"),
    ([Datum((1,))], r"data\[0\]: 1 tokens; a sequence has 2 to"),
    ([Datum((1, 2, 10**6))], r"data\[0\].tokens: 1000000 is not a token"),
    ([Datum((1, 2), targets=(1,))], r"targets: 1 for 2 tokens"),
    ([Datum((1, 2), {"weights": [1.0]})], r"fields\['weights'\]: expected 2 numbers"),
    ([Datum((1, 2), {"weights": [1.0, np.nan]})], r"holds nan, not a float32"),
    ([Datum((1, 2), {"weights": [1, 1]}), Datum((1, 2))], r"data\[1\]: has the fields none"),
]


def test_bad_data_losses_and_numbers_are_refused():
    made = session()
    for bad, message in REFUSED:
        with pytest.raises(TrainingDataError, match=message):
            made.forward_backward(bad)
    plain = [Datum((1, 2))]
    with pytest.raises(LossError, match="data have no 'weights'; add it"):
        made.forward_backward(plain)
    with pytest.raises(LossError, match="loss 'pppo': not known; use cross_entropy"):
        made.forward_backward(plain, "pppo")
    with pytest.raises(LossError, match="no setting 'clip'; it has clip_low_threshold"):
        made.forward_backward(data(), "ppo", {"clip": 0.2})
    with pytest.raises(LossError, match="only jobs do"):
        made.forward_backward(data(), "clip_cov")
    assert not made.has_gradients
    with pytest.raises(AdamWError, match=r"beta2 is 1\.0; use one in"):
        made.optim_step(AdamWParams(beta2=1.0))
    with pytest.raises(ConfigError, match=r"config\.mesh\.on_host: only jobs support it"):
        policy_base.check_config(
            dataclasses.replace(CONFIG, mesh=MeshConfig(on_host=("optimizer",)))
        )
