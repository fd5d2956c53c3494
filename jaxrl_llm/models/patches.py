"""Where patches and tokens of images stand: rows of the tower, and positions of three parts."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.models.shape import Vision

FEWEST = 256  # patches of a row of the tower; rows are as wide, twice as wide, ...
TOGETHER = 1 << 13  # patches that a tower that learns reads on a device at one time
MOST = 1 << 11  # of a row that holds several images: attention compares all of a row


class Grid(NamedTuple):
    """Patches of an image along its height and width; multiples of the vision's merge size."""

    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        return self.rows * self.columns

    def merged(self, vision: Vision) -> "Grid":
        """Returns the grid of the vectors that stand for the image, one token each."""
        return Grid(self.rows // vision.merge_size, self.columns // vision.merge_size)

    def split(self, vision: Vision) -> "Grid":
        """Returns the grid of the patches of an image whose vectors are this grid."""
        return Grid(self.rows * vision.merge_size, self.columns * vision.merge_size)

    def num_tokens(self, vision: Vision) -> int:
        return self.merged(vision).num_patches


@dataclasses.dataclass(frozen=True)
class Rows:
    """Images in rows of the tower. Host arrays; rows x patches."""

    pixels: Float[np.ndarray, "rows patches dims"]
    places: Int[np.ndarray, "rows patches 2"]  # row and column in the image
    images: Int[np.ndarray, "rows patches"]  # which of the row, from 1; 0: none
    # Of each image: which of the vectors of all rows, end to end, are those of its tokens.
    vectors: tuple[Int[np.ndarray, " _"], ...]


def positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[Grid]
) -> Int[np.ndarray, "tokens 3"]:
    """Returns time, row and column of each token of a sequence (arXiv:2409.12191, Sec. 2.1).

    Text counts on; an image stands at one time, its rows and columns count from there, and what
    follows it goes on after the largest of them.

    Args:
      starts: Where the tokens of each image begin, ascending.
      grids: Of the images' tokens.

    >>> positions(6, [1], [Grid(1, 3)]).tolist()
    [[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [4, 4, 4], [5, 5, 5]]
    """
    found = np.empty((num_tokens, 3), np.int32)
    at = following = 0  # token, position

    def text(end: int) -> int:
        found[at:end] = np.arange(following, following + end - at)[:, None]
        return following + end - at

    for start, grid in zip(starts, grids, strict=True):
        following = text(start)
        at = start + grid.num_patches
        found[start:at, 0] = following
        found[start:at, 1] = following + np.repeat(np.arange(grid.rows), grid.columns)
        found[start:at, 2] = following + np.tile(np.arange(grid.columns), grid.rows)
        following += max(grid)
    text(num_tokens)
    return found


def window_order(grid: Grid, vision: Vision) -> Int[np.ndarray, " slots"]:
    """Returns the vector of an image (in reading order) at each place of its windows, -1: none.

    Windows are in reading order, and so are the vectors of each. The last places of a window at the
    right or lower edge may be empty.
    """
    side = vision.window
    high, wide = grid.merged(vision)
    count = -(-high // side), -(-wide // side)
    numbers = np.full((count[0] * side, count[1] * side), -1)
    numbers[:high, :wide] = np.arange(high * wide).reshape(high, wide)
    cut = numbers.reshape(count[0], side, count[1], side).swapaxes(1, 2)
    windows = cut.reshape(-1, side * side)
    kept = np.argsort(windows < 0, axis=1, kind="stable")  # the vectors first
    return np.take_along_axis(windows, kept, 1).reshape(-1)


def num_places(grid: Grid, vision: Vision) -> int:
    """Returns the patches of a row that an image takes, empty ones included."""
    side = vision.window
    high, wide = grid.merged(vision)
    return -(-high // side) * -(-wide // side) * vision.window_patches


def width(num_patches: int) -> int:
    """Returns the width of a row of the tower that holds so many places."""
    size = FEWEST
    while size < num_patches:
        size *= 2
    return size


def groups(
    grids: Sequence[Grid], vision: Vision, num_rows: int, most: int = MOST
) -> list[list[int]]:
    """Returns which images the tower reads together: in their order, as many as rows hold.

    Rows that hold several images have `most` patches.
    """
    found: list[list[int]] = []
    used = 0
    for i, grid in enumerate(grids):
        size = num_places(grid, vision)
        if not found or used + size > most * num_rows:
            found.append([])
            used = 0
        found[-1].append(i)
        used += size
    return found


def in_rows(
    images: Sequence[tuple[Grid, Float[np.ndarray, "_ dims"]]],
    vision: Vision,
    num_rows: int = 1,
) -> Rows:
    """Returns images in so many rows of one width, the largest first, each to the emptiest row.

    The patches of an image come as the family's processor gives them: those that become one vector
    side by side, the vectors in reading order.
    """
    sizes = [num_places(grid, vision) for grid, _ in images]
    filled = [0] * num_rows
    starts = [(0, 0)] * len(images)
    for i in sorted(range(len(images)), key=lambda i: -sizes[i]):
        row = min(range(num_rows), key=filled.__getitem__)
        starts[i] = row, filled[row]
        filled[row] += sizes[i]
    size = width(max(filled))
    rows = Rows(
        np.zeros((num_rows, size, vision.patch_dims), np.float32),
        np.zeros((num_rows, size, 2), np.int32),
        np.zeros((num_rows, size), np.int32),
        (),
    )
    unit = vision.merge_size**2
    vectors = []
    for number, ((grid, pixels), (row, start)) in enumerate(zip(images, starts, strict=True), 1):
        order = window_order(grid, vision)
        at = np.flatnonzero(order >= 0)
        wanted = order[at]
        inside = start + (at[:, None] * unit + np.arange(unit)).reshape(-1)
        rows.pixels[row, inside] = pixels.reshape(-1, unit, vision.patch_dims)[wanted].reshape(
            -1, vision.patch_dims
        )
        rows.places[row, inside] = _places(grid, vision)[wanted].reshape(-1, 2)
        rows.images[row, inside] = number
        place_of = np.empty(len(at), np.int32)
        place_of[wanted] = (row * size + start) // unit + at
        vectors.append(place_of)
    return dataclasses.replace(rows, vectors=tuple(vectors))


def _places(grid: Grid, vision: Vision) -> Int[np.ndarray, "vectors unit 2"]:
    """Returns row and column of the patches of each vector, as the processor orders them."""
    m = vision.merge_size
    both = np.stack(np.meshgrid(np.arange(grid.rows), np.arange(grid.columns), indexing="ij"), -1)
    blocks = both.reshape(grid.rows // m, m, grid.columns // m, m, 2).swapaxes(1, 2)
    return blocks.reshape(-1, m * m, 2)
