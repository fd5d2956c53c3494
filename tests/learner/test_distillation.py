"""What teachers say of samples, and what the policy learns of it, against dense arithmetic."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxrl_llm.config import (
    AlgorithmConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    RLConfig,
    RLTrainerConfig,
    RolloutConfig,
)
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.config.rollout_data import DistillationConfig, TeacherConfig
from jaxrl_llm.data.tokenizer import character_tokenizer
from jaxrl_llm.learner import (
    batches,
    distillation,
    estimate,
    job_models,
    optimizer,
    predict,
    update,
    weights,
)
from jaxrl_llm.learner.weights import FrozenModels, TeacherModel
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.types import Estimates, Prompt, Rewards, Rollouts, TeacherLogProbs

B, T, K = 6, 16, 4
VOCAB = 104
LOSSES = ("reverse_kl", "k3", "forward_kl", "jsd")
BETA = 0.3
TEMPERATURE = 0.8


@pytest.fixture(autouse=True)
def plain_steps(monkeypatch):
    """The optimizer's state after an update is its gradient."""
    transformation = optax.GradientTransformation(
        init=optax.tree.zeros_like,
        update=lambda gradients, state, params: (optax.tree.scale(-1.0, gradients), gradients),
    )
    monkeypatch.setattr(optimizer, "make_optimizer", lambda *settings: transformation)


def config_of(loss, teachers=("all",), **trainer):
    sources = {"all": "*", "sums": "sums"}
    return RLConfig(
        model=ModelConfig(
            hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_size=8, mlp_size=48
        ),
        algorithm=AlgorithmConfig(kl_in="none", samples_per_prompt=2),
        data=DataConfig(max_prompt_tokens=4),
        rollout=RolloutConfig(max_response_tokens=T - 4, temperature=TEMPERATURE),
        trainer=RLTrainerConfig(
            **{"max_tokens_per_microbatch": 1024, "minibatch_size": B, "prompts_per_step": 3}
            | trainer
        ),
        distillation=DistillationConfig(
            teachers={n: TeacherConfig(path="unread", data_source=sources[n]) for n in teachers},
            loss=loss,
            coef=0.5,
            jsd_beta=BETA,
            top_k=K,
        ),
    )


def rollouts(sources=("sums", "words", "sums")):
    random = np.random.default_rng(1)
    lengths = random.integers(8, T + 1, B).astype(np.int32)
    columns = np.arange(T)
    inside = columns < lengths[:, None]
    tokens = np.where(inside, random.integers(0, VOCAB, (B, T)), 0).astype(np.int32)
    tokens[1::2, :4] = tokens[::2, :4]
    mask = inside & (columns >= 4)
    zeros = np.zeros((B, T), np.float32)
    groups = np.repeat(np.arange(3, dtype=np.int32), 2)
    prompts = tuple(Prompt((1,), "", source, "", {}, i) for i, source in enumerate(sources))
    return Rollouts(
        tokens, mask, zeros, mask.astype(np.int32), lengths, groups, mask[:, -1], prompts, ()
    )


def other(models, **sizes):
    """A network of another shape with the same vocabulary, and its weights."""
    shape = dataclasses.replace(models.policy.shape, hidden_size=24, num_layers=1, **sizes)
    network = Network(shape, head="lm", param_dtype="float32", compute_dtype="float32")
    return network, tiny.params(network, seed=3, scale=4.0)


def run_on(config, mesh=None, teacher=None):
    """Returns models, frozen weights and first state; teachers are of another shape."""
    mesh = mesh or tiny.make_mesh()
    models = job_models.make_models(config, dict.fromkeys(ROLES, mesh))
    network, params = teacher or other(models)
    teachers = {
        name: TeacherModel(network, tiny.sharded(params, mesh, network))
        for name in config.distillation.teachers
    }
    policy = tiny.sharded(tiny.params(models.policy, scale=4.0), mesh, models.policy)
    state = weights.initial_state(config, models, policy)
    return models, FrozenModels(teachers=teachers), state


def dense(network, params, step):
    """Log-probs of the whole vocabulary in place of each token, [B, T, V]."""
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    hidden = tiny.hidden_states(network)(params, step.tokens, positions, np.ones((B, T), np.int32))
    log_p = jax.nn.log_softmax(network.logits(params, hidden) / TEMPERATURE)
    return jnp.pad(log_p[:, :-1], ((0, 0), (1, 0), (0, 0)))


def sampled(log_p, step):
    return jnp.take_along_axis(log_p, step.tokens[..., None], -1)[..., 0]


