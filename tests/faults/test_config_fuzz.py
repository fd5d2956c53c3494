"""Any change of the settings is refused with a message, or gives a run that can be built."""

import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from config_fields import DeclaredField, declared, nested
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms import requirements
from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.config.bridge import from_config_dict, to_dict
from jaxrl_llm.config.recipes import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    RECIPES,
    REJECTIONS,
)
from jaxrl_llm.errors import UserError
from jaxrl_llm.learner import job_models
from jaxrl_llm.metrics import alerts, trackers
from jaxrl_llm.planning import compiled_memory, resolve_sizes

BASE: Mapping[str, Any] = {
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.mlp_size": 16,
    "data.max_prompt_tokens": 8,
    "rollout.max_response_tokens": 8,
    "rewards.functions.answer.function": "arithmetic",
    "algorithm.samples_per_prompt": 4,
    "trainer.prompts_per_step": 8,
    "metrics.tensorboard": False,
}
WORDS = {
    "recipe": tuple(RECIPES),
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "kl_estimator": KL_ESTIMATORS,
    "rejections": REJECTIONS,
}
# Small enough that nothing real is made of them, and every kind of wrong.
WHOLE = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 16, 48, -1, -8])
REAL = st.sampled_from([0.0, 1.0, 0.5, 2.0, -1.0, 1e-9, 1e30, math.inf, -math.inf, math.nan])
WRONG = st.sampled_from([None, "ten", 3.5, True, (), {"a": 1}, [1, "b"], -5, "no/such:file"])


FIELDS = [field for field in declared(RLConfig) if "NAME" not in field.key]


LOSS_ARGS = ("dual_clip", "tau_pos", "share", "coef")
FIELDS += [DeclaredField(f"algorithm.loss_args.{name}", float, None, 0.0) for name in LOSS_ARGS]


def right(key: str, hint: Any) -> st.SearchStrategy:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(right(key, arguments[0]), max_size=2).map(tuple)
    if hint is str:
        words = WORDS.get(key.rpartition(".")[2], ())
        return st.sampled_from([*words, "", "nothing_known", "a:b", "x.py:f"])
    if origin is Mapping:
        return st.just({})
    return {int: WHOLE, float: REAL, bool: st.booleans()}[hint]


@st.composite
def changes(draw) -> dict[str, Any]:
    chosen = draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=4))
    return {
        key: draw(WRONG if draw(st.integers(0, 7)) == 0 else right(key, hint))
        for key, hint, *_ in chosen
    }


def models_of(config: RLConfig) -> job_models.Models:
    return job_models.make_models(config, resolve_sizes.resolved_meshes(config))


def tried(changed: Mapping[str, Any]) -> RLConfig | None:
    """The config if it can be built, None if it was refused with a message."""
    try:
        config = from_config_dict(nested({**BASE, **changed}))
    except ConfigError as error:
        assert error.problems and all(p.startswith("config") for p in error.problems)
        return None
    # What a run writes into its folder is read back as the same run.
    assert from_config_dict(to_dict(config)) == config
    list(config.warnings())
    try:
        requirements.check_functions(config.algorithm)
        trackers.check(config.metrics)
        alerts.check(config.alerts)
        models = models_of(config)
    except UserError as error:
        assert str(error)
        return None
    compiled_memory.abstract_state(config, models)
    return config


def fuzz(max_examples: int, lower_every: int) -> None:
    counts = {"refused": 0, "built": 0, "lowered": 0}

    @settings(
        max_examples=max_examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(found=changes())
    def run(found):
        config = tried(found)
        counts["refused" if config is None else "built"] += 1
        if config is None or counts["built"] % lower_every:
            return
        for lower in compiled_memory.program_lowerings(config, models_of(config)).values():
            lower()
        counts["lowered"] += 1

    run()
    assert counts["refused"] > max_examples // 10 and counts["built"] > max_examples // 10, counts
    assert sum((counts["refused"], counts["built"])) >= max_examples * 0.9, counts
    print(counts)


def test_a_change_of_the_settings_is_refused_or_works():
    fuzz(40, lower_every=1000)


@pytest.mark.parametrize(
    "count",
    [pytest.param(600, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.nightly)],
)
def test_many_changes_are_refused_or_work(count):
    fuzz(count, lower_every=40)
