"""What a run has follows from what its functions read."""

import math

import jax
import pytest

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import AlgorithmConfig, ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.config.recipes import ADVANTAGES, POLICY_LOSSES, RECIPES
from jaxrl_llm.learner import job_models, predict
from jaxrl_llm.trainer import rl

NOTHING = AlgorithmConfig(kl_in="none")
TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")


def found(**settings):
    """Returns the names of what a run has for these settings."""
    needed = requirements.requirements(AlgorithmConfig(**{"kl_in": "none", **settings}))
    names = ("critic", "cost_critic", "reference", "greedy_baseline", "old_log_probs")
    assert needed.num_critics == needed.critic + needed.cost_critic
    return {name for name in names if getattr(needed, name)}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_requirements_of_every_advantage(name):
    has = {"gae": {"critic"}, "remax": {"greedy_baseline"}}
    has |= {name: {"old_log_probs", "reference"} for name in ("online_dpo", "xpo", "nash_md")}
    has |= {token_baseline: {"old_log_probs"} for token_baseline in TOKEN_BASELINES}
    assert found(advantage=name) == has.get(name, set())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_requirements_of_every_policy_loss(name):
    asked = {"old_log_probs"} if name in ("clip_cov", "kl_cov", "m2po") else set()
    assert found(policy_loss=name) == asked


@pytest.mark.parametrize(
    "settings, has",
    [
        ({"kl_in": "reward"}, {"reference", "old_log_probs"}),
        ({"kl_in": "loss"}, {"reference"}),
        ({"correction": "token"}, {"old_log_probs"}),
        (
            {"rejections": ("token_k1",), "rejection_lows": (0.5,), "rejection_highs": (2.0,)},
            {"old_log_probs"},
        ),
        ({"advantage": "gae", "safe": True}, {"critic", "cost_critic", "old_log_probs"}),
    ],
    ids=["kl_in_reward", "kl_in_loss", "correction", "rejections", "safe"],
)
def test_requirements_of_other_settings(settings, has):
    assert found(**settings) == has


