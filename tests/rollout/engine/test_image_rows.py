"""Image inputs of chunked prefill: which rows have any."""

import numpy as np

from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.vision import patches
from jaxrl_llm.rollout.engine import host_inputs


def chunk(image, cached):
    """Inputs of the tokens of a sequence of 8 after the cached ones; its image begins at 4."""
    index = np.full((1, 8), -1)
    index[0, 4 : 4 + image.num_patches] = np.arange(image.num_patches)
    positions = patches.mrope_positions(8, [4], [image])[None]
    sights = ImageInputs(positions, index, np.ones((image.num_patches, 3), np.float32))
    offset = int(positions.max()) + 1 - 8
    return host_inputs.chunked_prefill_inputs(
        [list(range(8 - cached))], [cached], 2, 8, np.zeros((1, 4), np.int32), [(sights, offset)]
    ).sights


def test_an_image_of_one_token_is_one():
    # Its position is that of a token of text: the index alone tells.
    sights = chunk(patches.PatchGrid(1, 1), cached=2)
    assert sights is not None and (sights.feature_index >= 0).sum() == 1
    np.testing.assert_array_equal(sights.features[sights.feature_index[0, 2]], np.ones(3))


def test_text_after_the_last_image_needs_no_image_inputs():
    assert chunk(patches.PatchGrid(1, 1), cached=5) is None
    assert chunk(patches.PatchGrid(1, 2), cached=6) is None
    assert chunk(patches.PatchGrid(1, 2), cached=5) is not None
