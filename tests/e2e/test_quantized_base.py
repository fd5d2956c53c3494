"""GRPO with adapters over an NF4 base: it learns, samples what it trains, exports it merged."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import saved_policy
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.errors import ConfigError
from jaxrl_llm.learner import job_models, weights
from jaxrl_llm.models import lora
from jaxrl_llm.models.hf import checkpoint
from jaxrl_llm.models.quantized import kernels
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import rl

DIGITS = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""
VALUES = {
    "model": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "head_size": 16,
        "mlp_size": 128,
        "quantization": "nf4",
    },
    "lora": {"rank": 8, "alpha": 16.0},
    "data": {
        "arithmetic_terms": 2,
        "arithmetic_train_prompts": 60,
        "arithmetic_eval_prompts": 20,
        "max_prompt_tokens": 16,
        "chat_template": False,
    },
    "rollout": {"max_response_tokens": 12},
    "algorithm": {"recipe": "grpo", "samples_per_prompt": 8, "kl_coef": 0.001},
    "trainer": {
        "num_steps": 25,
        "prompts_per_step": 16,
        "minibatch_size": 64,
        "optimizer": {"learning_rate": 5e-3},
    },
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
    "evaluation": {"before": False, "after": False},
    "metrics": {"tensorboard": False, "console": False},
}
TOKENS = np.random.default_rng(0).integers(3, 30, (2, 12)).astype(np.int32)


def hidden_states(network, params):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    forward = lambda p: network.forward(p, TOKENS, positions, jnp.ones_like(TOKENS))[0]  # noqa: E731
    return np.asarray(jax.jit(forward)(params))


@pytest.mark.slow
def test_a_run_over_an_nf4_base_learns_and_is_exported(tmp_path, monkeypatch):
    # Wide embeddings: with those of a random model no hidden state makes a token likely.
    initial = weights.initial_policy

    def wide_embeddings(config, models):
        params = initial(config, models)
        return {**params, "embed": 8 * params["embed"]}

    monkeypatch.setattr(weights, "initial_policy", wide_embeddings)
    reward = tmp_path / "digits.py"
    reward.write_text(DIGITS)
    rewards = {"functions": {"digits": {"function": f"{reward}:score"}}}
    config = from_config_dict({**VALUES, "rewards": rewards})
    workdir, folder = tmp_path / "run", tmp_path / "export"
    with mesh_lib.use_devices(jax.devices()[:1]):
        rl.train(config, workdir)
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["data"] for line in lines]
        scores = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
        assert np.mean(scores[-5:]) > np.mean(scores[:3]) + 0.15, scores
        # Sampling has the codes and adapters of training.
        gaps = [step["training/rollout_probs_diff_mean"] for step in steps]
        assert max(gaps) < 1e-5

        run = saved_policy.load_run(workdir)
        params, _ = run.read_params()
        assert run.base["layers"]["0"]["mlp"]["down"]["kernel"].dtype == jnp.uint8
        merged = run.full_params(params)
        found = hidden_states(run.plain_network, merged)
        wanted = hidden_states(run.network, lora.combine_params(run.base, params))
        plain_base = job_models.plain_params(run.network, run.base)
        assert np.abs(hidden_states(run.plain_network, plain_base) - wanted).max() > 0.01
        np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())

        # A folder is quantized as it is read, to the arrays of its quantized tree.
        checkpoint.save(folder, run.plain_network, merged)
        from_folder = dataclasses.replace(
            config, model=dataclasses.replace(config.model, path=str(folder))
        )
        models = dataclasses.replace(run.models, policy=run.network)
        read = initial(from_folder, models)
        layers = jax.jit(lambda tree: kernels.quantize_layers(tree, "nf4"))(merged["layers"]["0"])
        jax.tree.map(np.testing.assert_array_equal, read["layers"]["0"], layers)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lora": {"rank": 0}}, "config.model.quantization: 'nf4' freezes the kernels"),
        ({"rollout": {"quantization": "int8"}}, "config.rollout.quantization: 'int8'"),
        ({"rollout": {"engine": "vllm"}}, "config.model.quantization: 'nf4' is sampled by"),
        ({"warm_start": {"num_steps": 5}}, "config.warm_start.num_steps: 5, but it trains"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_contradicts_it_is_refused(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        from_config_dict({**VALUES, **changes})


def test_sizes_that_blocks_do_not_divide_are_refused():
    config = from_config_dict({**VALUES, "model": {**VALUES["model"], "mlp_size": 96}})
    with pytest.raises(ConfigError, match=r"config\.model\.quantization: 'nf4', but blocks of 64"):
        job_models.make_models(config)
