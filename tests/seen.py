"""A tiny network that reads images, and images for it."""

import dataclasses

import numpy as np
import tiny
from PIL import Image

from jaxrl_llm.models.architecture import VisionArchitecture
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.models.vision import patches

IMAGE_TOKEN = 90
VISION = VisionArchitecture(
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    mlp_size=24,
    full_layers=(1,),
    window_size=8,
    patch_size=2,
    image_token=IMAGE_TOKEN,
)
SHAPE = dataclasses.replace(tiny.SHAPE, family="qwen2_5_vl", rope_sections=(1, 1, 2), vision=VISION)
NETWORK = Network(SHAPE)
# Height and width in pixels; windows are 8 of them a side.
SIZES = ((8, 8), (4, 12), (20, 8), (12, 28), (24, 24), (4, 4), (8, 40), (36, 12), (16, 4), (28, 28))


def drawing(height, width, seed=0):
    """Returns an image of noise."""
    pixels = np.random.default_rng((seed, height, width)).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def patched(height, width, seed=0):
    """Returns the grid of random patches, and these."""
    grid = patches.PatchGrid(height // VISION.patch_size, width // VISION.patch_size)
    random = np.random.default_rng((seed, height, width))
    return grid, random.standard_normal((grid.num_patches, VISION.patch_dims), np.float32)


def dialogue(random, images, vision):
    """Returns tokens with text around images, and where the images begin."""
    tokens, starts = random.integers(3, 88, 7).tolist(), []
    for grid, _ in images:
        starts.append(len(tokens) + 1)
        tokens += [92, *[IMAGE_TOKEN] * grid.num_tokens(vision), 93]
        tokens += random.integers(3, 88, 5).tolist()
    return tokens, starts


def encoded(network, params, images, num_rows=1):
    """Returns the features of each image, encoded in rows that several may share."""
    rows = patches.pack_images(images, network.shape.vision, num_rows)
    found = network.vision_encoder.encode(
        params["vision"], rows.pixels, rows.coordinates, rows.image_ids
    )
    found = found.reshape(-1, network.shape.image_feature_size)
    return [found[at] for at in rows.embedding_indices]
