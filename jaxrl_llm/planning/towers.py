"""Bytes and operations of a vision tower, and of what it says of images, on one device.

Every prompt is planned as images alone: as many tokens as the length filter lets through.
"""

import math

from jaxrl_llm.models import attention, flops, patches
from jaxrl_llm.models.shape import Vision
from jaxrl_llm.planning.setting import Parts, Setting


def image_tokens(setting: Setting) -> int:
    """Returns the most tokens of a sequence that are of images."""
    config = setting.config
    if setting.model.vision is None:
        return 0
    # Jobs on given answers are planned with prompts of one token.
    prompt = config.data.max_prompt_tokens
    return prompt if prompt > 1 else config.max_sequence_tokens


def vectors(setting: Setting) -> float:
    """Returns bytes of the vectors of a step's images, of which every device has all."""
    prompts = setting.config.trainer.prompts_per_step
    numbers = prompts * image_tokens(setting) * setting.policy.hidden_size
    return 1.0 * numbers * setting.compute_item


def prefilled(setting: Setting, num_tokens: int) -> float:
    """Returns bytes of the float32 vectors that a prefill of so many tokens is given."""
    has_images = setting.policy.vision is not None
    return 4.0 * num_tokens * setting.policy.hidden_size * has_images


def reading(setting: Setting) -> Parts:
    """Returns what the program `tower` needs: images read beside the engine, for one group."""
    vision = setting.policy.vision
    assert vision is not None
    here = max(patches.MOST, _width(setting, vision))
    seen = here * setting.row_shards // vision.merge_size**2 * setting.policy.hidden_size
    layer = _layer(setting, vision, here)
    pixels = here * vision.patch_dims * (4.0 + setting.compute_item)
    return Parts(
        weights=1.0 * setting.tower * setting.param_item,
        activations=layer + pixels + seen * setting.compute_item,
        temporary=_layer_weights(setting, vision),
    )


def summed(setting: Setting) -> float:
    """Returns bytes of what the update itself sees in images, and of the sum of its gradient."""
    return setting.learns_tower() * vectors(setting) * (1 + 4 / setting.compute_item)


def shown(setting: Setting, num_sequences: int) -> float:
    """Returns bytes of the images of so many sequences as a tower that learns is given them."""
    if not setting.learns_tower():
        return 0.0
    vision = setting.policy.vision
    assert vision is not None
    prompts = max(1, num_sequences // setting.config.algorithm.samples_per_prompt)
    width = _width(setting, vision)
    group = max(patches.TOGETHER, width) * setting.row_shards
    groups = -(-prompts * image_tokens(setting) * vision.merge_size**2 // group)
    return 1.0 * groups * group / setting.row_shards * (vision.patch_dims + 3) * 4


def learning(setting: Setting) -> Parts:
    """Returns what the update makes while a tower that learns reads one group again."""
    vision = setting.policy.vision
    assert vision is not None
    here = max(patches.TOGETHER, _width(setting, vision))
    one = _layer(setting, vision, here)
    carry = here * vision.hidden_size * setting.compute_item
    kept = vision.num_layers * (one if setting.config.model.remat == "none" else carry)
    return Parts(
        gradients=8.0 * setting.tower,  # of the group, and their sum
        activations=kept + 2 * one,
        temporary=2 * _layer_weights(setting, vision),
    )


def operations(setting: Setting) -> float:
    """Returns the operations of reading a step's images once, on one device."""
    vision = setting.policy.vision
    assert vision is not None
    num = image_tokens(setting) * vision.merge_size**2
    each = flops.tower(vision, setting.policy.hidden_size, [num])
    return setting.config.trainer.prompts_per_step * each / setting.num_devices


def _width(setting: Setting, vision: Vision) -> int:
    """Returns the patches of a row of the tower that holds the largest image."""
    return patches.width(image_tokens(setting) * vision.merge_size**2)


def _layer(setting: Setting, vision: Vision, here: int) -> float:
    """Returns bytes that a layer makes of so many patches."""
    heads = setting.split(vision.num_heads)
    inner = 5 * vision.hidden_size + 2 * setting.split(vision.mlp_size)
    width = _width(setting, vision)
    rows = math.ceil(here / width)
    scores = 2.0 * rows * heads * min(width, attention.QUERY_BLOCK) * width * 4
    return here * inner * setting.compute_item + scores


def _layer_weights(setting: Setting, vision: Vision) -> float:
    """Returns bytes of one layer's weights, gathered for use."""
    d = vision.hidden_size
    return setting.split(flops.tower_layer(vision) + 4 * d) * 1.0 * setting.compute_item
