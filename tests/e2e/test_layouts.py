"""Runs that change their mesh or placement between two steps go on as restarted ones do."""

import json

import jax
import numpy as np
import pytest
import recipe_settings
import runs

from jaxrl_llm.config import ConfigError, layout_requests
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.errors import Interrupted
from jaxrl_llm.sampling import async_source
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import idle_balancing, relayout_schedule, rl
from jaxrl_llm.trainer.run import TrainingRun

STEPS = 4
SMALL = {
    "model": {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 2, "mlp_size": 32},
    "rollout": {"chunk_steps": 3},
    "algorithm": {"recipe": "grpo", "samples_per_prompt": 4},
    "trainer": {
        "num_steps": STEPS,
        "prompts_per_step": 4,
        "max_tokens_per_microbatch": 512,
        "minibatch_size": 8,
    },
    "mesh": {"fsdp": 2},
}
TENSOR = {"mesh": {"fsdp": 1, "tensor": 2}}


@pytest.fixture
def train(tmp_path):
    """Returns `train(name, settings, num_devices=2) -> (folder, weights)`."""

    def begin(name, *settings, num_devices=2):
        values = recipe_settings.merged(recipe_settings.SUMS, recipe_settings.UNTAUGHT)
        for more in (SMALL, *settings):
            values = recipe_settings.merged(values, more)
        with mesh_lib.use_devices(jax.devices()[:num_devices]):
            state = rl.train(from_config_dict(values), tmp_path / name)
        return tmp_path / name, jax.device_get(state)

    return begin


def assert_same(found, wanted):
    """The state and all numbers are the same, bit for bit."""
    for mine, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_array_equal(mine, other)
    numbers = [runs.metrics(folder) for folder, _ in (found, wanted)]
    for step in range(1, STEPS + 1):
        assert runs.repeatable(numbers[0][step]) == runs.repeatable(numbers[1][step]), step


CASES = {
    "grpo": {},
    "ppo": {"algorithm": {"recipe": "ppo"}, "critic": {"optimizer": {"learning_rate": 1e-3}}},
    "ahead": {"trainer": {"sampling": "async", "max_staleness": 2}},
    "lora": {"lora": {"rank": 2}, "algorithm": {"kl_in": "loss", "kl_coef": 0.1}},
    "images": {
        "model": {"family": "qwen2_5_vl", "vision": {"hidden_size": 32, "num_heads": 2}},
        "data": {"task": "shapes", "max_prompt_tokens": 40, "chat_template": True},
        "trainer": {"tower_learning_rate": 1e-3},
    },
}
APART = {"placement": {"choice": "hybrid"}, "mesh": {"fsdp": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "text", "settings"),
    [
        ("grpo", "mesh.fsdp=1 mesh.tensor=2", TENSOR),
        pytest.param(
            "ppo", "placement.choice=hybrid mesh.fsdp=1", APART, marks=pytest.mark.nightly
        ),
        ("ahead", "mesh.fsdp=1 mesh.tensor=2", TENSOR),
        pytest.param("lora", "mesh.fsdp=1 mesh.tensor=2", TENSOR, marks=pytest.mark.nightly),
        pytest.param("images", "mesh.fsdp=1 mesh.tensor=2", TENSOR, marks=pytest.mark.nightly),
    ],
)
def test_a_change_is_a_restart(case, text, settings, train, monkeypatch):
    """Numbers of the steps before and after, weights, moments, random state."""
    begin = TrainingRun.begin_step

    def ended(run, step, state):
        if step == 3:
            run.interruption.request_stop("enough")
        return begin(run, step, state)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(TrainingRun, "begin_step", ended)
        train("restarted", CASES[case])
    wanted = train("restarted", CASES[case], settings)
    found = train("changed", CASES[case], {"trainer": {"layouts": (f"3 {text}",)}})
    assert_same(found, wanted)


