"""Every preference loss: by hand, by identity, and its invariances from log-probs to gradients.

Nothing may depend on the order of rows, on rows of padding and what stands in them (NaN included),
or on how a batch is cut into microbatches.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.algorithms.lookup import FunctionError, parameters_of
from jaxrl_llm.algorithms.losses import bradley_terry
from jaxrl_llm.algorithms.preference_losses import LABEL_LOSSES, PAIR_LOSSES
from jaxrl_llm.algorithms.preference_objectives import (
    BASELINES,
    AnswerCounts,
    AnswerSums,
    baselines,
    label_objective,
    pair_objective,
)
from jaxrl_llm.config import ConfigError, recipes
from jaxrl_llm.config.algorithm import PreferenceLossConfig

CONFIGS = {
    loss: PreferenceLossConfig(
        loss=loss, beta=0.7, label_smoothing=0.1 if loss in recipes.SMOOTHED_LOSSES else 0.0
    )
    for loss in (*PAIR_LOSSES, *LABEL_LOSSES)
}
CONFIGS["orpo on prompts"] = PreferenceLossConfig(loss="orpo", loss_args={"nll_on_prompt": 1})
CONFIGS["alphapo"] = PreferenceLossConfig(loss="simpo", loss_args={"alpha": 0.25, "nll_coef": 0.5})
everywhere = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
ROWS = 12  # six pairs
CLOSE = dict(rtol=2e-5, atol=1e-6)


@dataclasses.dataclass
class Answers:
    """Answers of a batch; arrays are [B], of pairs the chosen and the rejected one in turn."""

    log_probs: np.ndarray
    ref_log_probs: np.ndarray
    mismatched: np.ndarray
    tokens: np.ndarray
    text_log_probs: np.ndarray
    text_tokens: np.ndarray
    labels: np.ndarray
    mask: np.ndarray

    def rows(self, order):
        return Answers(**{name: value[order] for name, value in vars(self).items()})


def random_answers(seed=0):
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, 9, ROWS).astype(np.float32)
    log_probs = (-tokens * draw.uniform(0.2, 2.0, ROWS)).astype(np.float32)
    return Answers(
        log_probs=log_probs,
        ref_log_probs=(log_probs + draw.normal(size=ROWS)).astype(np.float32),
        mismatched=draw.normal(0.5, 1.0, ROWS).astype(np.float32),
        tokens=tokens,
        text_log_probs=(log_probs - draw.uniform(1, 5, ROWS)).astype(np.float32),
        text_tokens=tokens + 4,
        labels=np.arange(ROWS) % 3 != 0,
        mask=np.ones(ROWS, bool),
    )


def statistics(config, answers):
    """The baselines of the whole batch, and its counts."""
    pairs = config.loss in PAIR_LOSSES
    desirable = np.arange(len(answers.mask)) % 2 == 0 if pairs else answers.labels
    counts = AnswerCounts(
        rows=float(max(1, answers.mask.sum() / (2 if pairs else 1))),
        desirable=float((desirable & answers.mask).sum()),
        desirable_tokens=float(answers.tokens[desirable & answers.mask].sum()),
        desirable_text_tokens=float(answers.text_tokens[desirable & answers.mask].sum()),
    )
    values = np.zeros(len(answers.mask), np.float32)
    if config.loss in BASELINES and answers.mask.any():  # batches have no rows of padding
        kept = answers.rows(answers.mask)
        available = {
            "ratios": jnp.asarray(kept.log_probs - kept.ref_log_probs),
            "mismatched_ratios": jnp.asarray(kept.mismatched),
            "log_probs": jnp.asarray(kept.log_probs),
            "ref_log_probs": jnp.asarray(kept.ref_log_probs),
            "labels": jnp.asarray(kept.labels),
        }
        values[answers.mask] = baselines(config, available)
    return values, counts


def learn(config, answers, values, counts):
    """The loss with its metrics, and gradients of both kinds of log-probs; row by row of zero."""

    def loss(log_probs, text_log_probs):
        sums = AnswerSums(
            ratios=log_probs - answers.ref_log_probs,
            log_probs=log_probs,
            tokens=jnp.asarray(answers.tokens),
            text_log_probs=text_log_probs,
            text_tokens=jnp.asarray(answers.text_tokens),
            baselines=jnp.asarray(values),
        )
        mask, labels = jnp.asarray(answers.mask), jnp.asarray(answers.labels)
        if config.loss in LABEL_LOSSES:
            return label_objective(config, sums, labels, mask, counts)
        chosen, rejected = (
            AnswerSums(**{name: x[side::2] for name, x in vars(sums).items()}) for side in (0, 1)
        )
        return pair_objective(config, chosen, rejected, mask[0::2], counts)

    (value, metrics), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        jnp.asarray(answers.log_probs), jnp.asarray(answers.text_log_probs)
    )
    return {**metrics, "loss": value}, np.stack(gradients)


def run(config, answers):
    return learn(config, answers, *statistics(config, answers))


@functools.cache
def first_run(name):
    return run(CONFIGS[name], random_answers())


def ran_first(config):
    return first_run(next(name for name, each in CONFIGS.items() if each is config))


def assert_equal_runs(ours, theirs, rearranged=lambda gradients: gradients):
    assert ours[0].keys() == theirs[0].keys()
    for name, value in ours[0].items():
        assert np.isfinite(value), name
        np.testing.assert_allclose(theirs[0][name], value, err_msg=name, **CLOSE)
    np.testing.assert_allclose(theirs[1], rearranged(ours[1]), **CLOSE)


@everywhere
def test_the_order_of_rows_is_free(config):
    order = np.random.default_rng(1).permutation(ROWS // 2)
    order = np.stack([2 * order, 2 * order + 1], 1).ravel()
    theirs = run(config, random_answers().rows(order))
    assert_equal_runs(ran_first(config), theirs, lambda gradients: gradients[:, order])
    assert np.abs(theirs[1]).max() > 1e-3


@everywhere
def test_padding_and_what_stands_in_it_change_nothing(config):
    def padded(array):
        fill = {"f": np.nan, "b": False}[array.dtype.kind]
        return np.insert(array, [0, 0, 4, 4], fill)

    answers = Answers(**{name: padded(array) for name, array in vars(random_answers()).items()})
    theirs = run(config, answers)
    assert_equal_runs(ran_first(config), theirs, lambda g: np.insert(g, [0, 0, 4, 4], 0.0, axis=1))
    np.testing.assert_array_equal(theirs[1][:, ~answers.mask], 0.0)


@everywhere
def test_microbatches_sum_to_the_batch(config):
    answers = random_answers()
    values, counts = statistics(config, answers)
    whole, whole_gradients = learn(config, answers, values, counts)
    totals, parts = dict.fromkeys(whole, 0.0), []
    for rows in np.split(np.arange(ROWS), [2, 8]):
        metrics, gradients = learn(config, answers.rows(rows), values[rows], counts)
        totals = {name: totals[name] + metrics[name] for name in whole}
        parts.append(gradients)
    for name in whole:
        np.testing.assert_allclose(totals[name], whole[name], rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole_gradients, rtol=1e-6, atol=1e-8)


@everywhere
def test_a_batch_with_everything_masked_is_harmless(config):
    nothing = dataclasses.replace(random_answers(), mask=np.zeros(ROWS, bool))
    metrics, gradients = run(config, nothing)
    assert all(np.isfinite(value) for value in metrics.values())
    np.testing.assert_array_equal(gradients, 0.0)


@everywhere
def test_better_answers_lower_the_loss(config):
    """Every loss falls where good answers gain and bad ones lose."""
    answers = random_answers()
    answers = dataclasses.replace(
        answers, ref_log_probs=answers.log_probs, mismatched=np.zeros(ROWS, np.float32)
    )
    _, gradients = run(config, answers)
    is_good = answers.labels if config.loss in LABEL_LOSSES else np.arange(ROWS) % 2 == 0
    slopes = gradients.sum(0)
    if config.loss == "discopop":  # rises before it falls: at a margin of 0 its slope is wrong
        assert (slopes[is_good] > 0).all()
    elif config.loss == "apo_down":  # lowers good answers too, by less
        assert (slopes[~is_good] > slopes[is_good].max()).all()
    else:
        assert (slopes[is_good] < 0).all()
        assert (slopes[~is_good] > 0).all() or config.loss == "sft"


def test_tables_hold_the_names_of_the_config():
    assert tuple(PAIR_LOSSES) == recipes.PAIR_LOSSES
    assert tuple(LABEL_LOSSES) == recipes.LABEL_LOSSES
    tables = {**PAIR_LOSSES, **LABEL_LOSSES}
    named = {loss: parameters_of(function).names for loss, function in tables.items()}
    smoothed = {loss for loss, names in named.items() if "label_smoothing" in names}
    assert smoothed == set(recipes.SMOOTHED_LOSSES)
    compared = {
        loss
        for loss, names in named.items()
        if any(name.endswith(("ratios", "baselines")) for name in names)
    }
    assert tables.keys() - compared == set(recipes.REFERENCE_FREE_LOSSES)
    assert BASELINES.keys() == {
        loss
        for loss, names in named.items()
        if any(name.endswith("baselines") for name in names)
    }  # fmt: skip


# Of each loss with hyperparameters: other values of them.
LOSS_ARGS = {
    "discopop": {"tau": 0.5},
    "cpo": {"nll_coef": 0.5},
    "simpo": {"gamma": 1.0, "alpha": 0.5, "nll_coef": 0.5},
    "orpo": {"nll_on_prompt": 1},
    **{loss: {"desirable_weight": 2.0, "undesirable_weight": 2.0} for loss in LABEL_LOSSES},
}


@pytest.mark.parametrize("loss", LOSS_ARGS)
def test_every_hyperparameter_changes_its_loss(loss):
    assert LOSS_ARGS[loss].keys() == requirements.preference_hyperparameters(loss).keys()
    plain = first_run(loss)[0]["loss"]
    for name, value in LOSS_ARGS[loss].items():
        config = dataclasses.replace(CONFIGS[loss], loss_args={name: value})
        requirements.check_preference_loss(config)
        assert abs(run(config, random_answers())[0]["loss"] - plain) > 1e-3, name
        full = requirements.with_preference_defaults(config)
        assert full.loss_args.keys() == LOSS_ARGS[loss].keys() and full.loss_args[name] == value


def test_no_hyperparameter_is_left_out():
    having = {loss for loss in CONFIGS if loss in recipes.PAIR_LOSSES + recipes.LABEL_LOSSES}
    assert LOSS_ARGS.keys() == {x for x in having if requirements.preference_hyperparameters(x)}


def own_loss(chosen_ratios, rejected_ratios, beta, scale=1.0):
    """A loss of a user's own: a quarter of the squared distance of the margin from 2."""
    return scale * jnp.square(beta * (chosen_ratios - rejected_ratios) - 2.0) / 4.0


