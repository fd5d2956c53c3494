"""Images that tools and environments give: parts of messages, tokens, places; broken ones."""

import pathlib

import pytest
from PIL import Image

from jaxrl_llm.agents import message_content
from jaxrl_llm.agents.agent_pool import AgentError
from jaxrl_llm.agents.env_manager import EnvManager
from jaxrl_llm.config.agent import AgentConfig, EnvironmentConfig
from jaxrl_llm.data.images import ImagePreprocessor, expand_tokens
from jaxrl_llm.data.tokenizer import character_tokenizer, prompt_text, prompt_tokens
from jaxrl_llm.types import Prompt, PromptBatch

FILE = pathlib.Path(__file__).with_name("drawing_tools.py")
TOKENIZER = character_tokenizer(images=True)
IMAGE = TOKENIZER.convert_tokens_to_ids("<|image_pad|>")
PICTURES = ImagePreprocessor.from_sizes(4, 2, 2, IMAGE)
CONFIG = AgentConfig(
    tools=tuple(f"{FILE}:{name}" for name in ("draw", "broken", "described")),
    environments={"Gallery": EnvironmentConfig(environment=f"{FILE}:Gallery")},
    default="tool_agent",
    max_turns=4,
    timeout_s=20.0,
)


def prompt(**info):
    messages = ({"role": "user", "content": "go"},)
    text = prompt_text(TOKENIZER, messages)
    (tokens,) = prompt_tokens(TOKENIZER, [text], True)
    return Prompt(tokens, text, "test", "truth", info, 0, messages, {})


def follows(world, text):
    tokens = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    assert world.submit_turn(0, tokens, True)
    while not (found := world.collect_replies(wait=True)):
        pass
    return found[0][1]


def call(name):
    return f'{{"name": "{name}", "parameters": {{"side": 24}}}}'


def marks(following):
    """Returns the places of tokens of images, and what stands around them."""
    at = [i for i, token in enumerate(following.tokens) if token == IMAGE]
    return at, TOKENIZER.decode([token for token in following.tokens if token != IMAGE])


def test_tool_returns_an_image_and_a_broken_one_is_reported():
    with EnvManager(CONFIG, TOKENIZER, PICTURES) as world:
        world.begin(PromptBatch((prompt(),)), 1)
        following = follows(world, call("draw"))
        at, text = marks(following)
        (image,) = following.images
        assert image.grid == (3, 3) and at == list(range(image.start, image.start + 9))
        begins, ends = "<|vision_start|>", "<|vision_end|>"
        # What a tool says cannot pretend to be an image.
        assert text == f"<tool>{begins}{ends}< |image_pad|> is 24<eos><assistant>"
        at, text = marks(follows(world, call("broken")))
        assert not at and text == f"<tool>{message_content.UNREADABLE_IMAGE}<eos><assistant>"
        (log,) = world.finish()
        assert log.errors["image"] == 1 and log.errors.total() == 1
        shown = log.messages[1]["content"]
        assert shown == [{"type": "image"}, {"type": "text", "text": "< |image_pad|> is 24"}]


def test_an_environment_begins_and_goes_on_with_images():
    with EnvManager(CONFIG, TOKENIZER, PICTURES) as world:
        (begun,) = world.begin(PromptBatch((prompt(agent_name="Gallery"),)), 1).prompts
        assert [image.grid for image in begun.images] == [(1, 2)]
        start = begun.images[0].start
        assert (
            begun.tokens[start : start + 2] == (IMAGE, IMAGE) and IMAGE not in begun.tokens[:start]
        )
        following = follows(world, "nice")
        assert [image.grid for image in following.images] == [(2, 1)]
        assert marks(following)[0] == [following.images[0].start, following.images[0].start + 1]


def test_a_model_of_text_is_shown_no_image():
    with EnvManager(CONFIG, TOKENIZER) as world:
        world.begin(PromptBatch((prompt(),)), 1)
        with pytest.raises(AgentError, match="returned an image, but this run is text-only"):
            follows(world, call("draw"))


def test_a_text_stands_in_place_of_an_image():
    """For models that read text alone; others are shown the image."""
    with EnvManager(CONFIG, TOKENIZER) as world:
        world.begin(PromptBatch((prompt(),)), 1)
        text = marks(follows(world, call("described")))[1]
        assert text == "<tool>(a < |image_pad|> of 24)\nred<eos><assistant>"
    with EnvManager(CONFIG, TOKENIZER, PICTURES) as world:
        world.begin(PromptBatch((prompt(),)), 1)
        following = follows(world, call("described"))
        assert [image.grid for image in following.images] == [(3, 3)]
        assert "24" not in marks(following)[1]


def test_parts_of_every_kind():
    image = Image.new("RGB", (8, 8))
    uri = message_content.message_content(image, str)[0]["image"]
    part = {"type": "image_url", "image_url": {"url": uri}}
    said = message_content.message_content([part, "a", {"type": "text", "text": "b"}, 3], str.upper)
    texts = [{"type": "text", "text": text} for text in ("A", "B", "3")]
    assert said == [{"type": "image", "image": uri}, *texts]
    assert message_content.message_content(["a", 1], str) == '["a", 1]'
    read = PICTURES.read(uri, "here", files=False)
    assert expand_tokens(PICTURES, [5, IMAGE, 6], [read], "here")[0] == (5, IMAGE, 6)
