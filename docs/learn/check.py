"""Checks exercises: `python docs/learn/check.py gae` checks docs/learn/exercises/gae.py.

Without names it checks all of them. Where the package has such a function, answers are compared
with the package's.
"""

import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import advantages, aggregation, kl, masked, policy_losses
from jaxrl_llm.algorithms.preference_objectives import AnswerCounts, AnswerSums, pair_objective
from jaxrl_llm.config import AlgorithmConfig
from jaxrl_llm.config.algorithm import PreferenceLossConfig

HERE = pathlib.Path(__file__).parent
close = np.testing.assert_allclose


def load(name: str, folder: str = "exercises") -> ModuleType:
    """Returns an exercise, or its solution, as a module."""
    path = HERE / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def log_probs(own):
    logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [1.0, 1.0, 1.0]]]))
    found = own.log_probs(logits, jnp.array([[0, 2, 1]]))
    close(found, np.log([[0.25, 0.1]]), rtol=1e-5)
    # sqrt(0.25) / (sqrt(0.5) + 2 sqrt(0.25)), sqrt(0.1) / (2 sqrt(0.1) + sqrt(0.8))
    warm = own.log_probs(logits, jnp.array([[0, 2, 1]]), temperature=2.0)
    close(np.exp(warm), [[0.5 / (0.5**0.5 + 1.0), 1.0 / (2.0 + 8.0**0.5)]], rtol=1e-5)
    large = own.log_probs(1e4 * jnp.eye(3)[None], jnp.array([[0, 0, 1]]))
    assert np.isfinite(large).all()


def reinforce(own):
    mask = jnp.array([[True, True, False], [True, False, False]])
    values = jnp.array([[-1.0, -2.0, jnp.nan], [-3.0, 7.0, 7.0]])
    scores = jnp.array([1.0, 0.0])
    loss, gradient = jax.value_and_grad(own.reinforce)(values, scores, mask)
    close(loss, -(0.5 * -3.0 - 0.5 * -3.0) / 2)
    close(gradient, [[-0.25, -0.25, 0.0], [0.25, 0.0, 0.0]])
    # Another baseline, the same gradient.
    close(jax.grad(own.reinforce)(values, scores + 100.0, mask), gradient, atol=1e-4)
    close(jax.grad(own.reinforce, argnums=1)(values, scores, mask), [0.0, 0.0])


def gae(own):
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.9])
    close(own.gae(rewards, values, 1.0, 1.0), 1.0 - values)
    close(own.gae(rewards, values, 1.0, 0.5), [0.275, 0.35, 0.1])
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 1, 7)).astype(np.float32)
    mask = np.ones((1, 7), bool)
    theirs, _ = advantages.generalized_advantage_estimation(
        rewards, values, mask, gamma=0.9, gae_lambda=0.8
    )
    close(own.gae(rewards[0], values[0], 0.9, 0.8), theirs[0], rtol=1e-4, atol=1e-5)


