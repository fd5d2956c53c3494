"""Settings that ruin a run are told by name: of the config, and by every command that reads it."""

import commands
import pytest
import runs

from jaxrl_llm.config.bridge import from_config_dict

REWARD = {"functions": {"answer": {"function": "arithmetic"}}}
LOW = {"model": {"param_dtype": "bfloat16"}}


def warnings(job="rl", **groups):
    rewards = {"rewards": REWARD} if job == "rl" else {}
    return list(from_config_dict({"job": job, **rewards, **groups}).warnings())


@pytest.mark.parametrize(
    "groups, field",
    [
        ({"rollout": {"top_p": 0.95}}, "rollout.top_p"),
        ({"rollout": {"top_k": 50}}, "rollout.top_k"),
        ({"rollout": {"min_p": 0.05}}, "rollout.min_p"),
        (
            {"rollout": {"temperature": 0.0}, "algorithm": {"recipe": "ppo"}},
            "rollout.temperature",
        ),
        ({"algorithm": {"kl_in": "loss", "kl_estimator": "k1"}}, "algorithm.kl_estimator"),
        ({"algorithm": {"kl_in": "loss", "kl_coef": 0.0}}, "algorithm.kl_coef"),
        (
            {"algorithm": {"kl_in": "reward", "advantage": "gdpo"}},
            "algorithm.kl_in",
        ),
        # 0.9**256 is 2e-12.
        ({"algorithm": {"recipe": "ppo", "gamma": 0.9}}, "algorithm.gamma"),
        (
            {"algorithm": {"correction": "token", "correction_high": 0.0}},
            "algorithm.correction_high",
        ),
        ({"rewards": {"functions": {"a": {"function": "math", "weight": 0.0}}}}, "rewards"),
        (LOW, "model.param_dtype"),
        ({"trainer": {"optimizer": {"learning_rate": 0.0}}}, "trainer.optimizer.learning_rate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_ruins_a_run_is_named(groups, field):
    (warning,) = warnings(**groups)
    assert warning.startswith(f"config.{field}: ")


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"algorithm": {"kl_in": "reward", "kl_estimator": "k1"}},  # its value is what counts
        {"algorithm": {"kl_in": "loss", "kl_estimator": "k1+"}},
        {"algorithm": {"recipe": "ppo", "gamma": 0.99}},  # 0.99**256 is 0.08
        {"algorithm": {"gamma": 0.9}},  # group advantages do not discount
        {**LOW, "lora": {"rank": 8}},  # adapters are float32
        {**LOW, "trainer": {"optimizer": {"learning_rate": 3e-3}}},
        {"model": {"compute_dtype": "bfloat16"}},
        {"evaluation": {"top_p": 0.9, "temperature": 0.7}},
    ],
    ids=str,
)
def test_harmless_settings_give_no_warning(groups):
    assert warnings(**groups) == []


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model"])
def test_low_precision_is_warned_of_in_every_job(job):
    (warning,) = warnings(job, **LOW)
    assert "trainer.optimizer.learning_rate=1e-05" in warning
    assert "use param_dtype='float32'" in warning


def test_low_precision_names_the_rates_that_are_too_small():
    small = {"num_steps": 2, "optimizer": {"learning_rate": 2e-5}}
    fast = {"optimizer": {"learning_rate": 1e-2}}
    (warning,) = warnings(**LOW, trainer=fast, warm_start=small)
    assert "and warm_start.optimizer.learning_rate=2e-05 moves" in warning
    (warning,) = warnings(**LOW, trainer=fast, algorithm={"recipe": "ppo"})
    assert "and critic.optimizer.learning_rate=1e-05 moves" in warning


@pytest.mark.parametrize("command", ["plan", "train"])
def test_plan_and_dry_run_warn(command, capsys, tmp_path):
    changes = {"rollout.top_p": 0.9, "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k1"}
    arguments = runs.flags("grpo_tiny", changes)
    if command == "train":
        arguments += [f"--workdir={tmp_path / 'run'}", "--dry_run"]
    code, _, log = commands.call(capsys, command, *arguments)
    assert code == 0
    assert "config.rollout.top_p: 0.9 samples from a truncated distribution" in log
    assert "expected gradient of 'k1' in the loss is exactly 0" in log
