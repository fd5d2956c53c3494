"""Each alert fires on its own reading, speaks, and asks for what the config says."""

import dataclasses
import json
import logging
import math
import time

import local_server
import numpy as np
import pytest

from jaxrl_llm.config import AlertsConfig, ConfigError
from jaxrl_llm.config.bridge import default_config_dict, from_config_dict
from jaxrl_llm.config.logging_config import BEFORE_UPDATE, SKIPPABLE, AlertConfig
from jaxrl_llm.metrics import alerts as alerts_lib
from jaxrl_llm.metrics import statistics
from jaxrl_llm.metrics.alerts import ALERTS, Alerts
from jaxrl_llm.types import Rewards

SPEED = {"timing_s/step": 2.0, "timing_s/testing": 1.0, "perf/total_num_tokens": 100.0}
QUIET = {name: AlertConfig(limit=0.0, action="off") for name in ALERTS}


def rewards(*scores, failures=0):
    zeros = np.zeros(len(scores), np.float32)
    return Rewards(
        scores=np.array(scores, np.float32),
        terms={"answer": np.array(scores, np.float32)},
        weights={},
        costs=zeros,
        baselines=zeros,
        details=({},) * len(scores),
        num_failures=failures,
        num_calls=len(scores),
    )


def only(name, **alert):
    """Returns a config with one alert."""
    default = getattr(AlertsConfig(), name)
    if default.action == "off" or default.action == "skip":
        default = dataclasses.replace(default, action="continue")
    return AlertsConfig(**{**QUIET, name: dataclasses.replace(default, **alert)})


CASES = [
    ("nonfinite", {"on_host": {"actor/grad_norm": math.inf}}, {}),
    ("nonfinite", {"on_host": {"critic/loss": math.nan}}, {}),
    ("nonfinite", {"on_host": {"dpo/skipped_updates": 1.0}}, {"on_host": {"dpo/loss": 1.0}}),
    ("kl", {"on_host": {"actor/ppo_kl": 0.6}}, {"on_host": {"actor/ppo_kl": 0.4}}),
    ("reference_kl", {"of_estimates": {"actor/reward_kl_penalty": 11.0}}, {}),
    ("reference_kl", {"on_host": {"actor/kl_loss": 11.0}}, {}),
    (
        "entropy",
        {"of_estimates": {"actor/entropy": np.float32(0.0)}},
        {"of_estimates": {"actor/entropy": 0.5}},
    ),
    ("log_prob_difference", {"of_estimates": {"training/rollout_probs_diff_mean": 0.2}}, {}),
    ("reward_failures", {"rewards": rewards(0, 1, 0, 1, failures=1)}, {}),
    ("constant_reward", {"rewards": rewards(1, 1)}, {"rewards": rewards(1, 0)}),
    ("staleness", {"on_host": {"training/off_policy/staleness/mean": 4.5}}, {}),
    ("rollout_idle", {"on_host": {"perf/idle_share/rollout": 0.6}}, {}),
    (
        "learner_idle",
        {"on_host": {"perf/idle_share/learner": 0.6}},
        {"on_host": {"perf/idle_share/learner": 0.4, "perf/idle_share/rollout": 0.9}},
    ),
    ("disk", {"disk": (1000, 980, 20)}, {"disk": (1000, 500, 500)}),
]


SPREAD = rewards(0, 1)


def observe(watch, monkeypatch, step=1, rewards=SPREAD, of_estimates=(), on_host=(), disk=()):
    total, used, free = disk or (1000, 0, 1000)
    usage = type("Usage", (), {"total": total, "used": used, "free": free})
    monkeypatch.setattr(alerts_lib.shutil, "disk_usage", lambda path: usage)
    of_rewards = statistics.reward_metrics(rewards, np.arange(len(rewards.scores)))
    numbers = {**of_rewards, **SPEED, **dict(of_estimates), **dict(on_host)}
    return watch.check(step, numbers)


