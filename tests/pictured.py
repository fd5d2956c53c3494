"""A tiny run on drawn images: its models on any mesh, and responses that it sampled."""

import dataclasses
import functools

import jax

from jaxrl_llm.config import DataConfig, MeshConfig, ModelConfig, RLConfig, RolloutConfig
from jaxrl_llm.config.learner import RLTrainerConfig, VisionConfig
from jaxrl_llm.data import datasets
from jaxrl_llm.learner import job_models
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.rollout import episodes
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.types import Weights

ONE_DEVICE = MeshConfig(fsdp=1)
CONFIG = RLConfig(
    model=ModelConfig(
        family="qwen2_5_vl",
        hidden_size=32,
        num_heads=2,
        num_kv_heads=2,
        mlp_size=48,
        vision=VisionConfig(hidden_size=32, num_heads=2, mlp_size=48),
        remat="none",
    ),
    data=DataConfig(
        task="shapes",
        arithmetic_train_prompts=6,
        arithmetic_eval_prompts=1,
        max_prompt_tokens=40,
    ),
    rollout=RolloutConfig(max_response_tokens=8, num_slots=8),
    trainer=RLTrainerConfig(prompts_per_step=3, max_tokens_per_microbatch=128),
)
NUM_SAMPLES = 4


_RUNS: dict[str, tuple] = {}  # by the config's text: a config is not hashable


def on(mesh, config=CONFIG):
    """Config, models on so many devices, and the weights of a policy that reads images."""
    config = dataclasses.replace(config, mesh=mesh)
    if repr(config) not in _RUNS:
        devices = jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor]
        models = job_models.make_models(config, job_models.shared_mesh(config, devices))
        _RUNS[repr(config)] = config, models, weights_lib.initial_policy(config, models)
    return _RUNS[repr(config)]


@functools.cache
def sampled():
    """Returns what read images for samples of three prompts, the first of them twice, and these."""
    config, models, params = on(ONE_DEVICE)
    given = config.data, models.tokenizer, "train", 0, None, models.image_processor
    prompts = datasets.load_dataset(*given).batches(3)[0]
    prompts = dataclasses.replace(prompts, prompts=(*prompts.prompts, prompts.prompts[0]))
    sampler = policy_sampler.make_sampler(config, models, {})
    how = [episodes.sampling_params(config.rollout, models.eos_tokens)] * NUM_SAMPLES
    weights = Weights(sampler.weights(params), 0)
    rollouts, _ = sampler.rollout(weights, prompts, how, jax.random.key(1))
    return models.image_feature_cache, rollouts
