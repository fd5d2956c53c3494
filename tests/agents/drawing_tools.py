"""A tool and an environment that show images."""

import io

from PIL import Image


def draw(side: int):
    """Draws a square.

    Args:
        side: Pixels a side.
    """
    return [Image.new("RGB", (side, side), "red"), f"<|image_pad|> is {side}"]


def described(side: int):
    """Draws a square, with a text for models that read no images.

    Args:
        side: Pixels a side.
    """
    file = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(file, "PNG")
    image = {"type": "image", "image": file.getvalue(), "alt": f"(a <|image_pad|> of {side})"}
    return [image, "red"]


def broken(side: int):
    """Gives half an image.

    Args:
        side: Pixels a side.
    """
    return [{"type": "image", "image": b"half of it"}]


class Gallery:
    """Shows an image at the beginning, and another after each turn."""

    def start(self, row):
        return [{"role": "user", "content": [Image.new("RGB", (16, 8))]}]

    def step(self, message):
        from jaxrl_llm.agents.environments import Step

        shown = {"role": "user", "content": [Image.new("RGB", (8, 16)), "and this"]}
        return Step([shown], reward=1.0)
