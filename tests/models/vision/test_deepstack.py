"""Parts of Qwen3-VL: interpolated positions, interleaved M-RoPE, deepstack features."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.models.architecture import RopeScaling
from jaxrl_llm.models.attention_modules import rotary_table
from jaxrl_llm.models.hf import config_reader, config_writer, random_model, vision_config
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.models.vision import patches

SHAPE = config_reader.architecture_from_config(random_model.example("qwen3_vl"))
VISION = dataclasses.replace(SHAPE.vision, patch_size=2)
NETWORK = Network(dataclasses.replace(SHAPE, vision=VISION))
SIDE = VISION.position_side


def coordinates(rows, columns):
    """Coordinates of the patches of one image, in raster order."""
    places = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1)
    sizes = np.broadcast_to([rows, columns], places.shape)
    return np.concatenate([places, sizes], -1).reshape(1, -1, 4)


def test_positions_are_interpolated_between_the_corners_of_the_table():
    ends = NETWORK.vision_encoder.module("ends")
    table = np.asarray(ends.positions[...]).reshape(SIDE, SIDE, -1)
    same = ends._interpolated_positions(coordinates(SIDE, SIDE))[0]
    np.testing.assert_allclose(same, table.reshape(SIDE**2, -1), atol=1e-7)
    # Two rows are the first and the last; of 2 SIDE - 1 columns every other lies between two.
    wide = np.asarray(ends._interpolated_positions(coordinates(2, 2 * SIDE - 1))[0])
    wide = wide.reshape(2, 2 * SIDE - 1, -1)
    np.testing.assert_allclose(wide[:, ::2], table[[0, -1]], atol=1e-7)
    between = (table[[0, -1], :-1] + table[[0, -1], 1:]) / 2
    np.testing.assert_allclose(wide[:, 1::2], between, atol=1e-7)
    one = ends._interpolated_positions(coordinates(1, 1))[0]
    np.testing.assert_allclose(one, table[0, 0][None], atol=1e-7)


def test_parts_of_the_position_alternate():
    positions = np.array([[[100, 10, 1]]])
    cos, _ = rotary_table(positions, 16, 1e4, RopeScaling(), (4, 2, 2), interleaved=True)
    frequencies = 1e4 ** (-np.arange(8) / 8)
    expected = np.cos(np.array([100, 10, 1, 100, 10, 1, 100, 100]) * frequencies)
    np.testing.assert_allclose(cos[0, 0, 0], expected, atol=1e-4)
    # Text has one position in all parts: as without parts.
    text = np.full((1, 1, 3), 7)
    parts, whole = (
        rotary_table(p, 16, 1e4, RopeScaling(), (4, 2, 2), True) for p in (text, text[..., 0])
    )
    np.testing.assert_array_equal(parts[0], whole[0])


def test_deepstack_features_reach_the_first_layers_alone():
    params = tiny.params(NETWORK)
    grid = patches.PatchGrid(4, 6)
    pixels = np.random.default_rng(0).standard_normal((24, VISION.patch_dims), np.float32)
    rows = patches.pack_images([(grid, pixels)], VISION)
    features = jax.jit(NETWORK.vision_encoder.encode)(
        params["vision"], rows.pixels, rows.coordinates, rows.image_ids
    ).reshape(-1, SHAPE.image_feature_size)[rows.embedding_indices[0]]
    assert features.shape == (6, 3 * SHAPE.hidden_size)
    tokens = np.array([[5, 6, *[VISION.image_token] * 6, 7, 8]])
    index = np.where(tokens == VISION.image_token, 0, -1)
    index[index == 0] = np.arange(6)
    positions = patches.mrope_positions(10, [2], [patches.PatchGrid(2, 3)])[None]
    rotary_positions = np.arange(10)[None]
    hidden = tiny.hidden_states(NETWORK)

    def run(features):
        sights = ImageInputs(positions, index, features)
        return hidden(params, tokens, rotary_positions, np.ones_like(tokens), image_inputs=sights)

    base = run(features)
    size = SHAPE.hidden_size
    for part in range(3):
        changed = run(features.at[:, part * size : (part + 1) * size].add(1.0))
        moved = np.abs(np.asarray(changed - base))[0].max(-1) > 1e-5
        assert moved.tolist() == [False] * 2 + [True] * 8  # what comes before sees no image

    # By hand: the output of a layer with features is that of a layer without, and the features.
    numbers = [kind.deepstack for kind in NETWORK.shape.layer_types]
    assert numbers == [1, 2, 0, 0]
    sights = ImageInputs(positions, index, features)
    x = jnp.ones((1, 10, size))
    expected = np.ones((10, size)) + np.pad(
        np.asarray(features[:, size : 2 * size]), ((2, 2), (0, 0))
    )
    np.testing.assert_allclose(sights.add_deepstack(x, 1)[0], expected, atol=1e-6)


@pytest.mark.parametrize("family", [f for f in vision_config.FORMATS if f != "qwen2_5_vl"])
def test_a_nested_config_there_and_back(family):
    shape = config_reader.architecture_from_config(random_model.example(family))
    nested = vision_config.nested_config(config_writer.to_hf_config(shape))
    assert nested["text_config"]["model_type"] == vision_config.FORMATS[family].text_type
    assert "hidden_size" not in nested and "vision_config" not in nested["text_config"]
    assert config_reader.architecture_from_config(vision_config.flat_config(nested)) == shape


def test_a_decoder_of_text_and_images_is_written_as_its_text_model():
    shape = config_reader.architecture_from_config(random_model.example("qwen3_5"))
    alone = config_writer.to_hf_config(Network(shape).decoder.shape)
    assert alone["model_type"] == "qwen3_5_text" and "vision_config" not in alone
    with pytest.raises(CheckpointFormatError):
        config_writer.to_hf_config(Network(SHAPE).decoder.shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'; only 'gelu_pytorch_tanh' is known"),
        ({"num_position_embeddings": 24}, "num_position_embeddings is 24; they are a square table"),
        ({"deepstack_visual_indexes": [3]}, r"\[3\]; list layers, from 0 to 2, each once"),
        ({"deepstack_visual_indexes": [1, 1]}, "each once"),
        ({"rope_parameters": {"rope_theta": 500.0}}, "rope_theta is 500.0; only 10000 is known"),
    ],
)
def test_configs_that_are_refused(change, message):
    config = random_model.example("qwen3_vl")
    config["vision_config"] = {**config["vision_config"], **change}
    with pytest.raises(CheckpointFormatError, match=message):
        config_reader.architecture_from_config(config)
