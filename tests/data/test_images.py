"""Images of rows: what is read, how many tokens they are, and what is refused, by row."""

import base64
import io
import json

import numpy as np
import pytest
import seen
from PIL import Image

from jaxrl_llm.config import DataConfig
from jaxrl_llm.data import datasets, tokenizer
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.images import ImagePreprocessor, split_parts

TOKENIZER = tokenizer.character_tokenizer(images=True)
IMAGE = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
PICTURES = ImagePreprocessor.from_sizes(4, 2, 2, IMAGE)


def png(height, width, mode="RGB"):
    file = io.BytesIO()
    seen.drawing(height, width).convert(mode).save(file, "PNG")
    return file.getvalue()


def blank(height, width):
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def uri(contents):
    return "data:image/png;base64," + base64.b64encode(contents).decode()


def row(**change):
    return {
        "data_source": "drawn",
        "prompt": [{"role": "user", "content": "<image>How many?"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "images": [uri(png(16, 24))],
        **change,
    }


def load(rows, tmp_path, image_processor=PICTURES, split="train", **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    given = {"max_prompt_tokens": 64, "train_files": (str(path),), **settings}
    config = DataConfig(task="files", **given)
    return datasets.load_dataset(
        config, TOKENIZER, split, 0, image_processor=image_processor
    ).prompts


def test_rows_of_every_kind_become_the_same_prompt(tmp_path):
    contents = png(16, 24)
    (tmp_path / "a.png").write_bytes(contents)
    part = {"type": "image_url", "image_url": {"url": uri(contents)}}
    said = {"type": "text", "text": "How many?"}
    rows = [
        row(),
        row(images=[str(tmp_path / "a.png")]),
        row(images=[{"path": str(tmp_path / "a.png")}]),
        row(prompt=[{"role": "user", "content": [{"type": "image"}, said]}]),
        row(images=None, prompt=[{"role": "user", "content": [part, said]}]),
    ]
    prompts = load(rows, tmp_path)
    assert len({(prompt.tokens, prompt.images) for prompt in prompts}) == 1
    (image,) = prompts[0].images
    assert image.grid == (2, 3) and image.num_tokens == 6
    # Written as Qwen2.5-VL writes it: a token before, one after, and one for each vector.
    text = TOKENIZER.convert_ids_to_tokens(prompts[0].tokens)
    assert text[:3] == ["<bos>", "<user>", "<|vision_start|>"] and image.start == 3
    assert text[3:9] == ["<|image_pad|>"] * 6 and text[9:11] == ["<|vision_end|>", "H"]


def test_pixels_are_those_of_the_processor():
    for size in ((16, 24), (40, 8), (8, 8)):
        for mode in ("RGB", "L", "RGBA", "P"):
            image = PICTURES.read(png(*size, mode), "here")
            grid, pixels = PICTURES.patches(image)
            whole = Image.open(io.BytesIO(image.contents))
            want = PICTURES._processor([whole], return_tensors="np")
            assert [1, *grid] == want["image_grid_thw"][0].tolist()
            np.testing.assert_array_equal(pixels, want["pixel_values"])
            assert image.grid == (grid[0] // 2, grid[1] // 2)


def test_the_length_filter_counts_all_tokens_and_cuts_no_image(tmp_path):
    large, few = row(images=[uri(png(80, 80))]), row()
    assert len(load([few, large], tmp_path)) == 1
    whole = load([few, large], tmp_path, max_prompt_tokens=128)[1]
    assert whole.images[0].num_tokens == 100 and len(whole.tokens) > 100
    for side in ("left", "right", "middle", "error"):
        with pytest.raises(DataError, match=r"row 2: .*more than data.max_prompt_tokens=64"):
            load([few, large], tmp_path, long_rows=side)


WRONG = {
    "no image": (row(images=[]), "row 2: 1 marks <image> for 0 images; write one for each"),
    "two images": (row(images=[uri(png(8, 8))] * 2), "row 2: 1 marks <image> for 2 images"),
    "cut short": (row(images=[uri(png(16, 24)[:70])]), "row 2, image 1: the image cannot be read"),
    "no file": (row(images=["/no/such.png"]), "row 2, image 1: the image cannot be read"),
    "no base64": (row(images=["data:image/png;base64,???"]), "is no base64"),
    "of the net": (row(images=["https://a.b/c.png"]), "nothing is downloaded"),
    "a number": (row(images=[5]), "must be bytes, a path or a data URI, got int"),
    "huge": (row(images=[uri(blank(9000, 9000))]), "9000 x 9000 pixels, more than 67108864"),
    "too narrow": (row(images=[uri(png(2, 900))]), "aspect ratio"),
    "its token": (
        row(prompt=[{"role": "user", "content": "<image><|image_pad|>"}]),
        "row 2: the template renders 2 image placeholders for 1 images",
    ),
}


def test_bytes_of_an_image_in_json_are_base64(tmp_path):
    contents = png(16, 24)
    written = base64.b64encode(contents).decode()
    part = {"type": "image", "bytes": written}
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "How many?"}]}]
    rows = [row(images=[{"bytes": written, "path": None}]), row(prompt=asked, images=None)]
    for prompt in load(rows, tmp_path):
        assert [picture.contents for picture in prompt.images] == [contents]
    long = "A" * 9999 + "?"
    for image in ({"bytes": long}, {"path": long}, long, "data:image/png;base64," + long):
        with pytest.raises(DataError, match=r"row 1, image 1: .*image") as error:
            load([row(images=[image])], tmp_path)
        assert len(str(error.value)) < 400 and "base64" in str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_are_refused(name, tmp_path):
    wrong, message = WRONG[name]
    with pytest.raises(DataError, match="row 2") as error:
        load([row(), wrong], tmp_path)
    assert message in str(error.value)