def scalar_loss(chosen_ratios):
    return jnp.sum(chosen_ratios)


def mistaken_loss(chosen_ratio):
    return chosen_ratio


def test_a_loss_of_ones_own():
    config = PreferenceLossConfig(loss=f"{__name__}:own_loss", loss_args={"scale": 2.0}, beta=1.0)
    assert not list(config.problems()) and config.reads_reference and not config.reads_labels
    requirements.check_preference_loss(config)
    one = jnp.ones(1)
    sums = [AnswerSums(x, x, one, x, one, 0 * one) for x in (one, -2 * one)]
    loss, metrics = pair_objective(config, *sums, one > 0, AnswerCounts(1.0, 1.0, 1.0, 1.0))
    assert loss == 0.5 and metrics["rewards/margins"] == 3.0
    with pytest.raises(FunctionError, match=r"dpo\.loss=.*one number for each of the 1 pairs"):
        pair_objective(
            dataclasses.replace(config, loss=f"{__name__}:scalar_loss", loss_args={}),
            *sums,
            one > 0,
            AnswerCounts(1.0, 1.0, 1.0, 1.0),
        )


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"loss": "cpo", "loss_args": {"nll_coef": -1.0}}, r"dpo\.loss_args\.nll_coef: must be"),
        ({"loss": "cpo", "loss_args": {"gamma": 1.0}}, r"a hyperparameter of loss='simpo', not of"),
        ({"loss": "cpo", "loss_args": {"nll": 1.0}}, r"unknown hyperparameter of loss='cpo'"),
        ({"loss": "orpo", "loss_args": {"nll_on_prompt": 0.5}}, r"nll_on_prompt: expected int"),
        ({"loss": "no_file.py:f"}, r"config\.dpo\.loss: 'no_file.py:f': no file"),
        ({"loss": f"{__name__}:mistaken_loss"}, r"parameter 'chosen_ratio' is not available"),
        ({"loss": f"{__name__}:scalar_loss"}, r"must return one number for each"),
    ],
)
def test_a_loss_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        requirements.check_preference_loss(PreferenceLossConfig(**settings))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"loss": "dpo"}, "unknown loss 'dpo'; known: sigmoid, "),
        ({"loss": "kto", "label_smoothing": 0.1}, "no effect on loss='kto'; set it to 0, or use"),
        ({"loss": "exo_pair"}, "0, but loss='exo_pair' divides by it"),
    ],
)
def test_contradictions_in_the_config(settings, message):
    assert any(message in text for _, text in PreferenceLossConfig(**settings).problems())


