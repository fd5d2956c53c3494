"""Qwen2.5-VL against transformers: vectors, positions, logits, folders, greedy decode."""

import dataclasses
import io

import commands
import numpy as np
import pictured
import pytest
import seen
import tiny
from PIL import Image

from jaxrl_llm import saved_policy
from jaxrl_llm.config import (
    LoraConfig,
    OptimizerConfig,
    SFTConfig,
)
from jaxrl_llm.config.learner import SupervisedTrainerConfig
from jaxrl_llm.config.logging_config import MetricsConfig
from jaxrl_llm.config.rollout_data import EvaluationConfig
from jaxrl_llm.data import counting_task
from jaxrl_llm.learner import weights as weights_lib
from jaxrl_llm.models.hf import checkpoint, config_reader, safetensors_file
from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.models.vision import patches
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.sharding.mesh import TRAIN, shardings
from jaxrl_llm.trainer import supervised

pytestmark = pytest.mark.parity

MARKS = {"vision_start_token_id": 92, "vision_end_token_id": 93}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
}
TOWER = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1, 3],
}
NUM_GREEDY = 48
# Ten sizes, in pixels; a window is 112 of them a side.
SIZES = (
    *((56, 56), (60, 90), (28, 140), (112, 112), (140, 196)),
    *((84, 252), (224, 168), (30, 400), (300, 310), (113, 57)),
)