def clipped_loss(own):
    ratios = jnp.array([1.0, 1.3, 0.5, 1.3, 0.5, 9.0])
    signs = jnp.array([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    close(own.clipped_loss(jnp.log(ratios), signs), [-1.0, -1.2, -0.5, 1.3, 0.8, 3.0], rtol=1e-5)
    gradient = jax.grad(lambda x: own.clipped_loss(x, signs).sum())(jnp.log(ratios))
    close(gradient, [-1.0, 0.0, -0.5, 1.3, 0.0, 0.0], rtol=1e-5, atol=1e-6)
    rng = np.random.default_rng(0)
    random = jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32)
    theirs, _ = policy_losses.vanilla(*random, AlgorithmConfig(clip_high=0.28))
    close(own.clipped_loss(*random, clip_high=0.28), theirs, rtol=1e-5, atol=1e-6)


def kl_estimators(own):
    policy, reference = jnp.array([0.8, 0.2]), jnp.array([0.5, 0.5])
    k1, k2, k3, both = own.kl_estimators(jnp.log(policy), jnp.log(reference))
    true = float((policy * jnp.log(policy / reference)).sum())
    close([policy @ k1, policy @ k3, policy @ both], [true] * 3, rtol=1e-5)
    close(policy @ k2, 0.1723, atol=1e-4)
    assert (k3 >= 0).all() and float(k1.min()) < 0
    names = ("k1", "k2", "k3", "k3+")
    for i, name in enumerate(names):
        ours = jax.grad(lambda x, i=i: own.kl_estimators(x, jnp.float32(-1.5))[i])(-1.0)
        theirs = jax.grad(lambda x, n=name: kl.estimated_kl(n, x, jnp.float32(-1.5)))(-1.0)
        close(ours, theirs, rtol=1e-5)


def group_advantage(own):
    scores, groups = np.array([1.0, 5.0, 0.0, 0.0, 1.0, 7.0]), np.array([0, 1, 0, 0, 0, 2])
    found = own.group_advantage(scores, groups)
    close(found, [0.866024, 5.0, -0.866024, -0.866024, 0.866024, 7.0], rtol=1e-4)
    assert own.group_advantage(np.ones(4), np.zeros(4, int)).tolist() == [0.0] * 4
    for std in (True, False):
        members = jnp.ones(6, bool)
        theirs = advantages.grpo(jnp.float32(scores), jnp.int32(groups), members, std)
        close(own.group_advantage(scores, groups, std), theirs, rtol=1e-4, atol=1e-6)


def leave_one_out(own):
    close(own.leave_one_out(np.array([[1.0, 0.0, 0.0, 1.0]])), [[2 / 3, -2 / 3, -2 / 3, 2 / 3]])
    scores = np.random.default_rng(0).normal(size=(5, 4))
    centered = scores - scores.mean(1, keepdims=True)
    close(own.leave_one_out(scores), 4 / 3 * centered, rtol=1e-6)
    assert scores.shape == own.leave_one_out(scores).shape


def aggregation_(own):
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(6, 5)).astype(np.float32), rng.random((6, 5)) < 0.6
    mask[3] = False
    counts = mask.sum(), mask.any(1).sum()
    for how in ("token-mean", "seq-mean-token-mean"):
        denominators = aggregation.minibatch_denominators(jnp.asarray(mask))
        config = AlgorithmConfig(aggregation=how)
        whole = aggregation.aggregate(config, jnp.asarray(values), jnp.asarray(mask), denominators)
        for cuts in ([], [1], [2, 5], [1, 2, 3, 4, 5]):
            parts = zip(np.split(values, cuts), np.split(mask, cuts), strict=True)
            shares = [own.microbatch_share(x, m, *counts, how) for x, m in parts]
            close(sum(shares), whole, rtol=1e-5)


def pass_at_k(own):
    close(
        [own.pass_at_k(10, 3, 1), own.pass_at_k(4, 1, 4), own.pass_at_k(5, 0, 3)], [0.3, 1.0, 0.0]
    )
    close(own.pass_at_k(4, 2, 2), 5 / 6)
    # It has no bias: the mean over all numbers of right ones is 1 - (1 - p)**k.
    chances = np.random.default_rng(0).binomial(8, 0.3, size=20_000)
    close(np.mean([own.pass_at_k(8, int(c), 4) for c in chances]), 1 - 0.7**4, atol=0.01)


def dpo(own):
    one = jnp.ones(2)
    close(own.dpo(one, one, one, one), np.log(2.0), rtol=1e-6)
    close(own.dpo(1.0 * one, -1.0 * one, 0 * one, 0 * one, beta=0.5), 0.31326, rtol=1e-4)
    assert np.isfinite(own.dpo(-1e5 * one, 0 * one, 0 * one, 0 * one))
    gradient = jax.grad(lambda c: own.dpo(c, -one, 0 * one, 0 * one, beta=0.5))(one)
    settings, mask = PreferenceLossConfig(beta=0.5), one > 0
    counts = AnswerCounts(2.0, 2.0, 2.0, 2.0)

    def package_loss(chosen):
        sums = (AnswerSums(x, x, one, x, one, 0 * one) for x in (chosen, -one))
        return pair_objective(settings, *sums, mask, counts)[0]

    theirs = jax.grad(package_loss)(one)
    close(gradient, theirs, rtol=1e-5)


def nucleus(own):
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25]))
    token, log_prob = own.nucleus(logits, 0.4, 0, 0, 0)
    assert token == 1
    close(log_prob, np.log(0.5), rtol=1e-6)
    drawn = [own.nucleus(logits, 0.7, 1, i, 3)[0] for i in range(4000)]
    assert set(drawn) == {1, 3}
    close(np.mean(np.array(drawn) == 1), 2 / 3, atol=0.03)
    assert drawn[17] == own.nucleus(logits, 0.7, 1, 17, 3)[0]
    all_of = {own.nucleus(logits, 1.0, s, 0, p)[0] for s in range(20) for p in range(20)}
    assert all_of == {0, 1, 2, 3}


