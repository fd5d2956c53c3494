"""One update: the plain gradient, however it is cut, packed, padded and split."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxrl_llm.config import (
    AlertsConfig,
    AlgorithmConfig,
    ModelConfig,
    RLConfig,
    RLTrainerConfig,
    RolloutConfig,
)
from jaxrl_llm.config.logging_config import AlertConfig
from jaxrl_llm.config.placement import ROLES
from jaxrl_llm.config.recipes import AGGREGATIONS
from jaxrl_llm.learner import job_models, optimizer, predict, update, weights
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.packing import packed_batch, row_layout
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.types import Minibatch

B, T = 10, 24
ONE = tiny.make_mesh()
PLAIN = AlgorithmConfig(policy_loss="vanilla", loss_args={"dual_clip": float("inf")})
# Everything at once: entropy and KL with gradient, means of sequences, a critic.
FULL = AlgorithmConfig(
    advantage="gae",
    aggregation="seq-mean-token-mean",
    entropy_coef=0.1,
    kl_in="loss",
    kl_coef=0.5,
)
CHOSEN = np.array([0, 2, 3, 4, 5, 7, 8, 9])
# Tokens of like chances: at eight times the usual scale a network makes 1e-6 of a gradient out of
# the last bits of its logits, and those differ with the processor and the number of rows.
params_of = functools.partial(tiny.params, scale=2.0)


@pytest.fixture(autouse=True)
def plain_steps(monkeypatch):
    """Parameters move by minus the gradient, and the optimizer's state is the gradient itself."""
    transformation = optax.GradientTransformation(
        init=optax.tree.zeros_like,
        update=lambda gradients, state, params: (optax.tree.scale(-1.0, gradients), gradients),
    )
    monkeypatch.setattr(optimizer, "make_optimizer", lambda *settings: transformation)


class Tiny(NamedTuple):
    """A run on a mesh: what it is, and its networks."""

    config: RLConfig
    models: Models


def tiny_run(mesh, algorithm, epochs=2, alerts=AlertsConfig(), **settings):  # noqa: B008
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    config = RLConfig(
        model=ModelConfig(**sizes, head_size=8, mlp_size=48, **settings),
        algorithm=algorithm,
        trainer=RLTrainerConfig(max_tokens_per_microbatch=1024, epochs=epochs),
        rollout=RolloutConfig(temperature=0.8),
        alerts=alerts,
    )
    return Tiny(config, job_models.make_models(config, dict.fromkeys(ROLES, mesh)))


def updater_of(run, state):
    return update.make_updater(run.config, run.models, {}, state)


def initial(run, policy=None):
    models = run.models
    first = params_of(models.policy) if policy is None else policy
    first = tiny.sharded(first, models.mesh, models.policy)
    state = weights.initial_state(run.config, models, first)
    if not state.critic.params:
        return state
    score = 0.1 * np.random.default_rng(5).standard_normal((1, 32)).astype(np.float32)
    critics = {}
    for name in ("critic", "cost_critic"):
        role = getattr(state, name)
        if role.params:
            placed = jax.device_put(score, role.params["score"].sharding, may_alias=False)
            critics[name] = dataclasses.replace(role, params=role.params | {"score": placed})
    return dataclasses.replace(state, **critics)


@functools.cache
def lengths():
    return np.random.default_rng(1).integers(4, T + 1, B).astype(np.int32)