@pytest.fixture(scope="module")
def model(torch, tmp_path_factory):
    """A model whose biases and norms are random too, its folder and its processor of images."""
    import transformers

    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT,
        vision_config=TOWER,
        image_token_id=seen.IMAGE_TOKEN,
        video_token_id=91,
        **MARKS,
    )
    torch.manual_seed(0)
    made = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            norm = "norm" in name or "ln_q" in name
            size, mean = (0.5, 1.0) if norm else (0.15, 0.0)
            parameter.copy_(mean + size * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    made.save_pretrained(folder)
    return made, folder, transformers.Qwen2VLImageProcessorPil()


def pixels_of(processor, sizes):
    """Returns patches and grids [n, 3] of images as transformers has them, and both of each."""
    found = processor([seen.drawing(*size) for size in sizes], return_tensors="np")
    grids = [patches.PatchGrid(*map(int, grid[1:])) for grid in found["image_grid_thw"]]
    ends = np.cumsum([grid.num_patches for grid in grids])
    each = np.split(found["pixel_values"], ends[:-1])
    return found["pixel_values"], found["image_grid_thw"], list(zip(grids, each, strict=True))


def test_vectors_positions_and_logits_of_ten_sizes(model, torch):
    theirs, folder, processor = model
    network = Network(checkpoint.read_architecture(folder))
    params = checkpoint.load(folder, network)
    vision = network.shape.vision
    pixels, grids, images = pixels_of(processor, SIZES)
    with torch.no_grad():
        wanted = theirs.model.get_image_features(torch.tensor(pixels), torch.tensor(grids))
    found = seen.encoded(network, params, images, num_rows=2)
    for ours, want in zip(found, wanted.pooler_output, strict=True):
        assert np.abs(np.asarray(want)).max() > 1.0
        np.testing.assert_allclose(ours, want, atol=1e-4)

    random = np.random.default_rng(0)
    for chosen in ([0, 5], [8], [1, 2, 3, 4], [6, 7, 9]):
        some = [images[i] for i in chosen]
        tokens, starts = seen.dialogue(random, some, vision)
        merged = [grid.to_token_grid(vision) for grid, _ in some]
        at = np.full(len(tokens), -1)
        at[np.array(tokens) == seen.IMAGE_TOKEN] = np.arange(sum(g.num_patches for g in merged))
        row = torch.tensor([tokens])
        marks = (row == seen.IMAGE_TOKEN).int()
        positions = patches.mrope_positions(len(tokens), starts, merged)
        places, _ = theirs.model.get_rope_index(row, marks, torch.tensor(grids[chosen]))
        np.testing.assert_array_equal(positions.T, places[:, 0])
        with torch.no_grad():
            want = theirs(
                row,
                attention_mask=torch.ones_like(row),
                pixel_values=torch.tensor(np.concatenate([values for _, values in some])),
                image_grid_thw=torch.tensor(grids[chosen]),
                mm_token_type_ids=marks,
            ).logits[0]
        sights = ImageInputs(positions[None], at[None], np.concatenate([found[i] for i in chosen]))
        given = np.array([tokens], np.int32), np.arange(len(tokens))[None], np.ones_like(at)[None]
        ours = network.logits(
            params, tiny.hidden_states(network)(params, *given, image_inputs=sights)
        )[0]
        assert np.abs(np.asarray(want)).max() > 1.0
        np.testing.assert_allclose(ours, want, atol=1e-4)


def test_folders_are_read_and_written_byte_for_byte(model, torch, tmp_path):
    import transformers

    theirs, folder, processor = model
    network = Network(checkpoint.read_architecture(folder))
    mesh = tiny.make_mesh(data=2, fsdp=2, tensor=2)
    places = shardings(
        network.abstract_params(), network.logical_axes(), mesh, TRAIN, network.sharding_units
    )
    split = checkpoint.load(folder, network, places)
    checkpoint.save(tmp_path, network, split, source_config=config_reader.read_config(folder))

    def tensors(path):
        found = safetensors_file.open_folder(path)
        return {
            k: (t.dtype_code, t.shape, np.ascontiguousarray(t.view()).tobytes())
            for k, t in found.items()
        }

    assert tensors(tmp_path) == tensors(folder)
    assert checkpoint.read_architecture(tmp_path) == network.shape
    again = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert again.config.vision_config.fullatt_block_indexes == TOWER["fullatt_block_indexes"]
    pixels, grids, images = pixels_of(processor, SIZES[:2])
    tokens, _ = seen.dialogue(np.random.default_rng(1), images, network.shape.vision)
    row = torch.tensor([tokens])
    given = {
        "attention_mask": torch.ones_like(row),
        "pixel_values": torch.tensor(pixels),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (row == seen.IMAGE_TOKEN).int(),
    }
    with torch.no_grad():
        assert torch.equal(again(row, **given).logits, theirs(row, **given).logits)


def test_greedy_tokens_are_those_of_generate(model, torch):
    theirs, folder, processor = model
    network = Network(checkpoint.read_architecture(folder))
    params = checkpoint.load(folder, network)
    decoder, vision = network.decoder, network.shape.vision
    _, grids, images = pixels_of(processor, SIZES[:5])
    found = seen.encoded(network, params, images)
    random = np.random.default_rng(4)
    text = {name: value for name, value in params.items() if name != "vision"}
    mesh = tiny.make_mesh()
    engine = Engine(decoder, mesh, num_slots=4, max_tokens=256)
    greedy = SamplingParams(NUM_GREEDY, temperature=0.0)
    requests, wanted = [], []
    for chosen in ([0, 2], [4], [], [1, 3]):
        some = [images[i] for i in chosen]
        tokens, starts = seen.dialogue(random, some, vision)
        merged = [grid.to_token_grid(vision) for grid, _ in some]
        at = np.full((1, len(tokens)), -1)
        at[np.array([tokens]) == seen.IMAGE_TOKEN] = np.arange(sum(g.num_patches for g in merged))
        sights, row = None, torch.tensor([tokens])
        given = {"attention_mask": torch.ones_like(row)}
        if chosen:
            positions = patches.mrope_positions(len(tokens), starts, merged)[None]
            sights = ImageInputs(positions, at, np.concatenate([found[i] for i in chosen]))
            values = np.concatenate([values for _, values in some])
            given["pixel_values"] = torch.tensor(values)
            given["image_grid_thw"] = torch.tensor(grids[chosen])
            given["mm_token_type_ids"] = (row == seen.IMAGE_TOKEN).int()
        theirs.model.rope_deltas = None
        whole = theirs.generate(row, **given, do_sample=False, max_new_tokens=NUM_GREEDY)
        wanted.append(whole[0, len(tokens) :].tolist())
        keys = np.zeros((1, 2), np.uint32)
        requests.append(Request(tuple(tokens), keys, (greedy,), image_inputs=sights))
    answers = engine.generate(tiny.rollout_params(text, mesh, decoder), requests)
    assert [answer[0].tokens for answer in answers] == wanted


CLASSES = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("family", CLASSES)
def test_a_trained_tower_is_exported(family, rank, torch, tmp_path, capsys):
    """The logits of transformers for the export are those of the run's own weights."""
    import transformers

    config = SFTConfig(
        model=dataclasses.replace(pictured.CONFIG.model, family=family, tie_embeddings=False),
        data=pictured.CONFIG.data,
        lora=LoraConfig(rank=rank),
        trainer=SupervisedTrainerConfig(
            num_steps=2,
            batch_size=4,
            tower_learning_rate=1e-2,
            optimizer=OptimizerConfig(learning_rate=1e-2),
        ),
        evaluation=EvaluationConfig(every=0, before=False, after=False),
        metrics=MetricsConfig(tensorboard=False, console=False),
    )
    supervised.train(config, tmp_path / "run")
    code, _, log = commands.call(
        capsys, "export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"
    )
    assert code == 0, log
    learned = saved_policy.load_run(tmp_path / "run")
    params, network = learned.full_params(learned.read_params()[0]), learned.network
    first = weights_lib.initial_params(config, learned.models)
    before, after = (tree["vision"]["layers"]["mlp"]["up"]["kernel"] for tree in (first, params))
    assert np.abs(np.asarray(before) - np.asarray(after)).max() > 1e-3
    read_class = getattr(transformers, f"{CLASSES[family]}ForConditionalGeneration")
    theirs = read_class.from_pretrained(tmp_path / "out").eval()
    processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "out")
    drawings = [
        Image.open(io.BytesIO(counting_task.draw_image(f"export {i}")[0])) for i in range(2)
    ]
    found = processor(drawings, return_tensors="np")
    grids = [patches.PatchGrid(*map(int, grid[1:])) for grid in found["image_grid_thw"]]
    ends = np.cumsum([grid.num_patches for grid in grids])[:-1]
    images = list(zip(grids, np.split(found["pixel_values"], ends), strict=True))
    vision, tokens, starts = network.shape.vision, [5, 6], []
    for grid, _ in images:
        starts.append(len(tokens))
        tokens += [vision.image_token] * grid.num_tokens(vision) + [7, 8]
    merged = [grid.to_token_grid(vision) for grid in grids]
    at = np.where(np.array(tokens) == vision.image_token, 0, -1)
    at[at == 0] = np.arange((at == 0).sum())
    positions = patches.mrope_positions(len(tokens), starts, merged)
    sights = ImageInputs(
        positions[None], at[None], np.concatenate(seen.encoded(network, params, images))
    )
    given = np.array([tokens], np.int32), np.arange(len(tokens))[None], np.ones_like(at)[None]
    ours = network.logits(params, tiny.hidden_states(network)(params, *given, image_inputs=sights))[
        0
    ]
    row = torch.tensor([tokens])
    with torch.no_grad():
        want = theirs(
            row,
            attention_mask=torch.ones_like(row),
            pixel_values=torch.tensor(found["pixel_values"]),
            image_grid_thw=torch.tensor(found["image_grid_thw"]),
            mm_token_type_ids=(row == vision.image_token).int(),
        ).logits[0]
    np.testing.assert_allclose(ours, want, atol=1e-4)