def margins(chosen, rejected, tokens=(1.0, 1.0), baselines=(0.0, 0.0)):
    """Sums of two answers with these ratios; log-probs are the ratios too."""
    sides = zip((chosen, rejected), tokens, baselines, strict=True)
    return [
        AnswerSums(*(jnp.atleast_1d(jnp.float32(x)) for x in (r, r, n, r, n, b)))
        for r, n, b in sides
    ]


@pytest.mark.parametrize(
    "loss, settings, expected",
    [
        # Margin 0.5 (1 - -1) = 1.
        ("sigmoid", {}, np.log1p(np.exp(-1))),
        ("hinge", {}, 0.0),
        ("hinge", {"beta": 0.25}, 0.5),
        ("ipo", {}, (1 / 2 + 1 / 4 - 1) ** 2),  # 2 and 4 tokens
        ("sigmoid_norm", {}, np.log1p(np.exp(-0.5 * 0.75))),
        ("bco_pair", {}, 2 * np.log1p(np.exp(-0.5))),
        ("sppo_hard", {}, 0.0),
        ("apo_zero", {}, 2 / (1 + np.exp(0.5))),
        ("apo_down", {}, 1 / (1 + np.exp(-0.5)) + 1 / (1 + np.exp(1))),
        ("sft", {}, -1 / 2),
    ],
)
def test_one_pair_by_hand(loss, settings, expected):
    config = PreferenceLossConfig(**{"loss": loss, "beta": 0.5, **settings})
    counts = AnswerCounts(1.0, 1.0, 2.0, 2.0)
    value, _ = pair_objective(config, *margins(1.0, -1.0, (2.0, 4.0)), jnp.ones(1, bool), counts)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)