USER = """
from typing import Annotated
from jaxrl_llm.config.validation import Range

def plain(rewards, response_mask):
    return rewards, rewards

def with_values(rewards, response_mask, values):
    return rewards - values, rewards

def with_baselines(rewards, response_mask, baselines=None):
    return rewards - baselines[:, None], rewards

def with_entropy(rewards, old_log_probs):
    return rewards, rewards

def with_rest(rewards, **rest):
    return rewards, rewards

def unknown(rewards, prices):
    return rewards, rewards

def with_args(log_probs, tau: Annotated[float, Range("(0, 1]")] = 0.5, power=1, **rest):
    return sum([tau * log_probs.sum()] * power), {}

def takes_input(log_probs, values=0.0):
    return (log_probs - values).sum(), {}

def unreadable(log_probs, tau: "Unknown" = 0.5):
    return tau * log_probs.sum(), {}

def near_reference(log_probs, ref_log_probs):
    return (log_probs - ref_log_probs).sum(), {}
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER)
    return lambda name: f"{path}:{name}"


def test_requirements_of_user_functions(mine):
    assert found(advantage=mine("plain")) == set()
    assert found(advantage=mine("with_values")) == {"critic"}
    assert found(advantage=mine("with_baselines")) == {"greedy_baseline"}
    assert found(advantage=mine("with_entropy")) == {"old_log_probs"}
    # What has **rest gets what there is, no model more.
    assert found(advantage=mine("with_rest")) == {"old_log_probs"}
    assert found(policy_loss=mine("near_reference")) == {"reference"}


DUAL_CLIP = "'vanilla' or 'dppo_tv' or 'dppo_kl'"


@pytest.mark.parametrize(
    "loss, loss_args, messages",
    [
        ("sapo", {"tau_pos": 0.0}, ["tau_pos: must be in [0.001, 1000], got 0.0"]),
        (
            "sapo",
            {"tua_pos": 1.0, "tau_neg": math.nan},
            [
                "tua_pos: unknown hyperparameter of policy_loss='sapo'; did you mean 'tau_pos'?;"
                " known: tau_pos, tau_neg",
                "tau_neg: must be in [0.001, 1000], got nan",
            ],
        ),
        (
            "vanilla",
            {"tau_pos": 1.0},
            [
                "tau_pos: a hyperparameter of policy_loss='sapo', not of 'vanilla'; remove it, or"
                " choose that loss"
            ],
        ),
        (
            "gspo",
            {"dual_clip": 3.0},
            [
                f"dual_clip: a hyperparameter of policy_loss={DUAL_CLIP}, not of 'gspo'; remove it,"
                " or choose that loss"
            ],
        ),
        ("gpg", {"x": 1.0}, ["x: unknown hyperparameter of policy_loss='gpg'; known: none"]),
        # Also of the selection of tokens.
        ("clip_cov", {"high": math.inf, "share": 2.0}, ["share: must be in [0, 1], got 2.0"]),
        ("kl_cov", {"coef": -1.0}, ["coef: must be in [0, 1000], got -1.0"]),
        ("vanilla", {"dual_clip": 1.0}, ["dual_clip: must be in (1, inf] (inf: off), got 1.0"]),
    ],
)
def test_arguments_of_a_loss_are_checked_against_its_signature(loss, loss_args, messages):
    config = AlgorithmConfig(policy_loss=loss, loss_args=loss_args)
    assert list(config.problems()) == []
    with pytest.raises(ConfigError) as raised:
        requirements.check_functions(config)
    assert list(raised.value.problems) == [f"config.algorithm.loss_args.{m}" for m in messages]


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_defaults_of_losses_are_within_their_ranges(loss):
    full = requirements.with_loss_defaults(AlgorithmConfig(policy_loss=loss))
    requirements.check_functions(full)
    assert full.loss_args.keys() == requirements.loss_hyperparameters(loss).keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_set_arguments_of_their_loss(recipe):
    config = from_config_dict({**VALUES, "algorithm": {"recipe": recipe}, **SAFE}).algorithm
    requirements.check_functions(config)
    as_dapo = recipe in ("dapo", "high_entropy")
    assert config.loss_args == ({"dual_clip": 10.0} if as_dapo else {})


def test_arguments_of_a_users_loss(mine):
    def problems(name, **loss_args):
        config = AlgorithmConfig(policy_loss=mine(name), loss_args=loss_args)
        try:
            requirements.check_functions(config)
        except ConfigError as error:
            return [text.removeprefix("config.algorithm.") for text in error.problems]
        return []

    assert problems("with_args", tau=0.5, power=2.0) == []
    assert problems("with_args", tau=2.0, power=2.5) == [
        "loss_args.tau: must be in (0, 1], got 2.0",
        "loss_args.power: expected int, got 2.5",
    ]
    # What has **rest gets inputs, no names that it does not spell.
    (said,) = problems("with_args", pover=2.0)
    assert said.endswith("; did you mean 'power'?; known: tau, power")
    # `values` is an input, which no setting replaces.
    (said,) = problems("takes_input", values=1.0)
    assert "values: unknown hyperparameter of policy_loss=" in said
    assert said.endswith("; known: none") and problems("takes_input") == []
    config = AlgorithmConfig(policy_loss=mine("takes_input"))
    assert requirements.with_loss_defaults(config) == config
    for loss_args in ({}, {"tau": 1.0}):
        (said,) = problems("unreadable", **loss_args)
        assert said.startswith("policy_loss='") and "the annotation 'Unknown' of 'tau'" in said


VALUES = {
    "model": {"hidden_size": 16, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1},
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
    "rollout": {"max_response_tokens": 16},
    "placement": {"choice": "standalone"},
}
SAFE = {
    "rewards": {
        "functions": {"answer": {"function": "arithmetic"}},
        "cost_functions": {"cost": {"function": "length"}},
    }
}


def test_a_run_gets_the_critic_that_a_users_advantage_reads(mine):
    for name, critic in (("plain", False), ("with_values", True)):
        of_run = {"advantage": mine(name), "kl_in": "none"}
        config = from_config_dict({**VALUES, "algorithm": of_run})
        apart = job_models.make_models(
            config, job_models.role_meshes(config, jax.devices()[:6])
        ).meshes
        assert (apart["critic"] != apart["policy"]) == critic
        assert predict.is_on_policy(config)


@pytest.mark.parametrize(
    "name, message",
    [
        ("unknown", "parameter 'prices' is not available; available: .*values"),
        ("absent", "has no 'absent'; its functions: plain"),
    ],
)
@pytest.mark.parametrize("choice", ["colocate", "standalone"])
def test_missing_inputs_are_refused_before_any_work(name, message, choice, mine, tmp_path):
    values = {**VALUES, "placement": {"choice": choice}, "algorithm": {"advantage": mine(name)}}
    with pytest.raises(ConfigError, match=f"config.algorithm.advantage.*{message}"):
        rl.train(from_config_dict(values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_incompatible_choices_are_named(mine):
    requirements.check_functions(NOTHING)
    for settings, path, message in (
        ({"safe": True}, "safe", "set advantage='gae'"),
        ({"safe": True, "advantage": mine("plain")}, "safe", "with critics"),
        ({"dynamic_sampling": True, "advantage": "remax"}, "dynamic_sampling", "'remax'"),
        (
            {"dynamic_sampling": True, "advantage": mine("with_baselines")},
            "dynamic_sampling",
            "groups are of one sample",
        ),
    ):
        config = AlgorithmConfig(**settings)
        with pytest.raises(ConfigError) as found:
            requirements.check_functions(config)
        (said,) = found.value.problems
        assert said.startswith(f"config.algorithm.{path}: ") and message in said
        # What a user's function reads is known when it is found, the rest with the config.
        of_config = [f"config.algorithm.{path}: {text}" for path, text in config.problems()]
        assert (said in of_config) == (":" not in config.advantage)
    requirements.check_functions(AlgorithmConfig(safe=True, advantage=mine("with_values")))


def test_models_that_nothing_reads_are_warned_about(mine):
    values = {**VALUES, "critic": {"path": "there"}, "reference": {"path": "there"}}
    unread = from_config_dict({**values, "algorithm": {"kl_in": "none", "critic_warmup_steps": 1}})
    assert [text.partition(":")[0] for text in requirements.warnings(unread)] == [
        "config.reference.path",
        "config.critic.path",
        "config.algorithm.critic_warmup_steps",
    ]
    read = {"kl_in": "loss", "critic_warmup_steps": 1, "advantage": mine("with_values")}
    assert not list(requirements.warnings(from_config_dict({**values, "algorithm": read})))
