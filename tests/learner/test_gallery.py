"""Images through a step: read once, the same to engine and learner, on any mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.config import DataConfig, MeshConfig, ModelConfig, RLConfig, RolloutConfig
from jaxrl_llm.config.learner import RLTrainerConfig, VisionConfig
from jaxrl_llm.data import datasets
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import predict, wide
from jaxrl_llm.learner import sampler as sampler_lib
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.rollout import episodes
from jaxrl_llm.types import Weights

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


def on(mesh, config=CONFIG):
    """Returns models on so many devices, and the weights of a policy that reads images."""
    config = dataclasses.replace(config, mesh=mesh)
    sizes = mesh.data * mesh.fsdp * mesh.tensor
    models = models_lib.of_job(config, models_lib.one_mesh(config, jax.devices()[:sizes]))
    return config, models, weights_lib.initial_policy(config, models)


@functools.cache
def sampled():
    config, models, params = on(MeshConfig(fsdp=1))
    given = config.data, models.tokenizer, "train", 0, None, models.pictures
    prompts = datasets.load_dataset(*given).batches(3)[0]
    prompts = dataclasses.replace(prompts, prompts=(*prompts.prompts, prompts.prompts[0]))
    sampler = sampler_lib.build(config, models, {})
    how = [episodes.sampling_params(config.rollout, models.eos_tokens)] * NUM_SAMPLES
    weights = Weights(sampler.weights(params), 0)
    rollouts, _ = sampler.rollout(weights, prompts, how, jax.random.key(1))
    return models.gallery, rollouts


def scored(config, models, params, rollouts):
    """Returns the log-probs of sampled tokens by the learner."""
    packed = models.packer.pack_rollouts(rollouts)
    packed = wide.carried(packed, models.mesh, **models.gallery.of_rollouts(rollouts))
    of_policy, _ = predict.scoring_programs(config, models)
    with jax.set_mesh(models.mesh):
        found = of_policy({}, params, rollouts.tokens, rollouts.lengths, packed, entropy="none")
    return np.where(rollouts.response_mask, np.asarray(found[0]), 0.0)


def test_an_image_is_read_once_and_means_the_same_everywhere():
    gallery, rollouts = sampled()
    # Three images for 4 prompts of 4 samples each.
    assert gallery.num_read == 3
    assert gallery.tower.vision.image_token == gallery.pictures.image_token  # what is exported
    found = scored(*on(MeshConfig(fsdp=1)), rollouts)
    gallery.of_rollouts(rollouts)
    assert gallery.num_read == 3
    assert rollouts.response_mask.sum() > 40
    # Decode steps and packed rows differ in rounding alone.
    np.testing.assert_allclose(found, rollouts.rollout_log_probs, atol=1e-5)


def test_the_image_matters():
    _, rollouts = sampled()
    prompts = rollouts.prompts
    swapped = [
        dataclasses.replace(prompt, images=other.images)
        for prompt, other in zip(prompts, prompts[1:] + prompts[:1], strict=True)
    ]
    other = dataclasses.replace(rollouts, prompts=tuple(swapped))
    found = scored(*on(MeshConfig(fsdp=1)), other)
    assert np.abs(found - rollouts.rollout_log_probs).max() > 1e-4


@pytest.mark.slow
def test_prompts_that_stand_once_or_in_every_row_are_the_same():
    _, rollouts = sampled()
    shared = dataclasses.replace(CONFIG.trainer, shared_prompts="off")
    config = dataclasses.replace(CONFIG, trainer=shared)
    found = scored(*on(MeshConfig(fsdp=1), config), rollouts)
    np.testing.assert_allclose(found, rollouts.rollout_log_probs, atol=1e-5)


@pytest.mark.slow
def test_eight_devices_compute_what_one_does():
    _, rollouts = sampled()
    found = scored(*on(MeshConfig(data=2, fsdp=2, tensor=2)), rollouts)
    np.testing.assert_allclose(found, rollouts.rollout_log_probs, atol=1e-5)