def truncated_weights(own):
    old, engine = np.log([[0.4, 0.3, 0.5]]), np.log([[0.5, 0.1, 0.5]])
    old[0, 2] = np.nan
    mask = np.array([[True, True, False]])
    close(own.truncated_weights(old, engine, mask, 2.0), [[0.8, 2.0, 0.0]], rtol=1e-6)
    close(own.truncated_weights(old, engine, mask, 9.0), [[0.8, 3.0, 0.0]], rtol=1e-6)
    close(own.truncated_weights(old, engine, mask, 9.0, True), [[2.4, 2.4, 0.0]], rtol=1e-6)
    far = own.truncated_weights(np.zeros((1, 1)), np.full((1, 1), -1e4), np.ones((1, 1), bool), 5.0)
    assert far.item() == 5.0


def packing(own):
    lengths = [3, 9, 1, 4, 6, 2]
    rows = own.pack(lengths, 10)
    assert rows == [[1, 2], [4, 3], [0, 5]]
    assert own.layout([4, 3], lengths, 12)[0] == [1] * 6 + [2] * 4 + [0] * 2
    assert own.layout([4, 3], lengths, 12)[1] == [*range(6), *range(4), 0, 0]
    with pytest.raises(ValueError):
        own.pack([3, 11], 10)
    assert own.pack([], 4) == []


def pages(own):
    cache = own.Pages(8)
    prompt = cache.take(3)
    assert len(set(prompt)) == 3 and cache.num_free == 5
    cache.share(prompt)
    cache.release(prompt)
    assert cache.num_free == 5
    with pytest.raises(MemoryError):
        cache.take(6)
    assert cache.num_free == 5
    cache.release(prompt)
    assert cache.num_free == 8
    with pytest.raises(ValueError):
        cache.release(prompt)
    with pytest.raises(ValueError):
        cache.share([0])
    assert len(set(cache.take(8))) == 8


def turn_masks(own):
    parts = [("prompt", [1, 2]), ("policy", [3]), ("policy", [4]), ("tool", [5, 6]), ("policy", [])]
    tokens, mask, turns = own.turn_masks([*parts, ("policy", [7])])
    assert tokens == [1, 2, 3, 4, 5, 6, 7]
    assert list(mask) == [False, False, True, True, False, False, True]
    assert turns == [-1, -1, 0, 0, -1, -1, 1]
    found = masked.returns_to_go(jnp.ones((1, 7)), jnp.array([mask]))
    assert found.shape == (1, 7)  # a mask that the package takes


def stale_queue(own):
    queue = own.StaleQueue(groups_per_step=2, max_staleness=1)
    first = [queue.begin() for _ in range(4)]
    assert first == [0, 1, 2, 3] and not queue.may_begin()
    with pytest.raises(RuntimeError):
        queue.begin()
    for number in (3, 1, 2):
        queue.finish(number, f"group {number}")
    assert queue.take() is None  # the first is slow, and none is dropped
    queue.finish(0, "group 0")
    assert queue.take() == ["group 0", "group 1"]
    assert queue.begin() == 4 and queue.begin() == 5 and not queue.may_begin()
    assert queue.take() == ["group 2", "group 3"]
    together = own.StaleQueue(groups_per_step=2, max_staleness=0)
    assert [together.begin(), together.begin(), together.may_begin()] == [0, 1, False]


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    check.__name__.rstrip("_"): check
    for check in (
        log_probs, reinforce, gae, clipped_loss, kl_estimators, group_advantage, leave_one_out,
        aggregation_, pass_at_k, dpo, nucleus, truncated_weights, packing, pages, turn_masks,
        stale_queue,
    )
}  # fmt: skip


def main(names: list[str]) -> int:
    """Checks exercises, prints one line for each; returns how many are not right."""
    wrong = 0
    for name in names or CHECKS:
        try:
            CHECKS[name](load(name))
            print(f"{name}: right")
        except NotImplementedError:
            wrong += 1
            print(f"{name}: not written yet")
        except Exception as error:  # whatever an answer does
            wrong += 1
            line = [f.lineno for f in traceback.extract_tb(error.__traceback__)
                    if f.filename == inspect.getsourcefile(main)][-1]  # fmt: skip
            print(f"{name}: wrong, see line {line} of check.py: {str(error).strip()[:400]}")
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