def batch_of(network, width=T):
    """Random sequences; the policy has moved a little since they were sampled."""
    random = np.random.default_rng(1)
    normal = lambda scale: random.normal(0, scale, (B, T)).astype(np.float32)  # noqa: E731
    columns = np.arange(T)
    inside = columns < lengths()[:, None]
    tokens = np.where(inside, random.integers(0, network.shape.vocab_size, (B, T)), 0)
    mask = inside & (columns >= 2)
    loss_mask = mask & (random.random((B, T)) < 0.9)
    now = np.asarray(
        tiny.teacher_forced(
            tokens.astype(np.int32), np.full(B, 0.8, np.float32), network, params_of(network)
        )
    )
    fields = {
        "tokens": tokens.astype(np.int32),
        "response_mask": mask,
        "loss_mask": loss_mask,
        "old_log_probs": now + normal(0.2),
        "ref_log_probs": now + normal(0.2),
        "rollout_log_probs": now,
        "advantages": normal(1.0),
        "returns": normal(1.0),
        "values": normal(0.3),
        "cost_returns": normal(1.0),
        "cost_values": normal(0.3),
        "correction_weights": np.exp(normal(0.1)),
        "proximal_shares": np.zeros((B, T), np.float32),
    }
    padded = {k: np.pad(v, ((0, 0), (0, width - T))) for k, v in fields.items()}
    return Minibatch(lengths=lengths(), **padded)


def packed_of(mesh, budget, width=T):
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    return Packer(budget, shards).pack(lengths(), CHOSEN, width=width)


def learned(run, *, budget=1024, width=T, **settings):
    """Returns the gradients of policy and critic in one update, and its metrics."""
    state = initial(run)
    learn = updater_of(run, state)
    after, metrics = learn.update(
        state,
        learn.replicate_batch(batch_of(run.models.policy, width)),
        packed_of(run.models.mesh, budget, width),
        jax.random.key(3),
        **settings,
    )
    gradients = jax.tree.map(np.asarray, (after.policy.opt_state, after.critic.opt_state))
    # How full the rows are is not of the numbers, but of how they are laid out.
    numbers = {name: float(v) for name, v in metrics.items() if not name.startswith("perf/")}
    return gradients, numbers


def assert_equal_gradients(got, want):
    """Equal to 1e-6 relative, as vectors; and no weight far off behind that."""
    difference = optax.tree.norm(optax.tree.sub(got, want))
    assert float(difference) <= 1e-6 * float(optax.tree.norm(want))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6 * np.abs(theirs).max())


def assert_same(got, want):
    for ours, theirs in zip(got[0], want[0], strict=True):  # policy, critic
        assert_equal_gradients(ours, theirs)
    assert got[1] == pytest.approx(want[1], rel=2e-5, abs=1e-6)


@pytest.fixture(scope="module")
def reference():
    """The update of one device in one microbatch, for each algorithm."""
    found = {}

    def of(algorithm):
        if algorithm not in found:
            found[algorithm] = learned(tiny_run(ONE, algorithm))
        return found[algorithm]

    return of


