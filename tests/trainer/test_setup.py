"""What a run is set up from: checks first, nothing allocated or written before the last of them."""

import contextlib

import jax
import numpy as np
import pytest

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.errors import UserError
from jaxrl_llm.sampling.async_source import AsyncSource
from jaxrl_llm.sampling.source import SyncSource
from jaxrl_llm.trainer import setup
from jaxrl_llm.trainer.run import TrainingRun

VALUES = {
    "model": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_size": 8,
        "mlp_size": 16,
    },
    "data": {
        "task": "arithmetic",
        "arithmetic_terms": 2,
        "arithmetic_train_prompts": 48,
        "arithmetic_eval_prompts": 4,
        "max_prompt_tokens": 32,
        "chat_template": False,
    },
    "rollout": {"max_response_tokens": 12},
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}, "num_workers": 1},
    "trainer": {
        "num_steps": 4,
        "prompts_per_step": 8,
        "minibatch_size": 64,
        "max_tokens_per_microbatch": 1024,
    },
    "algorithm": {"samples_per_prompt": 8},
    "evaluation": {"before": False, "after": False},
}


def config(**groups):
    return from_config_dict(
        {**VALUES, **{name: VALUES.get(name, {}) | group for name, group in groups.items()}}
    )


def num_arrays():
    return len(jax.live_arrays())


def checked(of):
    with contextlib.ExitStack() as exit_stack:
        return setup.validate_run(of, exit_stack)


def test_checks_read_the_rows_and_allocate_nothing():
    before = num_arrays()
    found = checked(config())
    assert num_arrays() == before
    assert len(found.training_set.prompts) == 48
    assert found.models.mesh.size == len(jax.devices())
    assert found.planned_bytes > 0
    assert found.world is None  # no tools, no environments


def test_held_out_rows_are_read_only_for_an_evaluation():
    assert len(checked(config()).held_out.prompts) == 0
    evaluated = checked(config(evaluation={"every": 2}))
    assert len(evaluated.held_out.prompts) == 4
    texts = [{prompt.text for prompt in rows.prompts}
             for rows in (evaluated.training_set, evaluated.held_out)]  # fmt: skip
    assert not texts[0] & texts[1]


REFUSED = {
    "reward function": (
        {"rewards": {"functions": {"answer": {"function": "no_module:reward"}}}},
        "no_module",
    ),
    "schedule file": (
        {"trainer": {"sampling": "async", "schedule": "replay", "schedule_file": "/nowhere"}},
        "/nowhere",
    ),
    "later layout": ({"trainer": {"layouts": ("2 mesh.tensor=3",)}}, "does not fill the 8"),
    "critic": (
        {"algorithm": {"advantage": "gae"}, "critic": {"path": "/nowhere"}},
        "/nowhere",
    ),
    "prompt length": ({"data": {"max_prompt_tokens": 2}}, "max_prompt_tokens"),
}


@pytest.mark.parametrize("groups, message", REFUSED.values(), ids=REFUSED)
def test_impossible_run_is_refused_before_allocation(tmp_path, groups, message):
    of, before = config(**groups), num_arrays()
    workdir = tmp_path / "run"
    with pytest.raises(UserError, match=message), TrainingRun(of, workdir) as run:
        setup.set_up_run(of, run)
    assert num_arrays() == before and not workdir.exists()


class Claimed(Exception):
    """The run has taken its folder."""


def test_the_folder_is_claimed_between_checks_and_allocation(tmp_path):
    class Stopped(TrainingRun):
        def claim(self, models, *datasets, planned_bytes=0.0):
            training_set, held_out = datasets
            assert (len(training_set.prompts), len(held_out.prompts)) == (48, 0)
            assert planned_bytes > 0
            assert num_arrays() == before
            raise Claimed

    before = num_arrays()
    with pytest.raises(Claimed), Stopped(config(), tmp_path / "run") as run:
        setup.set_up_run(config(), run)


@pytest.mark.parametrize("sampling, source", [("sync", SyncSource), ("async", AsyncSource)])
def test_a_run_is_prepared(tmp_path, sampling, source):
    of = config(algorithm={"kl_in": "loss", "kl_coef": 0.1}, trainer={"sampling": sampling})
    with TrainingRun(of, tmp_path / "run") as run:
        prepared, state = setup.set_up_run(of, run)
        assert isinstance(prepared.source, source)
        assert prepared.config is of and prepared.context.scorer is prepared.context.eval_scorer
        # As wide as the longest prompt and response, not as the most that is allowed.
        longest = max(len(prompt.tokens) for prompt in prepared.context.training_set.prompts)
        assert longest + 12 <= prepared.width < of.max_sequence_tokens
        # The reference is the policy as RL begins, in arrays of its own: the policy's are donated.
        policy, reference = state.policy.params, prepared.frozen.reference
        jax.tree.map(np.testing.assert_array_equal, policy, reference)
        assert not {id(a) for a in jax.tree.leaves(policy)} & {
            id(a) for a in jax.tree.leaves(reference)
        }
        assert state.critic.params == {} and int(state.policy.num_updates) == 0


def test_a_changed_layout_keeps_the_weights(tmp_path):
    of, changed = config(), config(mesh={"tensor": 2})
    with TrainingRun(of, tmp_path / "run") as run:
        prepared, state = setup.set_up_run(of, run)
        state = run.resume(state, prepared.source, prepared.models.packer)
        before = jax.tree.map(np.array, state)
        relaid, moved = setup.relayout_run(changed, prepared, state)
    jax.tree.map(np.testing.assert_array_equal, moved, before)
    assert relaid.config is changed and relaid.models.mesh.shape["tensor"] == 2
    # All weights are split by the new mesh, and what depends on it is built anew.
    assert {a.sharding.mesh for a in jax.tree.leaves(moved.policy.params)} == {relaid.models.mesh}
    assert relaid.source is not prepared.source and relaid.sampler is not prepared.sampler
    # Rows, scorers and processes stay.
    assert relaid.context is prepared.context and relaid.width == prepared.width