def test_sigmoid_is_bradley_terry_on_implied_rewards():
    draw = np.random.default_rng(0)
    chosen, rejected = jnp.asarray(draw.normal(size=(2, 3)), jnp.float32)
    config, mask = PreferenceLossConfig(beta=0.3), jnp.array([True, True, False])
    counts = AnswerCounts(2.0, 2.0, 2.0, 2.0)

    def of(config, chosen, rejected):
        one = jnp.ones(3)
        sums = (AnswerSums(x, x, one, x, one, 0 * one) for x in (chosen, rejected))
        return pair_objective(config, *sums, mask, counts)

    loss, metrics = of(config, chosen, rejected)
    expected, _ = bradley_terry(0.3 * chosen, 0.3 * rejected, mask, 2.0)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    rewards = {f"rewards/{name}" for name in ("chosen", "rejected", "margins", "accuracies")}
    assert set(metrics) == {"dpo/loss", "logps/chosen", "logps/rejected", *rewards}
    # A share of wrong pairs mixes the two directions; "robust" takes their expectation out.
    swapped, _ = of(config, rejected, chosen)
    for name, wanted in (
        ("sigmoid", 0.9 * loss + 0.1 * swapped),
        ("robust", (0.9 * loss - 0.1 * swapped) / 0.8),
    ):
        smooth = PreferenceLossConfig(beta=0.3, loss=name, label_smoothing=0.1)
        np.testing.assert_allclose(of(smooth, chosen, rejected)[0], wanted, rtol=1e-6)
    # A tie is no success.
    _, tied = of(config, chosen, chosen)
    assert tied["rewards/accuracies"] == 0.0


@pytest.mark.parametrize("loss", ["sigmoid", "robust", "aot", "aot_unpaired"])
def test_at_the_reference_the_slope_is_half_of_beta(loss):
    config = PreferenceLossConfig(loss=loss, beta=0.2)

    def value(x):
        zero, one = jnp.zeros(1), jnp.ones(1)
        sums = AnswerSums(x, x, one, x, one, zero), AnswerSums(zero, zero, one, zero, one, zero)
        return pair_objective(config, *sums, one > 0, AnswerCounts(1.0, 1.0, 1.0, 1.0))[0]

    np.testing.assert_allclose(jax.grad(value)(jnp.zeros(1)), -0.1, rtol=1e-6)


def test_aot_of_one_pair_is_sigmoid():
    answers = random_answers().rows([0, 1])
    runs = [
        run(PreferenceLossConfig(loss=loss, beta=0.7), answers)
        for loss in ("sigmoid", "aot", "aot_unpaired")
    ]
    for other in runs[1:]:
        np.testing.assert_allclose(other[0]["loss"], runs[0][0]["loss"], rtol=1e-5)
        np.testing.assert_allclose(other[1], runs[0][1], rtol=1e-5)