@pytest.mark.parametrize("name, bad, good", CASES)
def test_each_fires_on_its_own_reading(name, bad, good, tmp_path, monkeypatch, caplog):
    stopped = []
    with Alerts(only(name, steps=1, action="stop"), tmp_path, stopped.append) as watch:
        assert observe(watch, monkeypatch, **good) == {f"alerts/{name}": 0.0}
        assert not caplog.records and not stopped
        with caplog.at_level(logging.WARNING):
            assert observe(watch, monkeypatch, step=7, **bad) == {f"alerts/{name}": 1.0}
    (text,) = stopped
    assert f"alert {name} in step 7" in text and f"config.alerts.{name}.limit" in text
    assert text in caplog.text
    with Alerts(AlertsConfig(**QUIET), tmp_path, stopped.append) as silent:
        assert observe(silent, monkeypatch, **bad) == {}


def test_throughput_is_compared_to_its_median_without_evaluations(tmp_path, monkeypatch):
    config = only("throughput", limit=0.5, steps=1)
    with Alerts(config, tmp_path, lambda _: None) as watch:
        for step in range(1, 8):
            assert observe(watch, monkeypatch, step) == {"alerts/throughput": 0.0}
        slow = {"timing_s/step": 5.0, "timing_s/testing": 1.0}
        assert observe(watch, monkeypatch, on_host=slow) == {"alerts/throughput": 1.0}
        evaluated = {"timing_s/step": 60.0, "timing_s/testing": 59.0}
        assert observe(watch, monkeypatch, on_host=evaluated) == {"alerts/throughput": 0.0}


def test_a_busy_machine_is_no_alert_and_a_slow_one_is(tmp_path, monkeypatch):
    def fires(watch, seconds):
        slow = {"timing_s/step": seconds, "timing_s/testing": 0.0}
        return observe(watch, monkeypatch, on_host=slow)["alerts/throughput"]

    with Alerts(only("throughput"), tmp_path, lambda _: None) as watch:
        # The first step compiles; then every other step is ten times slower, or all are twice.
        assert not any(fires(watch, seconds) for seconds in (60, *[1, 10] * 12, *[2] * 12))
        found = [fires(watch, 20.0) for _ in range(40)]
    assert found[:5] == [0, 0, 0, 0, 1]
    assert not any(found[-20:])  # a pace that stays is the measure in the end


def test_a_disk_that_does_not_answer_is_said_and_the_run_goes_on(tmp_path, caplog):
    with Alerts(only("disk"), tmp_path / "gone", lambda _: None) as watch:
        assert watch.check(1, SPEED) == {"alerts/disk": 0.0}
    assert "free space of" in caplog.text and "No such file" in caplog.text


def test_steps_in_a_row_are_state(tmp_path, monkeypatch):
    config = only("constant_reward", steps=3)
    same = {"rewards": rewards(2, 2)}
    with Alerts(config, tmp_path, lambda _: None) as watch:
        found = [observe(watch, monkeypatch, **same)["alerts/constant_reward"] for _ in range(2)]
        state = json.loads(json.dumps(watch.get_state()))
    with Alerts(config, tmp_path, lambda _: None) as watch:
        watch.set_state(state)
        found += [observe(watch, monkeypatch, **same)["alerts/constant_reward"]]
        found += [observe(watch, monkeypatch)["alerts/constant_reward"]]
        found += [observe(watch, monkeypatch, **same)["alerts/constant_reward"]]
    assert found == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_skip_leaves_the_update_out_and_reads_only_what_it_must(tmp_path):
    class Untouchable:
        def __array__(self, *_):
            raise AssertionError("the device was read")

    with Alerts(only("constant_reward", steps=1, action="skip"), tmp_path, print) as watch:
        numbers = {"actor/entropy": Untouchable()}
        for scores, allowed in (((1, 1), False), ((1, 0), True)):
            of_rewards = statistics.reward_metrics(rewards(*scores), np.arange(2))
            assert watch.allow_update({**numbers, **of_rewards}) == allowed
    with Alerts(only("entropy", action="skip"), tmp_path, print) as watch:
        assert not watch.allow_update({"actor/entropy": np.float32(0.0)})
        assert watch.allow_update({"actor/entropy": np.float32(1.0)})


@pytest.fixture
def webhook():
    """An address that posts are sent to, and what arrived there."""
    arrived = []

    class Handler(local_server.JsonHandler):
        def do_POST(self):
            arrived.append(self.read_json())
            self.reply(200, {})

    with local_server.serving(Handler) as address:
        yield f"{address}/hook", arrived