def test_update_is_the_plain_gradient(reference):
    run = tiny_run(ONE, PLAIN)
    batch, params = batch_of(run.models.policy), params_of(run.models.policy)

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        hidden = tiny.hidden_states(run.models.policy)(
            params, batch.tokens, positions, jnp.ones((B, T), jnp.int32)
        )
        log_p = jax.nn.log_softmax(run.models.policy.logits(params, hidden)[:, :-1] / 0.8)
        log_p = jnp.take_along_axis(log_p, batch.tokens[:, 1:, None], -1)[..., 0]
        ratio = jnp.exp(jnp.pad(log_p, ((0, 0), (1, 0))) - batch.old_log_probs)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        gain = jnp.minimum(ratio * batch.advantages, clipped * batch.advantages)
        mask = batch.loss_mask & np.isin(np.arange(B), CHOSEN)[:, None]
        return -jnp.sum(jnp.where(mask, gain * batch.correction_weights, 0.0)) / mask.sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    (ours, _), metrics = reference(PLAIN)
    assert_equal_gradients(ours, jax.tree.map(np.asarray, gradient))
    assert metrics["actor/loss"] == pytest.approx(float(value), rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
    assert metrics["actor/skipped_updates"] == 0


@pytest.mark.parametrize(
    "algorithm", [pytest.param(PLAIN, id="plain"), pytest.param(FULL, id="full")]
)
@pytest.mark.slow
def test_the_only_update_of_a_step_finds_the_old_log_probs_itself(algorithm):
    """Its gradient is that of the loss which is given them, and nobody else need know them."""
    found = []
    for epochs in (2, 1):
        run = tiny_run(ONE, algorithm, epochs)
        assert predict.is_on_policy(run.config) == (epochs == 1)
        rows = batch_of(run.models.policy)
        old = rows.rollout_log_probs if epochs == 2 else np.full((B, T), np.nan, np.float32)
        rows = dataclasses.replace(rows, old_log_probs=old)
        state = initial(run)
        learn = updater_of(run, state)
        after, metrics = learn.update(
            state, learn.replicate_batch(rows), packed_of(ONE, 4 * T), jax.random.key(3)
        )
        found.append((jax.tree.map(np.asarray, after.policy.opt_state), metrics))
    (want, _), (got, metrics) = found
    # The log-probs given come from another program: rounding of numbers near 10 is in the ratio.
    assert float(optax.tree.norm(optax.tree.sub(got, want))) < 5e-6 * float(optax.tree.norm(want))
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["actor/entropy"] > 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_in": "reward"},
        {"correction": "token"},
        {"rejections": ("token_k1",), "rejection_lows": (0.5,), "rejection_highs": (2.0,)},
        {"old_log_probs": "rollout"},
        {"old_log_probs": "interpolate"},
        {"entropy_share": 0.2},
        {"advantage": "optimal_token_baseline"},
        {"policy_loss": "kl_cov"},
        {"advantage": "gae", "safe": True},
    ],
    ids=str,
)
def test_readers_of_old_log_probs_are_not_on_policy(settings):
    assert predict.is_on_policy(RLConfig())
    assert not predict.is_on_policy(RLConfig(algorithm=AlgorithmConfig(**settings)))
    assert not predict.is_on_policy(RLConfig(trainer=RLTrainerConfig(minibatch_size=8)))
    watched = AlertsConfig(log_prob_difference=AlertConfig(limit=0.1, action="skip"))
    assert not predict.is_on_policy(RLConfig(alerts=watched))


@pytest.mark.slow
def test_the_cut_does_not_matter(reference):
    run = tiny_run(ONE, FULL)
    packed = packed_of(ONE, T)
    assert (packed.microbatches.rows.shape[0], int(packed.count)) == (8, 5)  # three do nothing
    assert_same(learned(run, budget=T), reference(FULL))


CLIP_COV = AlgorithmConfig(policy_loss="clip_cov", loss_args={"share": 0.1, "low": 0.0})


# Prompts of 9, 5, 1 and 3 tokens with 4, 3, 2 and 1 samples, of which CHOSEN takes some.
GROUPS = np.repeat(np.arange(4), [4, 3, 2, 1])
PROMPTS = np.array([9, 5, 1, 3])[GROUPS]