def learned(config, models, frozen, state, step, advantage=0.0):
    """Returns the policy's gradient in one update on a step, and its metrics."""
    clock, zeros = Clock(), np.zeros((B, T), np.float32)
    step = distillation.teacher_scorer(config, models, frozen)(step, clock)
    predictions, step = predict.predictor(config, models, frozen)(state, step, clock)
    mask = step.response_mask
    given = np.where(mask, advantage, 0.0).astype(np.float32)
    estimates = Estimates(zeros, given, zeros, zeros, mask, np.ones_like(zeros))
    batch = batches.assemble(step, predictions, estimates)
    learn = update.make_updater(config, models, {}, state)
    order = batches.update_order(config, B, jax.random.key(0))
    after, metrics = learn(1, state, step, batch, order, clock)
    return jax.tree.map(np.asarray, after.policy.opt_state), metrics


def divergence(config, log_p, teacher, step, advantage):
    """The loss of an update of the policy that sampled, from all log-probs."""
    loss, mask = config.distillation.loss, step.response_mask
    ours, theirs = sampled(log_p, step), sampled(teacher, step)
    now = jax.lax.stop_gradient(ours)
    ratio, each = jnp.exp(ours - now), 0.0
    if loss == "reverse_kl":
        advantage = advantage + 0.5 * (theirs - now)
    elif loss == "k3":
        each = jnp.minimum(jnp.exp(theirs - ours) - (theirs - ours) - 1.0, 10.0)
    else:
        best, tokens = jax.lax.top_k(teacher, K)
        listed = (tokens[..., None] == jnp.arange(VOCAB)).any(-2)
        p, q = jnp.exp(best), jnp.take_along_axis(log_p, tokens, -1)
        p_rest = 1.0 - p.sum(-1)
        q_rest = jnp.log(jnp.where(listed, 0.0, jnp.exp(log_p)).sum(-1))
        log_p_all = jnp.concatenate([best, jnp.log(p_rest)[..., None]], -1)
        log_q_all = jnp.concatenate([q, q_rest[..., None]], -1)
        p, q = jnp.exp(log_p_all), jnp.exp(log_q_all)
        m = jnp.log(BETA * p + (1 - BETA) * q)
        jsd = BETA * p * (log_p_all - m) + (1 - BETA) * q * (log_q_all - m)
        each = jnp.sum(jsd if loss == "jsd" else p * (log_p_all - log_q_all), -1)
    total = -ratio * advantage + 0.5 * each
    return jnp.sum(jnp.where(mask, total, 0.0)) / mask.sum()


@pytest.mark.parametrize(
    "loss, epochs",
    [
        pytest.param(
            loss,
            epochs,
            id=f"{name}-{loss}",
            marks=pytest.mark.slow if epochs == 2 or loss != "forward_kl" else (),
        )
        for epochs, name in ((1, "on policy"), (2, "asked before"))
        for loss in LOSSES
    ],
)
def test_an_update_is_the_gradient_of_the_divergence(loss, epochs, monkeypatch):
    """Of reward and teacher together; the first of two equal updates where there are two."""
    config = config_of(loss, epochs=epochs)
    models, frozen, state = run_on(config)
    step, params = rollouts(), tiny.params(models.policy, scale=4.0)
    if epochs == 2:
        order = batches.update_order(config, len(step.lengths), jax.random.key(0))
        one = list(batches.minibatches(models.packer, step, order[:1]))
        monkeypatch.setattr(update, "minibatches", lambda *_: one)
    assert predict.is_on_policy(config) == (epochs == 1)
    gradient, metrics = learned(config, models, frozen, state, step, advantage=0.3)
    network, of_teacher = other(models)
    teacher = dense(network, of_teacher, step)

    def total(params):
        return divergence(config, dense(models.policy, params, step), teacher, step, 0.3)

    value, want = jax.jit(jax.value_and_grad(total))(params)
    error = optax.tree.norm(optax.tree.sub(gradient, jax.tree.map(np.asarray, want)))
    assert float(error) <= 1e-5 * float(optax.tree.norm(want))
    if loss != "reverse_kl":
        assert metrics["actor/loss"] == pytest.approx(float(value), rel=1e-4)
    mask = step.response_mask
    if config.distillation.compares_lists:
        best = np.exp(jax.lax.top_k(teacher, K)[0]).sum(-1)
        assert metrics["distillation/teacher_mass"] == pytest.approx(best[mask].mean(), rel=1e-5)
    else:
        log_p = dense(models.policy, params, step)
        gap = np.asarray(sampled(log_p, step) - sampled(teacher, step))[mask].mean()
        assert metrics["distillation/reverse_kl"] == pytest.approx(gap, rel=1e-4)


