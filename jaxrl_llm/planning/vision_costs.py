"""Bytes and FLOPs per device of a vision encoder and its image features.

Every prompt is planned as all images, with the most tokens that the length filter admits.
"""

import math

from jaxrl_llm.models import attention, flops
from jaxrl_llm.models.architecture import VisionArchitecture
from jaxrl_llm.models.vision import patches
from jaxrl_llm.planning.run_setting import MemoryParts, RunSetting


def image_tokens(setting: RunSetting) -> int:
    """Most image tokens in a sequence."""
    config = setting.config
    if setting.model.vision is None:
        return 0
    # Supervised jobs are planned with prompts of one token.
    prompt = config.data.max_prompt_tokens
    return prompt if prompt > 1 else config.max_sequence_tokens


def image_feature_bytes(setting: RunSetting) -> float:
    """Bytes of the image features of a step, which every device has in full."""
    prompts = setting.config.trainer.prompts_per_step
    num_values = prompts * image_tokens(setting) * setting.policy.image_feature_size
    return 1.0 * num_values * setting.compute_item


def prefill_feature_bytes(setting: RunSetting, num_tokens: int) -> float:
    """Bytes of the float32 image features in a prefill of `num_tokens` tokens."""
    has_images = setting.policy.vision is not None
    return 4.0 * num_tokens * setting.policy.image_feature_size * has_images


def vision_encoder_memory(setting: RunSetting) -> MemoryParts:
    """Memory of the program `tower`, which encodes one group of images for the engine."""
    vision = setting.policy.vision
    assert vision is not None
    num_patches = max(patches.MAX_SHARED_ROW_PATCHES, _width(setting, vision))
    num_values = (
        num_patches * setting.row_shards // vision.merge_size**2 * setting.policy.image_feature_size
    )
    layer = _layer_bytes(setting, vision, num_patches)
    layer += _deepstack_bytes(setting, vision, num_patches)
    pixels = num_patches * vision.patch_dims * (4.0 + setting.compute_item)
    return MemoryParts(
        weights=1.0 * setting.vision_params * setting.param_item,
        activations=layer + pixels + num_values * setting.compute_item,
        temporary=_layer_weight_bytes(setting, vision),
    )


def feature_gradient_bytes(setting: RunSetting) -> float:
    """Bytes of the image features in an update, and of their accumulated gradient."""
    return (
        setting.trains_vision_encoder()
        * image_feature_bytes(setting)
        * (1 + 4 / setting.compute_item)
    )


def image_input_bytes(setting: RunSetting, num_sequences: int) -> float:
    """Bytes of the images of `num_sequences` sequences as inputs of a trained vision encoder."""
    if not setting.trains_vision_encoder():
        return 0.0
    vision = setting.policy.vision
    assert vision is not None
    prompts = max(1, num_sequences // setting.config.algorithm.samples_per_prompt)
    width = _width(setting, vision)
    group = max(patches.MAX_TRAINED_PATCHES, width) * setting.row_shards
    groups = -(-prompts * image_tokens(setting) * vision.merge_size**2 // group)
    return (
        1.0
        * groups
        * group
        / setting.row_shards
        * (vision.patch_dims + patches.NUM_COORDINATES + 1)
        * 4
    )


def vision_training_memory(setting: RunSetting) -> MemoryParts:
    """Temporaries of an update while a trained vision encoder processes one group of images."""
    vision = setting.policy.vision
    assert vision is not None
    num_patches = max(patches.MAX_TRAINED_PATCHES, _width(setting, vision))
    layer_bytes = _layer_bytes(setting, vision, num_patches)
    carry = num_patches * vision.hidden_size * setting.compute_item
    saved_bytes = vision.num_layers * (
        layer_bytes if setting.config.model.remat == "none" else carry
    )
    return MemoryParts(
        gradients=8.0 * setting.vision_params,  # of the group, and the accumulated ones
        activations=saved_bytes + 2 * layer_bytes + _deepstack_bytes(setting, vision, num_patches),
        temporary=2 * _layer_weight_bytes(setting, vision),
    )


def vision_flops(setting: RunSetting) -> float:
    """FLOPs per device of encoding a step's images once."""
    vision = setting.policy.vision
    assert vision is not None
    num_patches = image_tokens(setting) * vision.merge_size**2
    prompt_flops = flops.vision_forward(vision, setting.policy.hidden_size, [num_patches])
    return setting.config.trainer.prompts_per_step * prompt_flops / setting.num_devices


def _width(setting: RunSetting, vision: VisionArchitecture) -> int:
    """Patches in a row of the encoder that fits the largest image."""
    return patches.row_width(image_tokens(setting) * vision.merge_size**2)


def _layer_bytes(setting: RunSetting, vision: VisionArchitecture, num_patches: int) -> float:
    """Bytes of the activations of one layer for `num_patches` patches."""
    heads = setting.tensor_shard(vision.num_heads)
    values_per_patch = 5 * vision.hidden_size + 2 * setting.tensor_shard(vision.mlp_size)
    width = _width(setting, vision)
    rows = math.ceil(num_patches / width)
    scores = 2.0 * rows * heads * min(width, attention.QUERY_BLOCK) * width * 4
    return num_patches * values_per_patch * setting.compute_item + scores


def _deepstack_bytes(setting: RunSetting, vision: VisionArchitecture, num_patches: int) -> float:
    """Bytes of the outputs of deepstack layers, which are merged after the last layer."""
    num_values = len(vision.deepstack_layers) * num_patches * vision.hidden_size
    return 1.0 * num_values * setting.compute_item


def _layer_weight_bytes(setting: RunSetting, vision: VisionArchitecture) -> float:
    """Bytes of one layer's gathered weights."""
    d = vision.hidden_size
    return (
        setting.tensor_shard(flops.vision_layer_matmul_weights(vision) + 4 * d)
        * 1.0
        * setting.compute_item
    )
