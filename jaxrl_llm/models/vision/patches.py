"""Packs image patches into rows for the vision encoder, and computes multimodal positions."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm.models.architecture import VisionArchitecture

NUM_COORDINATES = 4  # of a patch, see `PatchRows`
MIN_ROW_PATCHES = 256  # smallest width of an encoder row in patches; wider rows double it
MAX_TRAINED_PATCHES = 1 << 13  # patches per device that a trainable encoder reads at once
# Patches of a row shared by several images: full attention is quadratic in the row width.
MAX_SHARED_ROW_PATCHES = 1 << 11


class PatchGrid(NamedTuple):
    """Patches of an image along its height and width, multiples of the merge size."""

    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        return self.rows * self.columns

    def to_token_grid(self, vision: VisionArchitecture) -> "PatchGrid":
        """The grid after merging patches: one embedding, and one token, per cell."""
        return PatchGrid(self.rows // vision.merge_size, self.columns // vision.merge_size)

    def to_patch_grid(self, vision: VisionArchitecture) -> "PatchGrid":
        """The patch grid of an image with this token grid; the inverse of `to_token_grid`."""
        return PatchGrid(self.rows * vision.merge_size, self.columns * vision.merge_size)

    def num_tokens(self, vision: VisionArchitecture) -> int:
        return self.to_token_grid(vision).num_patches


@dataclasses.dataclass(frozen=True)
class PatchRows:
    """Images packed into rows of the vision encoder: host arrays, rows x patches."""

    pixels: Float[np.ndarray, "rows patches dims"]
    # Row and column of the patch in its image, and the rows and columns of that image's grid.
    coordinates: Int[np.ndarray, "rows patches 4"]
    image_ids: Int[np.ndarray, "rows patches"]  # index of the image from 1; 0: padding
    # Per image: the indices of its token embeddings in the encoder output, rows concatenated.
    embedding_indices: tuple[Int[np.ndarray, " _"], ...]


def mrope_positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[PatchGrid]
) -> Int[np.ndarray, "tokens 3"]:
    """M-RoPE positions of a sequence: time, row and column per token (arXiv:2409.12191, Sec. 2.1).

    Text advances all three. An image has one time; its rows and columns count from there, and the
    next token continues after the largest of them.

    Args:
      starts: Index of the first token of each image, ascending.
      grids: Token grids of the images.

    >>> mrope_positions(6, [1], [PatchGrid(1, 3)]).tolist()
    [[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 1, 3], [4, 4, 4], [5, 5, 5]]
    """
    coordinates = np.empty((num_tokens, 3), np.int32)
    token = next_position = 0

    def fill_text(end: int) -> int:
        coordinates[token:end] = np.arange(next_position, next_position + end - token)[:, None]
        return next_position + end - token

    for start, grid in zip(starts, grids, strict=True):
        next_position = fill_text(start)
        token = start + grid.num_patches
        coordinates[start:token, 0] = next_position
        coordinates[start:token, 1] = next_position + np.repeat(np.arange(grid.rows), grid.columns)
        coordinates[start:token, 2] = next_position + np.tile(np.arange(grid.columns), grid.rows)
        next_position += max(grid)
    fill_text(num_tokens)
    return coordinates


def window_order(grid: PatchGrid, vision: VisionArchitecture) -> Int[np.ndarray, " slots"]:
    """The token of an image (its index in raster order) in each slot of its windows; -1: padding.

    Windows are in raster order, as are the tokens within each. The last slots of a window at the
    right or lower edge may be padding.
    """
    side = vision.window
    grid_rows, grid_columns = grid.to_token_grid(vision)
    num_windows = -(-grid_rows // side), -(-grid_columns // side)
    token_indices = np.full((num_windows[0] * side, num_windows[1] * side), -1)
    token_indices[:grid_rows, :grid_columns] = np.arange(grid_rows * grid_columns).reshape(
        grid_rows, grid_columns
    )
    tiles = token_indices.reshape(num_windows[0], side, num_windows[1], side).swapaxes(1, 2)
    windows = tiles.reshape(-1, side * side)
    valid_first = np.argsort(windows < 0, axis=1, kind="stable")  # tokens before padding
    return np.take_along_axis(windows, valid_first, 1).reshape(-1)


def num_padded_patches(grid: PatchGrid, vision: VisionArchitecture) -> int:
    """The patches that an image occupies in a row, padding of its windows included."""
    side = vision.window
    grid_rows, grid_columns = grid.to_token_grid(vision)
    return -(-grid_rows // side) * -(-grid_columns // side) * vision.window_patches


def row_width(num_patches: int) -> int:
    """The width of the smallest encoder row that holds `num_patches` patches."""
    size = MIN_ROW_PATCHES
    while size < num_patches:
        size *= 2
    return size


def image_batches(
    grids: Sequence[PatchGrid],
    vision: VisionArchitecture,
    num_rows: int,
    max_patches: int = MAX_SHARED_ROW_PATCHES,
) -> list[list[int]]:
    """Batches of image indices to encode together: in order, as many as the rows hold.

    Rows with several images have at most `max_patches` patches.
    """
    batches: list[list[int]] = []
    used = 0
    for i, grid in enumerate(grids):
        size = num_padded_patches(grid, vision)
        if not batches or used + size > max_patches * num_rows:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += size
    return batches


def pack_images(
    images: Sequence[tuple[PatchGrid, Float[np.ndarray, "_ dims"]]],
    vision: VisionArchitecture,
    num_rows: int = 1,
) -> PatchRows:
    """Packs images into `num_rows` rows of equal width: largest first, each into the emptiest row.

    The patches of an image are in the order of the family's processor: those that merge into one
    token are adjacent, tokens in raster order.
    """
    sizes = [num_padded_patches(grid, vision) for grid, _ in images]
    row_lengths = [0] * num_rows
    starts = [(0, 0)] * len(images)
    for i in sorted(range(len(images)), key=lambda i: -sizes[i]):
        row = min(range(num_rows), key=row_lengths.__getitem__)
        starts[i] = row, row_lengths[row]
        row_lengths[row] += sizes[i]
    width = row_width(max(row_lengths))
    rows = PatchRows(
        np.zeros((num_rows, width, vision.patch_dims), np.float32),
        np.zeros((num_rows, width, NUM_COORDINATES), np.int32),
        np.zeros((num_rows, width), np.int32),
        (),
    )
    merge_patches = vision.merge_size**2
    vectors_by_image = []
    for number, ((grid, pixels), (row, start)) in enumerate(zip(images, starts, strict=True), 1):
        window_slots = window_order(grid, vision)
        used_slots = np.flatnonzero(window_slots >= 0)
        token_order = window_slots[used_slots]
        patch_slots = start + (
            used_slots[:, None] * merge_patches + np.arange(merge_patches)
        ).reshape(-1)
        rows.pixels[row, patch_slots] = pixels.reshape(-1, merge_patches, vision.patch_dims)[
            token_order
        ].reshape(-1, vision.patch_dims)
        coordinates = _patch_coordinates(grid, vision)[token_order].reshape(-1, 2)
        rows.coordinates[row, patch_slots, :2] = coordinates
        rows.coordinates[row, patch_slots, 2:] = grid
        rows.image_ids[row, patch_slots] = number
        vector_slots = np.empty(len(used_slots), np.int32)
        vector_slots[token_order] = (row * width + start) // merge_patches + used_slots
        vectors_by_image.append(vector_slots)
    return dataclasses.replace(rows, embedding_indices=tuple(vectors_by_image))


def _patch_coordinates(
    grid: PatchGrid, vision: VisionArchitecture
) -> Int[np.ndarray, "vectors unit 2"]:
    """Row and column of the patches of each token, in the order of the processor."""
    merge_size = vision.merge_size
    coordinates = np.stack(
        np.meshgrid(np.arange(grid.rows), np.arange(grid.columns), indexing="ij"), -1
    )
    blocks = coordinates.reshape(
        grid.rows // merge_size, merge_size, grid.columns // merge_size, merge_size, 2
    ).swapaxes(1, 2)
    return blocks.reshape(-1, merge_size * merge_size, 2)