@pytest.mark.parametrize(
    "loss", ["k3", *(pytest.param(loss, marks=pytest.mark.slow) for loss in LOSSES if loss != "k3")]
)
def test_a_teacher_that_is_the_policy_teaches_nothing(loss):
    config = config_of(loss)
    models, _, _ = run_on(config)
    same = models.policy, tiny.params(models.policy, scale=4.0)
    models, frozen, state = run_on(config, teacher=same)
    gradient, metrics = learned(config, models, frozen, state, rollouts())
    assert float(optax.tree.norm(gradient)) < 1e-5
    name = f"distillation/{loss if loss in ('forward_kl', 'jsd') else 'reverse_kl'}"
    assert metrics[name] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl", "jsd"])
def test_meshes_and_packings_are_equal(loss):
    config = config_of(loss)
    step, found = rollouts(), []
    small = dataclasses.replace(
        config, trainer=dataclasses.replace(config.trainer, max_tokens_per_microbatch=2 * T)
    )
    for each, mesh in (
        (config, tiny.make_mesh()),
        (small, tiny.make_mesh()),
        (config, tiny.make_mesh(fsdp=2, tensor=2)),
    ):
        found.append(learned(each, *run_on(each, mesh), step)[0])
    for other_way in found[1:]:
        error = optax.tree.norm(optax.tree.sub(other_way, found[0]))
        assert float(error) <= 1e-5 * float(optax.tree.norm(found[0]))


def test_each_data_source_has_its_teacher():
    """Rows of a source without a teacher are left out; a named source wins over the others."""
    step = rollouts()
    config = config_of("k3", teachers=("sums",))
    models, frozen, _ = run_on(config)
    lessons = distillation.teacher_scorer(config, models, frozen)(step, Clock()).teacher_log_probs
    assert isinstance(lessons, TeacherLogProbs)
    taught = step.response_mask & (np.array([0, 0, 1, 1, 0, 0]) == 0)[:, None]
    np.testing.assert_array_equal(lessons.tokens[..., 0], np.where(taught, step.tokens, -1))
    want = sampled(dense(*other(models), step), step)
    np.testing.assert_allclose(lessons.log_probs[..., 0], np.where(taught, want, 0), atol=1e-5)
    both = config_of("k3", teachers=("all", "sums")).distillation
    assert [both.teacher_for(source) for source in ("sums", "words")] == ["sums", "all"]
    assert config.distillation.teacher_for("words") == ""


def test_equal_rewards_leave_a_signal():
    """A run without a reward takes its updates."""
    rewards = {"training/groups/uniform_share": 1.0}
    zeros = np.zeros((2, 2), np.float32)
    estimates = Estimates(*[zeros] * 4, zeros > 0, zeros)
    for teachers, learns in ((("all",), True), ((), False)):
        check = estimate.signal_check(config_of("k3", teachers=teachers))
        assert check(rewards, estimates) == learns


def test_a_run_needs_no_reward():
    config = config_of("k3")
    models, frozen, state = run_on(config)
    step = rollouts()
    predictions, _ = predict.predictor(config, models, frozen)(state, step, Clock())
    zeros = np.zeros(B, np.float32)
    rewards = Rewards(zeros, {}, {}, zeros, zeros, ({},) * B, 0)
    found, _, _ = estimate.estimator(config, models.mesh)(
        state, step, rewards, predictions, Clock()
    )
    assert not np.asarray(found.advantages).any()


def test_another_vocabulary_is_refused(tmp_path):
    config = config_of("forward_kl")
    models, _, _ = run_on(config)
    teachers = {"all": TeacherConfig(path=str(tmp_path))}

    def checked(tokenizer, **changes):
        checkpoint.save(tmp_path, models.policy, tiny.params(models.policy), tokenizer=tokenizer)
        settings = dataclasses.replace(config.distillation, teachers=teachers, **changes)
        distillation.check_teachers(dataclasses.replace(config, distillation=settings), models)

    checked(character_tokenizer())
    with pytest.raises(ConfigError, match=r"top_k: 500, but there are 104 tokens"):
        checked(character_tokenizer(), top_k=500)
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<more>"])
    said = r"teachers.all.path: .* another vocabulary: 105 tokens, .* '<more>' is token 104"
    wider = dataclasses.replace(models.policy.shape, vocab_size=112)
    models = dataclasses.replace(models, policy=dataclasses.replace(models.policy, shape=wider))
    with pytest.raises(ConfigError, match=said):
        checked(tokenizer)
