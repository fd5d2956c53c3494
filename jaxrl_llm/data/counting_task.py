"""A tiny task for vision-language models: count the shapes in a generated image."""

import io
import random
from collections.abc import Mapping
from typing import Any

SIDE = 32  # pixels
_CELL = 8  # pixels a side of a grid cell, which holds at most one shape
MAX_SHAPES = 9


def draw_image(seed: str) -> tuple[bytes, int]:
    """Draws an image; returns it as a PNG file with the number of shapes in it."""
    from PIL import Image, ImageDraw

    draw = random.Random(seed)
    number = draw.randint(1, MAX_SHAPES)
    image = Image.new("RGB", (SIDE, SIDE))
    pen = ImageDraw.Draw(image)
    in_row = SIDE // _CELL
    for cell in draw.sample(range(in_row * in_row), number):
        x, y = (
            cell % in_row * _CELL + draw.randint(0, 1),
            cell // in_row * _CELL + draw.randint(0, 1),
        )
        size = draw.randint(5, 6)
        box = x, y, x + size, y + size
        colour = tuple(draw.randint(120, 255) for _ in range(3))
        kind = draw.choice(("square", "disc", "triangle"))
        if kind == "square":
            pen.rectangle(box, colour)
        elif kind == "disc":
            pen.ellipse(box, colour)
        else:
            pen.polygon((x, y + size, x + size, y + size, x + size // 2, y), colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), number


def warm_start_answer(row: Mapping[str, Any], errors: float, seed: int) -> str:
    """The answer to a row for the warm start, wrong with probability `errors`."""
    draw = random.Random(f"wrong count {seed} {row['split']} {row['index']}")
    right = int(row["answer"].removeprefix("#"))
    if draw.random() >= errors:
        return f"#{right}"
    return f"#{draw.choice([n for n in range(1, MAX_SHAPES + 1) if n != right])}"