def grouped_batch(network):
    """`batch_of`, the samples of a prompt beginning alike; some tokens of a response not chosen."""
    batch = batch_of(network)
    columns, random = np.arange(T), np.random.default_rng(2)
    of_prompt = columns < PROMPTS[:, None]
    firsts = np.searchsorted(GROUPS, GROUPS)
    # Of the last sequence of the first group nothing but one token follows the prompt; none is
    # so long that its queries see every block of a row.
    long = np.clip(lengths(), PROMPTS + 2, 2 * T // 3)
    long[3] = PROMPTS[3] + 1
    drawn = random.integers(0, network.shape.vocab_size, (B, T))
    tokens = np.where(of_prompt, drawn[firsts], drawn) * (columns < long[:, None])
    mask = (columns < long[:, None]) & ~of_prompt & (random.random((B, T)) < 0.8)
    mask[np.arange(B), PROMPTS] = True
    now = np.asarray(
        tiny.teacher_forced(
            tokens.astype(np.int32), np.full(B, 0.8, np.float32), network, params_of(network)
        )
    )
    return dataclasses.replace(
        batch,
        tokens=tokens.astype(np.int32),
        lengths=long.astype(np.int32),
        response_mask=mask,
        loss_mask=mask & (random.random((B, T)) < 0.9),
        rollout_log_probs=now,
        old_log_probs=now + random.normal(0, 0.2, (B, T)).astype(np.float32),
    )


@pytest.mark.parametrize(
    "sizes, budget, algorithm",
    [
        ({}, 2 * T, FULL),
        pytest.param({}, 1024, FULL, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tensor": 2, "data": 2}, 3 * T, FULL, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2}, 2 * T, CLIP_COV, marks=pytest.mark.slow),
    ],
    ids=["microbatches", "whole", "mesh", "selection"],
)
def test_a_prompt_read_once_teaches_the_same(sizes, budget, algorithm, monkeypatch):
    """Policy's and critic's gradients of rows in which samples share their prompt's tokens."""
    monkeypatch.setattr(row_layout, "KEY_BLOCK", 4)
    run = tiny_run(tiny.make_mesh(**sizes), algorithm)
    batch = grouped_batch(run.models.policy)
    alike = packed_batch.shared_prefixes(batch.tokens, batch.lengths, batch.response_mask, GROUPS)
    np.testing.assert_array_equal(alike.lengths, PROMPTS)
    shards = run.models.mesh.shape["data"] * run.models.mesh.shape["fsdp"]
    found, tokens, blocks = [], [], []
    for parity in (0, 1_000):
        packer = Packer(budget, shards, attention_parity=parity)
        packed = packer.pack(
            batch.lengths, CHOSEN, width=T, scored=batch.response_mask, common=alike
        )
        state = initial(run)
        learn = updater_of(run, state)
        after, metrics = learn.update(
            state, learn.replicate_batch(batch), packed, jax.random.key(3)
        )
        gradients = jax.tree.map(np.asarray, (after.policy.opt_state, after.critic.opt_state))
        numbers = {k: float(v) for k, v in metrics.items() if not k.startswith("perf/")}
        found.append((gradients, numbers))
        tokens.append(int((packed.microbatches.segment_ids != 0).sum()))
        blocks.append(packed.microbatches.key_blocks.shape[-1])
        assert 4 * blocks[-1] < packed.microbatches.segment_ids.shape[-1]
    assert blocks[0] == 0 < blocks[1]
    assert tokens[1] < tokens[0] == batch.lengths[CHOSEN].sum()
    assert_same(found[1], found[0])


@pytest.mark.slow
def test_padding_does_not_matter(reference):
    run = tiny_run(ONE, FULL)
    # Wider rows hold more sequences each, too.
    assert_same(learned(run, width=2 * T), reference(FULL))


def test_mesh_cut_and_padding_together_do_not_matter(reference):
    """Each alone is a slow test; where this one fails, they say which."""
    run = tiny_run(tiny.make_mesh(fsdp=2, tensor=2), FULL)
    assert int(packed_of(run.models.mesh, 2 * T, 2 * T).count) > 1
    assert_same(learned(run, budget=2 * T, width=2 * T), reference(FULL))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "sequence": 2}], ids=str)
def test_the_mesh_does_not_matter(sizes, reference):
    run = tiny_run(tiny.make_mesh(**sizes), FULL)
    assert_same(learned(run, budget=2 * T), reference(FULL))


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy_loss, loss_args",
    [
        ("clip_cov", {"share": 0.1, "low": 0.0, "high": 9.0}),
        ("kl_cov", {"share": 0.1, "coef": 5.0}),
        ("m2po", {"budget": 0.01}),
    ],
    ids=["clip_cov", "kl_cov", "m2po"],
)
def test_selection_looks_at_the_whole_minibatch(policy_loss, loss_args, reference):
    algorithm = AlgorithmConfig(policy_loss=policy_loss, loss_args=loss_args)
    run = tiny_run(tiny.make_mesh(fsdp=2), algorithm)
    assert_same(learned(run, budget=T), reference(algorithm))
    # The choice is felt: it is not the loss without one.
    chosen, _ = reference(algorithm)
    unchosen, _ = reference(PLAIN)
    assert (
        np.abs(chosen[0]["embed"] - unchosen[0]["embed"]).max()
        > 1e-3 * np.abs(unchosen[0]["embed"]).max()
    )


