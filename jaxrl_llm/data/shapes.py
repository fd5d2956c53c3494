"""Drawn images of shapes to be counted, by a seed: the tiny task of models that read images."""

import io
import random
from collections.abc import Mapping
from typing import Any

SIDE = 32  # pixels
_CELL = 8  # pixels a side, of which each holds one shape at most
MOST = 9


def drawing(seed: str) -> tuple[bytes, int]:
    """Returns an image as a PNG file, and how many shapes it shows."""
    from PIL import Image, ImageDraw

    draw = random.Random(seed)
    number = draw.randint(1, MOST)
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


def taught(row: Mapping[str, Any], errors: float, seed: int) -> str:
    """Returns the answer to a row that a warm start learns: wrong in a share of `errors`."""
    draw = random.Random(f"wrong count {seed} {row['split']} {row['index']}")
    right = int(row["answer"].removeprefix("#"))
    if draw.random() >= errors:
        return f"#{right}"
    return f"#{draw.choice([n for n in range(1, MOST + 1) if n != right])}"