def test_a_model_of_text_refuses_images(tmp_path):
    with pytest.raises(DataError, match="row 1: it has images, but this model is text-only"):
        load([row()], tmp_path, image_processor=None)


def test_marks_without_a_column_are_text():
    messages = [{"role": "user", "content": "what is <image>?"}]
    assert split_parts(messages, None, "here") == (messages, [])


def test_only_answers_to_images_bear_loss(tmp_path):
    path = tmp_path / "rows.jsonl"
    dialogue = [*row()["prompt"], {"role": "assistant", "content": "#3"}]
    path.write_text(json.dumps({"messages": dialogue, "images": row()["images"]}) + "\n")
    config = DataConfig(task="files", train_files=(str(path),))
    (found,) = datasets.worked_examples(config, TOKENIZER, "train", 0, 64, PICTURES)
    assert len(found.tokens) == len(found.mask) and found.images[0].start == 3
    learned = [token for token, bears in zip(found.tokens, found.mask, strict=True) if bears]
    assert TOKENIZER.decode(learned) == "#3<eos>"


def test_each_sequence_of_a_dialogue_has_the_images_of_its_messages(tmp_path):
    """The template drops what stands before a bar: the first turn is a sequence with one image."""
    dropping = tokenizer.character_tokenizer(images=True)
    content = "message['content'].split('|')[-1] if message['content'] is string and not loop.last"
    old = "{% if message['content'] is string %}{{ message['content'] }}"
    assert old in dropping.chat_template
    new = old.replace("{{ message['content'] }}", f"{{{{ {content} else message['content'] }}}}")
    dropping.chat_template = dropping.chat_template.replace(old, new)
    path = tmp_path / "rows.jsonl"
    turns = [*row()["prompt"], {"role": "assistant", "content": "x|3"}]
    dialogue = [*turns, *row()["prompt"], {"role": "assistant", "content": "y|4"}]
    path.write_text(json.dumps({"messages": dialogue, "images": row()["images"] * 2}) + "\n")
    config = DataConfig(task="files", train_files=(str(path),))
    first, second = datasets.worked_examples(config, dropping, "train", 0, 128, PICTURES)
    assert [len(example.images) for example in (first, second)] == [1, 2]
    for example, text in ((first, "x|3<eos>"), (second, "y|4<eos>")):
        assert len(example.tokens) == len(example.mask)
        learned = [t for t, bears in zip(example.tokens, example.mask, strict=True) if bears]
        assert dropping.decode(learned) == text