@pytest.mark.slow
def test_a_command_is_followed_refused_and_remembered(train, tmp_path, monkeypatch):
    """What cannot be done changes nothing; a resumed run changes where the first one did."""
    told = []
    change = relayout_schedule.RelayoutSchedule.new_config

    def asking(self, step):
        asked = {2: "mesh.fsdp=1 mesh.tensor=2", 3: "mesh.tensor=3", 4: ""}
        if step in asked and not layout_requests.read_answers(tmp_path / "run")[step - 2 :]:
            layout_requests.request_layout(tmp_path / "run", asked[step])
        found = change(self, step)
        told.append((step, found and found.mesh.tensor))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(relayout_schedule.RelayoutSchedule, "new_config", asking)
        first = train("run", {"checkpoint": {"every": 1, "keep": 9}})
    assert told == [(1, None), (2, 2), (3, None), (4, 1)]
    answers = layout_requests.read_answers(tmp_path / "run")
    assert [line["step"] for line in answers] == [2, 3, 4]
    assert [bool(line["refused"]) for line in answers] == [False, True, False]
    assert "mesh.tensor=3" in answers[1]["layout"]
    # The same run again from its second step on.
    for step in (3, 4):
        folder = tmp_path / "run" / "checkpoints" / str(step)
        folder.rename(tmp_path / f"away_{step}")
    second = train("run", {"checkpoint": {"every": 1, "keep": 9}})
    assert_same(second, first)


@pytest.mark.nightly
def test_devices_follow_idle_times(tmp_path, monkeypatch):
    """As if the config had named the layout for that step."""
    monkeypatch.setattr(async_source, "_all_ready", lambda pending: True)  # else it depends on time
    learners = dict.fromkeys(("policy", "critic", "reference", "reward"), "learn")
    settings = {
        "trainer": {"sampling": "async", "max_staleness": 2},
        "mesh": {"fsdp": -1},
        "placement": {
            "choice": "by_hand",
            "pools": {"learn": {"devices": 1}, "sample": {"devices": 2}},
            "roles": {**learners, "rollout": "sample"},
        },
    }

    def train(name, **changes):
        values = recipe_settings.merged(recipe_settings.SUMS, recipe_settings.UNTAUGHT)
        for more in (SMALL, settings, changes):
            values = recipe_settings.merged(values, more)
        with mesh_lib.use_devices(jax.devices()[:3]):
            state = rl.train(from_config_dict(values), tmp_path / name)
        return tmp_path / name, jax.device_get(state)

    text = "placement.pools.learn.devices=2 placement.pools.sample.devices=1"
    wanted = train("wanted", trainer={"layouts": (f"3 {text}",)})
    idle = {"perf/idle_share/learner": 0.0, "perf/idle_share/rollout": 0.8}
    see = idle_balancing.IdleTimeBalancer.observe
    monkeypatch.setattr(
        idle_balancing.IdleTimeBalancer, "observe", lambda self, numbers: see(self, numbers | idle)
    )
    found = train("found", placement={"balance_every": 2})
    assert layout_requests.read_answers(tmp_path / "found") == [
        {"step": 3, "layout": text, "refused": ""}
    ]
    assert_same(found, wanted)


def test_malformed_layouts_are_refused(tmp_path):
    values = recipe_settings.merged(recipe_settings.SUMS, SMALL)
    config = from_config_dict(values)
    assert (
        layout_requests.apply_layout(config, "mesh.tensor=2 mesh.rollout=train").mesh.rollout
        == "train"
    )
    for text, said in (
        ("mesh.tensor", r"'mesh.tensor' is not KEY=VALUE with one of mesh.data"),
        ("trainer.epochs=2", r"'trainer.epochs=2' is not KEY=VALUE"),
        ("mesh.tensor=many", r"config.mesh.tensor: expected int, got 'many'"),
        ("mesh.tensor=-1", r"at most one axis may be -1"),
    ):
        with pytest.raises(ConfigError, match=said):
            layout_requests.apply_layout(from_config_dict({**values, "mesh": {}}), text)
    for text in ("mesh.tensor=2", "1 mesh.tensor=2", "3", "x mesh.tensor=2", ""):
        with pytest.raises(ConfigError, match=r"layouts\[0\]: .* is not 'STEP KEY=VALUE ...'"):
            from_config_dict(recipe_settings.merged(values, {"trainer": {"layouts": (text,)}}))
    (tmp_path / "layouts.jsonl").write_text(json.dumps({"step": 1}) + '\n{"st')
    assert layout_requests.read_answers(tmp_path) == [{"step": 1}]
    assert layout_requests.pending_request(tmp_path) is None
