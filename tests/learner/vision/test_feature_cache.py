"""Images through a step: read once, the same to engine and learner, on any mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from pictured import CONFIG, ONE_DEVICE, on, sampled

from jaxrl_llm.agents.template_delta import TemplateDelta
from jaxrl_llm.config import MeshConfig
from jaxrl_llm.data import counting_task
from jaxrl_llm.data.images import expand_tokens
from jaxrl_llm.learner import predict
from jaxrl_llm.packing import token_fields
from jaxrl_llm.rollout import episodes
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.types import EpisodeLog, PromptBatch, Weights

PROGRAMS = {}  # of the policy, by the identity of its models


def scored(config, models, params, rollouts):
    """The log-probs of sampled tokens by the learner."""
    packed = models.packer.pack_rollouts(rollouts)
    packed = token_fields.with_fields(
        packed, models.mesh, **models.image_feature_cache.rollout_token_fields(rollouts)
    )
    if id(models) not in PROGRAMS:
        PROGRAMS[id(models)] = predict.scoring_programs(config, models)
    of_policy, _ = PROGRAMS[id(models)]
    with jax.set_mesh(models.mesh):
        found = of_policy({}, params, rollouts.tokens, rollouts.lengths, packed, entropy="none")
    return np.where(rollouts.response_mask, np.asarray(found[0]), 0.0)


def test_an_image_is_read_once_and_means_the_same_everywhere():
    gallery, rollouts = sampled()
    # Three images for 4 prompts of 4 samples each.
    assert gallery.num_encoded == 3
    assert (
        gallery.tower.vision.image_token == gallery.image_processor.image_token
    )  # what is exported
    found = scored(*on(ONE_DEVICE), rollouts)
    gallery.rollout_token_fields(rollouts)
    assert gallery.num_encoded == 3
    assert rollouts.response_mask.sum() > 40
    # Decode steps and packed rows differ in rounding alone.
    np.testing.assert_allclose(found, rollouts.rollout_log_probs, atol=1e-5)


def test_log_probs_depend_on_the_image():
    _, rollouts = sampled()
    prompts = rollouts.prompts
    swapped = [
        dataclasses.replace(prompt, images=other.images)
        for prompt, other in zip(prompts, prompts[1:] + prompts[:1], strict=True)
    ]
    other = dataclasses.replace(rollouts, prompts=tuple(swapped), images=())
    found = scored(*on(ONE_DEVICE), other)
    assert np.abs(found - rollouts.rollout_log_probs).max() > 1e-4


@pytest.mark.slow
def test_prompts_that_stand_once_or_in_every_row_are_the_same():
    _, rollouts = sampled()
    shared = dataclasses.replace(CONFIG.trainer, shared_prompts="off")
    config = dataclasses.replace(CONFIG, trainer=shared)
    found = scored(*on(ONE_DEVICE, config), rollouts)
    np.testing.assert_allclose(found, rollouts.rollout_log_probs, atol=1e-5)


@pytest.mark.slow
def test_eight_devices_compute_what_one_does():
    _, rollouts = sampled()
    found = scored(*on(MeshConfig(data=2, fsdp=2, tensor=2)), rollouts)
    np.testing.assert_allclose(found, rollouts.rollout_log_probs, atol=1e-5)


class Showing:
    """Answers the first turn of every episode with an image among words."""

    def __init__(self, models, image):
        text = "<eos><tool><|vision_start|><|image_pad|><|vision_end|>see<eos>"
        tokens = models.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, images = expand_tokens(models.image_processor, tokens, [image], "here")
        self.addition = TemplateDelta(tokens, False, images)
        self.turns, self.waiting = {}, []

    def begin(self, prompts, num_samples):
        self.turns = dict.fromkeys(range(len(prompts.prompts) * num_samples), 0)
        return prompts

    def submit_turn(self, number, tokens, stopped):
        self.turns[number] += 1
        self.waiting += [number] * (self.turns[number] == 1)
        return self.turns[number] == 1

    def collect_replies(self, wait):
        waiting, self.waiting = self.waiting, []
        return [(number, self.addition) for number in waiting]

    def end(self, number):
        raise AssertionError("the answer must fit")

    def finish(self):
        return [EpisodeLog() for _ in self.turns]


@pytest.mark.slow
def test_an_image_that_comes_after_a_turn_is_read_in_its_place():
    config = dataclasses.replace(
        CONFIG, rollout=dataclasses.replace(CONFIG.rollout, max_response_tokens=48)
    )
    config, models, params = on(ONE_DEVICE, config)
    first = sampled()[1].prompts[0]
    text = dataclasses.replace(first, tokens=(*first.tokens[:2], *first.tokens[-8:]), images=())
    shown = models.image_processor.read(counting_task.draw_image("later")[0], "here")
    world = Showing(models, shown)
    sampler = policy_sampler.make_sampler(config, models, {}, world)
    sampler = dataclasses.replace(sampler, max_turn_tokens=4)
    how = [episodes.sampling_params(config.rollout, models.eos_tokens)] * 2
    weights = Weights(sampler.weights(params), 0)
    rollouts, _ = sampler.rollout(weights, PromptBatch((first, text)), how, jax.random.key(2))
    assert [len(images) for images in rollouts.images] == [2, 2, 1, 1]
    for row, images in enumerate(rollouts.images):
        last = images[-1]
        here = slice(last.start, last.start + last.num_tokens)
        assert (rollouts.tokens[row, here] == models.image_processor.image_token).all()
        assert not rollouts.response_mask[row, here].any()
        assert rollouts.response_mask[row, here.stop :].any()
    found = scored(config, models, params, rollouts)
    np.testing.assert_allclose(found, rollouts.rollout_log_probs, atol=1e-5)
    other = models.image_processor.read(counting_task.draw_image("another")[0], "here")
    others = tuple(
        (*images[:-1], dataclasses.replace(other, start=images[-1].start))
        for images in rollouts.images
    )
    found = scored(config, models, params, dataclasses.replace(rollouts, images=others))
    assert np.abs(found - rollouts.rollout_log_probs).max() > 1e-4
