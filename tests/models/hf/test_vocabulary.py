"""Token ids without a text: which they are."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.hf import vocabulary


def test_padding_gaps_and_marks_are_unused_and_ends_are_not():
    known = [*range(10), 12]
    assert vocabulary.unused_tokens(16, known) == ((10, 12), (13, 16))
    assert vocabulary.unused_tokens(16, known, multimodal_ids=[3], eos_token_ids=[15]) == (
        (3, 4),
        (10, 12),
        (13, 15),
    )
    assert vocabulary.unused_tokens(16, range(16)) == ()


def test_marks_of_images_of_a_config():
    config = {
        "image_token_id": 3,
        "vision_start_token_id": 4,
        "boi_token_index": 5,
        "eos_token_id": 6,
        "image_size": 2,
        "video_token_id": None,
        "audio_token_id": 99,
    }
    assert vocabulary.multimodal_token_ids(config, vocab_size=50) == (3, 4, 5)


def test_membership_of_token_ranges():
    inside = vocabulary.is_inside(jnp.arange(6), ((1, 3), (5, 6)))
    np.testing.assert_array_equal(inside, [False, True, True, False, False, True])
