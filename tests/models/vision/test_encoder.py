"""The vision tower: images in rows, isolated, in few shapes, on any mesh; its config."""

import dataclasses

import jax
import numpy as np
import pytest
import seen
import tiny

from jaxrl_llm.models.hf import config_reader, config_writer, vision_config
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.vision import patches


def vectors(images, num_rows=1, mesh=None):
    """Returns the vectors of each image, in the order of its tokens."""
    network, mesh = seen.NETWORK, mesh or tiny.make_mesh()
    params = tiny.sharded(tiny.params(network), mesh, network)["vision"]
    rows = patches.pack_images(images, seen.VISION, num_rows)
    with jax.set_mesh(mesh):
        found = jax.jit(network.vision_encoder.encode)(
            params, rows.pixels, rows.coordinates, rows.image_ids
        )
    found = np.asarray(found).reshape(-1, seen.SHAPE.hidden_size)
    return [found[at] for at in rows.embedding_indices]


def test_images_do_not_see_each_other_on_any_mesh():
    images = [seen.patched(*size) for size in seen.SIZES]
    together = vectors(images)
    assert max(np.abs(found).max() for found in together) > 1.0
    on_mesh = vectors(images, 4, tiny.make_mesh(data=2, fsdp=2, tensor=2))
    for number in (3, 9):
        (alone,) = vectors(images[number : number + 1])
        # Sums of other lengths: rounding alone.
        np.testing.assert_allclose(together[number], alone, atol=1e-5)
        np.testing.assert_allclose(on_mesh[number], alone, atol=1e-5)
    turned = vectors([images[0], seen.patched(*seen.SIZES[1], seed=1)])
    np.testing.assert_allclose(turned[0], together[0], atol=1e-5)
    assert np.abs(turned[1] - together[1]).max() > 0.1


def test_layers_of_windows_see_their_window_and_whole_ones_the_image():
    grid, pixels = seen.patched(8, 16)  # two windows side by side: 2 x 2 vectors each
    changed = pixels.copy()
    changed[-4:] += 1.0  # the last vector, in the second window
    network = tiny.with_sizes(seen.NETWORK, vision=dataclasses.replace(seen.VISION, full_layers=()))
    for net, isolated in ((network, True), (seen.NETWORK, False)):
        found = []
        for values in (pixels, changed):
            rows = patches.pack_images([(grid, values)], seen.VISION)
            given = rows.pixels, rows.coordinates, rows.image_ids
            all_vectors = jax.jit(net.vision_encoder.encode)(
                tiny.params(seen.NETWORK)["vision"], *given
            )[0]
            found.append(np.asarray(all_vectors)[rows.embedding_indices[0]])
        moved = np.abs(found[0] - found[1]).max(1) > 1e-4
        assert moved.tolist() == ([False, False, True, True] * 2 if isolated else [True] * 8)


def test_fifty_images_need_few_programs():
    random = np.random.default_rng(0)
    sizes = [tuple((4 * random.integers(1, 120, 2)).tolist()) for _ in range(50)]
    grids = [patches.PatchGrid(height // 2, width // 2) for height, width in sizes]
    seen_widths = set()
    for chosen in (grids, grids[:1], grids[3:9], grids[20:50]):
        together = patches.image_batches(chosen, seen.VISION, num_rows=2)
        assert [i for group in together for i in group] == list(range(len(chosen)))
        for group in together:
            images = [(chosen[i], np.zeros((chosen[i].num_patches, 24), np.float32)) for i in group]
            seen_widths.add(patches.pack_images(images, seen.VISION, 2).image_ids.shape)
    assert len(seen_widths) <= 8


def test_positions_of_text_between_images():
    grids = [patches.PatchGrid(2, 3), patches.PatchGrid(1, 1)]
    found = patches.mrope_positions(12, [2, 9], grids)
    assert found[:, 0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8]
    assert found[:, 1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8]
    assert found[:, 2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]


def test_a_config_there_and_back():
    config = config_writer.to_hf_config(seen.SHAPE)
    assert config_reader.architecture_from_config(config) == seen.SHAPE
    assert config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    outer = ("vision_config", "image_token_id", "model_type", "architectures")
    nested = {key: config[key] for key in outer}
    nested["text_config"] = {k: v for k, v in config.items() if k not in outer}
    nested["text_config"]["model_type"] = "qwen2_5_vl_text"
    assert config_reader.architecture_from_config(vision_config.flat_config(nested)) == seen.SHAPE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "vision_config.hidden_act is 'gelu'; only 'silu' is known"),
        ({"depth": 0}, "vision_config.depth must be an integer from 1 on, got 0"),
        ({"num_heads": 5}, "5 heads share 32 dims; each needs the same number, a multiple of 4"),
        ({"out_hidden_size": 8}, "out_hidden_size is 8, hidden_size is 32; they must be the same"),
        ({"window_size": 3}, "window_size is less than the pixels of one token"),
    ],
)
def test_configs_that_are_refused(change, message):
    config = config_writer.to_hf_config(seen.SHAPE)
    config["vision_config"] = {**config["vision_config"], **change}
    with pytest.raises(CheckpointFormatError, match=message):
        config_reader.architecture_from_config(config)
