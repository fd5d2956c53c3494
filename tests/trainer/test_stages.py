"""The stages before RL learn what they are given, once: a later start reads their product."""

import dataclasses

import jax
import numpy as np
import pytest
from jaxrl_llm.seal import SEAL

from jaxrl_llm.checkpoint import saver
from jaxrl_llm.config import OptimizerConfig, SupervisedConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.data import supervised as examples
from jaxrl_llm.learner import experience
from jaxrl_llm.learner import roles as roles_lib
from jaxrl_llm.rewards import base as rewards_lib
from jaxrl_llm.trainer import rl, supervised
from jaxrl_llm.types import Prompt, Rollouts

VALUES = {
    "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "head_size": 16},
    "data": {"arithmetic_terms": 2, "arithmetic_train_prompts": 60, "arithmetic_eval_prompts": 20},
    "rollout": {"max_response_tokens": 16},
    "rewards": {"models": {"judge": {}}},
    "evaluation": {"functions": {"answer": {"function": "arithmetic"}}},
    "warm_start": {"num_steps": 20, "batch_size": 32, "optimizer": {"learning_rate": 3e-3}},
    "preference": {"num_steps": 150, "batch_size": 32, "optimizer": {"learning_rate": 2e-3}},
}


@pytest.fixture(scope="module")
def roles():
    VALUES["data"] |= {"max_prompt_tokens": 16, "chat_template": False}
    return roles_lib.build(from_config_dict(VALUES))


def losses(caplog, stage: str) -> list[float]:
    lines = [record.getMessage() for record in caplog.records]
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(stage)]


def same_bits(left, right) -> bool:
    equal = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), left, right
    )
    return all(jax.tree.leaves(equal))


def test_warm_start_lowers_the_loss_and_is_read_back(roles, tmp_path, caplog):
    begin = roles_lib.initial_policy(roles)
    with caplog.at_level("INFO", logger="absl"):
        first = supervised.warm_start(roles, jax.tree.map(lambda a: a.copy(), begin), tmp_path)
    found = losses(caplog, "warm_start")
    # 104 tokens of equal chance cost log(104) = 4.64; the sums use 14 of them.
    assert found[0] == pytest.approx(4.64, abs=0.3) and found[-1] < np.log(14)
    caplog.clear()
    again = supervised.warm_start(roles, jax.tree.map(lambda a: a.copy(), begin), tmp_path)
    assert same_bits(first, again) and not losses(caplog, "warm_start")
    assert not same_bits(first, begin)


def test_no_warm_start_leaves_the_policy_alone(roles, tmp_path):
    config = dataclasses.replace(roles.config, warm_start=SupervisedConfig(num_steps=0))
    params = roles_lib.initial_policy(roles)
    same = supervised.warm_start(dataclasses.replace(roles, config=config), params, tmp_path)
    assert same is params and not list(tmp_path.iterdir())


def as_rollouts(sequences) -> Rollouts:
    tokens, lengths, mask = supervised._padded(sequences)
    count = len(lengths)
    return Rollouts(
        tokens=tokens,
        response_mask=mask,
        rollout_log_probs=np.zeros(tokens.shape, np.float32),
        lengths=lengths,
        group_ids=np.zeros(count, np.int32),
        stopped=np.ones(count, bool),
        prompts=(Prompt((), "", "arithmetic", "", {}, 0),),
        responses=("",) * count,
    )


@pytest.mark.slow
def test_a_reward_model_tells_right_from_wrong(roles, tmp_path):
    """On its own pairs nearly always; it scores as the scorer of RL does."""
    policy = roles_lib.initial_policy(roles)
    trained = supervised.reward_models(roles, policy, tmp_path)
    with_models = roles_lib.with_frozen_models(roles, policy, trained)
    config = roles.config
    pairs = examples.preference_pairs(config.data, roles.tokenizer, "train", config.seed)
    sequences = [(prompt, answer) for prompt, *both in pairs for answer in both]
    with rewards_lib.build(config.rewards, experience.model_scorers(with_models)) as scorer:
        scores = scorer.score(as_rollouts(sequences)).scores.reshape(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).mean() > 0.9
    again = supervised.reward_models(roles, policy, tmp_path)
    assert same_bits(trained["judge"], again["judge"])


def test_a_damaged_product_is_refused(roles, tmp_path):
    params = roles_lib.initial_policy(roles)
    saver.save_tree(tmp_path / "warm_start", params, {})
    seal = tmp_path / "warm_start" / SEAL
    seal.write_text(seal.read_text()[:-1])
    with pytest.raises(saver.CheckpointError, match="remove it and run the stage again"):
        supervised.warm_start(roles, params, tmp_path)


@pytest.mark.slow
def test_the_whole_run_as_a_function(tmp_path):
    """Reward model trained, PPO against its score, held-out answers judged by the function."""
    few = SupervisedConfig(num_steps=2, batch_size=8, optimizer=OptimizerConfig())
    config = from_config_dict(
        {
            **VALUES,
            "algorithm": {"recipe": "ppo"},
            "trainer": {"num_steps": 2, "prompts_per_step": 8},
            "evaluation": {**VALUES["evaluation"], "num_prompts": 8, "every": 1},
            "metrics": {"tensorboard": False, "console": False},
        }
    )
    config = dataclasses.replace(config, warm_start=few, preference=few)
    state = rl.train(config, tmp_path / "run")
    assert int(state.policy.num_updates) == int(state.critic.num_updates) == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.json",
        "warm_start",
        "reward_model",
        "checkpoints",
        "metrics.jsonl",
        "rollouts",
    }
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count("val-core/arithmetic/mean@1") == 3 and text.count("reward/judge/mean") == 2