OTHERS = {
    "vespo": AlgorithmConfig(policy_loss="vespo", off_policy_threshold=0.05),
    "echo": AlgorithmConfig(observation_coef=0.5, kl_in="loss", kl_unbiased=True),
    "interpolated": AlgorithmConfig(old_log_probs="interpolate", policy_loss="cispo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("sizes", [{}, {"data": 2, "fsdp": 2}])
def test_other_terms_do_not_depend_on_the_cut_or_the_mesh(algorithm, sizes, reference):
    run = tiny_run(tiny.make_mesh(**sizes), algorithm)
    assert_same(learned(run, budget=2 * T), reference(algorithm))


@pytest.mark.slow
def test_interpolated_log_probs_are_between_the_engine_and_the_policy(monkeypatch):
    """At a share of 0 they are the engine's; at 1 the policy's own, with a ratio of 1."""
    algorithm = AlgorithmConfig(old_log_probs="interpolate")
    run = tiny_run(ONE, algorithm)
    assert not predict.scores_policy(run.config) and not predict.is_on_policy(run.config)
    rows = batch_of(run.models.policy)
    moved = rows.rollout_log_probs - 0.4
    kl = {}
    for share in (0.0, 0.5, 1.0):
        shares = np.full((B, T), share, np.float32)
        old = np.full((B, T), np.nan, np.float32)
        batch = dataclasses.replace(
            rows, rollout_log_probs=moved, old_log_probs=old, proximal_shares=shares
        )
        state = initial(run)
        learn = updater_of(run, state)
        _, metrics = learn.update(
            state, learn.replicate_batch(batch), packed_of(ONE, 4 * T), jax.random.key(3)
        )
        kl[share] = float(metrics["actor/ppo_kl"])
    assert kl == pytest.approx({0.0: -0.4, 0.5: -0.2, 1.0: 0.0}, abs=1e-5)


@pytest.mark.slow
def test_a_correction_weighs_by_interpolated_log_probs():
    """Every token became likelier by 0.4: half of it, a weight of exp(0.2), and at most 1.1."""
    found = {}
    for name, high in (("none", 2.0), ("token", 2.0), ("token", 1.1)):
        algorithm = AlgorithmConfig(
            old_log_probs="interpolate",
            policy_loss="reinforce",
            correction=name,
            correction_high=high,
        )
        run = tiny_run(ONE, algorithm)
        rows = batch_of(run.models.policy)
        rows = dataclasses.replace(
            rows,
            rollout_log_probs=rows.rollout_log_probs - 0.4,
            proximal_shares=np.full((B, T), 0.5, np.float32),
        )
        state = initial(run)
        learn = updater_of(run, state)
        after, _ = learn.update(
            state, learn.replicate_batch(rows), packed_of(ONE, 4 * T), jax.random.key(3)
        )
        found[name, high] = np.asarray(after.policy.opt_state["embed"])
    plain = found["none", 2.0]
    for high, weight in ((2.0, np.exp(0.2)), (1.1, 1.1)):
        np.testing.assert_allclose(found["token", high], weight * plain, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("limit, skipped", [(0.5, 1), (5.0, 0)])
def test_an_update_beyond_the_kl_alert_is_not_taken(limit, skipped):
    alerts = AlertsConfig(kl=AlertConfig(limit=limit, action="skip"))
    run = tiny_run(tiny.make_mesh(fsdp=2), PLAIN, alerts=alerts)
    batch, packed = batch_of(run.models.policy), packed_of(run.models.mesh, 1024)
    key = jax.random.key(0)
    batch = dataclasses.replace(batch, old_log_probs=batch.old_log_probs + 1.0)
    state = initial(run)
    step = updater_of(run, state)
    before = jax.tree.map(np.array, state.policy)
    state, metrics = step.update(state, step.replicate_batch(batch), packed, key)
    assert 0.5 < metrics["actor/ppo_kl"] < 5.0
    assert metrics["actor/skipped_updates"] == skipped
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), state.policy, before)
    assert jax.tree.all(same) == bool(skipped)


def test_non_finite_update_changes_nothing():
    algorithm = dataclasses.replace(FULL, safe=True, kl_in="none", entropy_coef=0.0)
    run = tiny_run(tiny.make_mesh(fsdp=2), algorithm)
    batch, packed = batch_of(run.models.policy), packed_of(run.models.mesh, 1024)
    key = jax.random.key(0)
    row, column = CHOSEN[1], int(np.flatnonzero(batch.loss_mask[CHOSEN[1]])[0])
    state = initial(run)
    step = updater_of(run, state)
    before = jax.tree.map(np.array, state)

    def spoiled(name, row):
        values = getattr(batch, name).copy()
        values[row, column] = np.nan
        return dataclasses.replace(batch, **{name: values})

    state, metrics = step.update(
        state, step.replicate_batch(spoiled("advantages", row)), packed, key
    )
    assert metrics["actor/skipped_updates"] == 1
    assert metrics["critic/skipped_updates"] == metrics["cost_critic/skipped_updates"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.policy, before.policy)
    for name in ("critic", "cost_critic"):
        role = getattr(state, name)
        assert role.num_updates == 1
        assert not np.array_equal(role.params["embed"], getattr(before, name).params["embed"])

    moved = jax.tree.map(np.array, state)
    state, metrics = step.update(state, step.replicate_batch(spoiled("returns", row)), packed, key)
    assert metrics["critic/skipped_updates"] == 1
    assert metrics["actor/skipped_updates"] == metrics["cost_critic/skipped_updates"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.critic, moved.critic)
    assert (state.policy.num_updates, state.cost_critic.num_updates) == (1, 2)

    # Rows that are not of this minibatch are not looked at, whatever they hold.
    clean, _ = step.update(initial(run), step.replicate_batch(batch), packed, key)
    beside, metrics = step.update(
        initial(run), step.replicate_batch(spoiled("advantages", 1)), packed, key
    )
    assert 1 not in CHOSEN
    jax.tree.map(np.testing.assert_array_equal, beside.policy.params, clean.policy.params)

    # While critics warm up the policy rests.
    state, metrics = step.update(
        initial(run), step.replicate_batch(batch), packed, key, train_policy=False
    )
    jax.tree.map(np.testing.assert_array_equal, state.policy, before.policy)
    jax.tree.map(np.testing.assert_array_equal, state.critic, clean.critic)
    assert not any(name.startswith("actor/") for name in metrics)


def test_critic_step_is_the_plain_gradient(reference):
    run = tiny_run(ONE, FULL)
    batch, params = batch_of(run.models.policy), initial(run).critic.params

    def loss(params):
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        hidden = tiny.hidden_states(run.models.value)(
            params, batch.tokens, positions, jnp.ones((B, T), jnp.int32)
        )
        values = jnp.pad((hidden @ params["score"][0])[:, :-1], ((0, 0), (1, 0)))
        near = jnp.clip(values, batch.values - 0.5, batch.values + 0.5)
        error = jnp.maximum((values - batch.returns) ** 2, (near - batch.returns) ** 2)
        mask = batch.loss_mask & np.isin(np.arange(B), CHOSEN)[:, None]
        means = jnp.sum(jnp.where(mask, error, 0.0), 1) / jnp.maximum(mask.sum(1), 1)
        return 0.5 * means.sum() / mask.any(1).sum()

    gradient = jax.jit(jax.grad(loss))(params)
    (_, ours), _ = reference(FULL)
    assert_equal_gradients(ours, jax.tree.map(np.asarray, gradient))


@pytest.mark.parametrize(
    "aggregation",
    ["token-mean", *(pytest.param(a, marks=pytest.mark.slow) for a in AGGREGATIONS[1:])],
)
def test_truncated_responses_teach_as_if_they_were_not_in_the_minibatch(aggregation):
    """The gradients of policy and critic, and the counts that losses are divided by."""
    algorithm = dataclasses.replace(FULL, aggregation=aggregation, mask_truncated=True)
    run = tiny_run(ONE, algorithm)
    batch, kept = batch_of(run.models.policy), np.isin(np.arange(B), CHOSEN[::2])
    masked = dataclasses.replace(batch, loss_mask=batch.loss_mask & kept[:, None])

    def gradients(batch, chosen):
        state = initial(run)
        learn = updater_of(run, state)
        packed = Packer(1024, 1).pack(lengths(), chosen, width=T)
        after, _ = learn.update(state, learn.replicate_batch(batch), packed, jax.random.key(3))
        return jax.tree.map(np.asarray, (after.policy.opt_state, after.critic.opt_state))

    ours, theirs = gradients(masked, CHOSEN), gradients(batch, CHOSEN[::2])
    for got, want in zip(ours, theirs, strict=True):
        assert_equal_gradients(got, want)


@pytest.mark.slow
def test_bfloat16_parameters_sum_their_gradients_in_float32(monkeypatch):
    """Eight microbatches or one: the sum is rounded once, when the parameters move."""
    found = {}

    def keep(transformation, gradients, *rest, **settings):
        found[len(found)] = jax.tree.map(lambda a: a.dtype, gradients)
        return apply(transformation, gradients, *rest, **settings)

    apply = optimizer.apply_if_finite
    monkeypatch.setattr(optimizer, "apply_if_finite", keep)
    run = tiny_run(ONE, PLAIN, param_dtype="bfloat16")
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params_of(run.models.policy))
    state = initial(run, narrow)
    for budget in (T, 1024):
        learn = updater_of(run, state)
        learners = learn.learners(state, run.models.mesh)
        packed, key = packed_of(ONE, budget), jax.random.key(3)
        with jax.set_mesh(run.models.mesh):
            batch = batch_of(tiny.NETWORK)
            learn.program.lower(learners, {}, batch, packed, key, train_policy=True)
    assert len(found) == 2
    assert {d for dtypes in found.values() for d in jax.tree.leaves(dtypes)} == {
        jnp.dtype("float32")
    }


def test_nothing_goes_to_the_host_and_back():
    run = tiny_run(ONE, FULL)
    state = initial(run)
    step = updater_of(run, state)
    replicated = mesh_lib.replicated(run.models.mesh)
    batch, packed = jax.device_put((batch_of(run.models.policy), packed_of(ONE, T)), replicated)
    learners = step.learners(state, run.models.mesh)
    arguments = learners, {}, batch, packed, jax.random.key(3)
    with jax.set_mesh(run.models.mesh), jax.transfer_guard("disallow"):
        lowered = step.program.lower(*arguments, train_policy=True)
        moved, _ = jax.block_until_ready(step.program(*arguments, train_policy=True))
    assert int(moved["policy"].num_updates) == 1
    # A guard sees what goes through Python; a program could also hold a callback or a feed.
    text = lowered.as_text()
    assert not [word for word in ("callback", "infeed", "outfeed", "send", "recv") if word in text]
    # The state was consumed, all of it.
    assert all(a.is_deleted() for a in jax.tree.leaves(learners))