def test_webhook_and_function_are_called(tmp_path, monkeypatch, webhook):
    address, arrived = webhook
    (tmp_path / "mine.py").write_text(
        "import json, pathlib\n"
        "def tell(message):\n"
        "    path = pathlib.Path(__file__).with_name('told')\n"
        "    path.write_text(json.dumps(message))\n"
    )
    config = dataclasses.replace(only("kl"), webhook=address, function=f"{tmp_path}/mine.py:tell")
    with Alerts(config, tmp_path, print) as watch:
        observe(watch, monkeypatch, 5, on_host={"actor/ppo_kl": 2.0})
    (message,) = arrived
    assert message == json.loads((tmp_path / "told").read_text())
    assert (message["alert"], message["step"], message["reading"]) == ("kl", 5, 2.0)
    assert message["workdir"] == str(tmp_path) and "alert kl in step 5" in message["text"]


def test_failing_receivers_neither_block_nor_end_the_run(tmp_path, monkeypatch, caplog):
    (tmp_path / "mine.py").write_text(
        "import time\ndef tell(message):\n    time.sleep(1)\n    raise RuntimeError('no')\n"
    )
    nobody = "http://127.0.0.1:9/closed"
    config = dataclasses.replace(only("kl"), webhook=nobody, function=f"{tmp_path}/mine.py:tell")
    begin = time.monotonic()
    watch = Alerts(config, tmp_path, print)
    for step in range(100):
        observe(watch, monkeypatch, step, on_host={"actor/ppo_kl": 2.0})
    assert time.monotonic() - begin < 20.0
    assert "messages are queued" in caplog.text
    while "could not be sent: URLError" not in caplog.text:
        assert time.monotonic() - begin < 100.0
        time.sleep(0.01)
    monkeypatch.setattr(alerts_lib, "CLOSE_TIMEOUT_S", 0.1)
    watch.__exit__()
    watch._thread.join(60.0)
    assert not watch._thread.is_alive()


@pytest.mark.parametrize("content", ["def tell(", "import absent_package", "def other(m): pass"])
def test_a_function_that_cannot_be_used_is_refused(tmp_path, content):
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.alerts\.function: \w+Error"):
        alerts_lib.check(AlertsConfig(function=f"{tmp_path}/mine.py:tell"))


def test_an_alert_that_could_never_skip_is_refused():
    values = default_config_dict()
    values.rewards.models = {"judge": {"path": "folder"}}
    values.algorithm.old_log_probs = "rollout"
    for name in ("kl", "reward_failures", "log_prob_difference"):
        values.alerts[name].action = "skip"
    with pytest.raises(ConfigError) as refused:
        from_config_dict(values)
    text = str(refused.value)
    assert "alerts.kl.action" not in text  # against the engine's log-probs there is one
    for name in ("reward_failures", "log_prob_difference"):
        assert f"config.alerts.{name}.action: 'skip' would never skip" in text


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("disk.action", "skip", "'skip' comes too late"),
        ("kl.action", "skip", "'skip' would never skip: a step has one update"),
        ("kl.steps", 0, r"must be in \[1, "),
        ("entropy.limit", -1.0, r"must be in \[0, inf\]"),
        ("webhook", "file:///etc/passwd", "must begin with http"),
        ("function", "mine", "must be 'package.module:function'"),
        ("kl", {"action": "skip", "limit": 0.1, "steps": 2}, "skipped at once"),
    ],
)
def test_unusable_alert_settings_are_refused(key, value, message):
    values = default_config_dict()
    values.rewards.functions.answer = {"function": "arithmetic"}
    group = values.alerts
    *parents, last = key.split(".")
    for parent in parents:
        group = group[parent]
    group[last] = value
    with pytest.raises(ConfigError, match=message):
        from_config_dict(values)


def test_skip_alerts_read_metrics_known_before_the_update():
    """Those before a step's updates; or, the loss and the KL, within the update's program."""
    assert set(SKIPPABLE) == {"nonfinite", "kl", *BEFORE_UPDATE} <= set(ALERTS)
    assert all(ALERTS[name].metric_names for name in BEFORE_UPDATE)
