"""Inputs of the device programs, built on the host: prompt batches, continuations, inserts.

Shapes come from short lists, because each one is a program to compile.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.models.image_inputs import ImageInputs
from jaxrl_llm.models.transformer import ROUTE_DTYPE
from jaxrl_llm.packing.packed_batch import bucket, pack
from jaxrl_llm.rollout.engine import prefill, requests
from jaxrl_llm.rollout.engine.device_programs import ChunkedPrefill, InsertArgs, PageWrites
from jaxrl_llm.rollout.engine.logit_adjustments import LogitAdjustments
from jaxrl_llm.rollout.engine.prefill import Prompts
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.rollout.engine.token_sampling import SamplerState

RowShape = tuple[int, int]  # rows, tokens per row

MAX_PREFILL_TOKENS = 4096  # per prefill, padding included
MIN_WIDTH = 32
# (rows, tokens) of chunked prefill, sorted by tokens, then rows.
_CONTINUATION_SHAPES = (8, 32), (32, 32), (8, 128), (2, 512)
# With prefix caching also for a prompt that arrives alone.
_FEW_PROMPTS_SHAPES = ((2, 128),)


def prefill_shapes(num_prompts: int, longest: int, max_tokens: int) -> tuple[RowShape, ...]:
    """(rows, width) of the prefills of a run whose prompts have up to `longest` tokens.

    One shape, or two if a row of the longest prompts holds just one. `num_prompts` is per step.
    """
    width = _width(longest, max_tokens)
    widths = sorted({min(width, prefill.PREFILL_CHUNK_TOKENS), width})
    return tuple((_num_rows(num_prompts, row_width), row_width) for row_width in widths)


def num_prompts_in_batch(
    lengths: Sequence[int],
    max_tokens: int,
    shapes: Sequence[RowShape] = (),
    *,
    shares_rows: bool = True,
) -> int:
    """How many of the first prompts of these lengths fit in one prefill; at least 1.

    `shapes` and `shares_rows` as in `prompt_rows`.
    """

    def too_many(count: int) -> bool:
        max_rows, width = _shape(count, max(lengths[:count]), max_tokens, shapes)
        return (
            count > max_rows * _prompts_per_row(width)
            or len(_packed_rows(lengths[:count], width, shares_rows)) > max_rows
        )

    return 1 + bisect.bisect_left(range(2, len(lengths) + 1), True, key=too_many)


def prompt_rows(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    shapes: Sequence[RowShape] = (),
    routes: Sequence[np.ndarray | None] = (),
    num_routes: int = 0,
    sights: Sequence[ImageInputs | None] = (),
    *,
    shares_rows: bool = True,
) -> Prompts:
    """Packs prompts into rows as wide as the longest needs; short prompts share a row.

    With `shares_rows` false, as layers with a state need it, every prompt has its own row.

    Rows and widths come in few sizes, up to `max_tokens` wide: the first of `shapes` that is wide
    enough, if there is one. `routes` are expert choices to replay, `num_routes` per token; `sights`
    are the image inputs of each prompt.
    """
    lengths = [len(prompt) for prompt in prompts]
    _, width = _shape(0, max(lengths), max_tokens, shapes)
    rows = _packed_rows(lengths, width, shares_rows)
    needed = max(len(rows), -(-len(prompts) // _prompts_per_row(width)))
    num_rows, _ = _shape(needed, max(lengths), max_tokens, shapes)
    sizes = {image_inputs.features.shape[1] for image_inputs in sights if image_inputs is not None}
    batch = empty_prompt_rows(num_rows, width, num_routes, *sizes)
    for row, members in enumerate(rows):
        column = 0
        for segment, i in enumerate(members, 1):
            columns = slice(column, column + lengths[i])
            batch.tokens[row, columns] = prompts[i]
            batch.positions[row, columns] = np.arange(lengths[i])
            batch.segment_ids[row, columns] = segment
            batch.starts[i], batch.lengths[i] = row * width + column, lengths[i]
            if routes and (prompt_routes := routes[i]) is not None:
                batch.routes[row, columns] = prompt_routes
            if batch.sights is not None:
                image_inputs = sights[i] or text_image_inputs(lengths[i])
                write_image_inputs(batch.sights, image_inputs, row, column, 0, lengths[i])
            column = columns.stop
    return batch


def all_prefill_shapes(
    num_prompts: int, prompt_tokens: int, max_tokens: int
) -> list[tuple[int, int]]:
    """Every (rows, width) of a prefill of up to `num_prompts` prompts of any length, ascending."""
    shapes = set()
    for width in {_width(n, max_tokens) for n in range(1, prompt_tokens + 1)}:
        min_rows = -(-num_prompts // _prompts_per_row(width))
        shapes |= {(_num_rows(n, width), width) for n in range(min_rows, num_prompts + 1)}
    return sorted(shapes, key=lambda shape: shape[::-1])


def empty_prompt_rows(rows: int, width: int, num_routes: int = 0, vector_size: int = 0) -> Prompts:
    """A prefill batch without prompts; `vector_size` > 0 adds image inputs."""
    zeros: Any = np.zeros  # typed as device arrays: jit transfers them
    tokens, positions, segment_ids = zeros((3, rows, width), np.int32)
    starts = zeros(rows * _prompts_per_row(width), np.int32)
    own = np.full((rows, width, num_routes), -1, ROUTE_DTYPE)
    own_choice: Any = own
    sights = empty_image_inputs(rows, width, vector_size) if vector_size else None
    return Prompts(tokens, positions, segment_ids, starts, starts + 1, own_choice, sights)


def empty_image_inputs(rows: int, width: int, vector_size: int) -> ImageInputs:
    """Empty image inputs, with a vector per token, so that the shape depends on the rows alone."""
    zeros: Any = np.zeros
    vectors = zeros((rows * width, vector_size), np.float32)
    return ImageInputs(
        zeros((rows, width, 3), np.int32), zeros((rows, width), np.int32) - 1, vectors
    )


def text_image_inputs(num_tokens: int, offset: int = 0) -> ImageInputs:
    """Image inputs of one row of text without images."""
    text_positions: Any = np.arange(num_tokens)[None] + offset
    positions, no_vectors = (
        np.repeat(text_positions[..., None], 3, -1),
        np.zeros((0, 0), np.float32),
    )
    no_index: Any = np.full((1, num_tokens), -1)
    return ImageInputs(positions, no_index, no_vectors)  # type: ignore[arg-type]


def extended_image_inputs(
    sights: ImageInputs | None, num_tokens: int, offset: int
) -> ImageInputs | None:
    """Extends the image inputs of a prompt to `num_tokens` with text after it."""
    if sights is None or (count := sights.feature_index.shape[1]) == num_tokens:
        return sights
    text = text_image_inputs(num_tokens, offset)
    positions = np.concatenate([sights.positions, text.positions[:, count:]], axis=1)
    vector_indices = np.concatenate([sights.feature_index, text.feature_index[:, count:]], axis=1)
    return sights._replace(positions=positions, feature_index=vector_indices)  # type: ignore[arg-type]


def write_image_inputs(
    batch: ImageInputs, prompt: ImageInputs, row: int, column: int, begin: int, end: int
) -> None:
    """Copies the image inputs of tokens [begin, end) of a prompt into a row, from `column` on."""
    arrays: Any = batch
    columns = slice(column, column + end - begin)
    arrays.positions[row, columns] = prompt.positions[0, begin:end]
    vector_indices = np.asarray(prompt.feature_index[0, begin:end])
    image_columns = column + np.flatnonzero(vector_indices >= 0)
    vector_rows = row * batch.feature_index.shape[1] + image_columns
    arrays.feature_index[row, image_columns] = vector_rows
    if len(vector_rows):
        arrays.features[vector_rows] = np.asarray(prompt.features)[
            vector_indices[vector_indices >= 0]
        ]


def min_chunk_tokens() -> int:
    """Tokens that chunked prefill computes for a sample at least, padding included."""
    return min(width for _, width in _CONTINUATION_SHAPES)


def chunked_prefill_shapes(num_slots: int, prefix_caching: bool = False) -> list[RowShape]:
    """The (rows, tokens) of the programs for chunked prefill, sorted by tokens, then rows."""
    shapes = _CONTINUATION_SHAPES + (_FEW_PROMPTS_SHAPES if prefix_caching else ())
    return sorted({(min(rows, num_slots), width) for rows, width in shapes}, key=lambda s: s[::-1])


def chunked_prefill_batch(
    lengths: Sequence[int], shapes: Sequence[RowShape], *, longest_first: bool = False
) -> tuple[int, int, list[int]]:
    """(rows, tokens) of the next program for samples with `lengths` tokens left, and those in it.

    Larger inputs take several calls. With `longest_first`, a wide program has no more rows than
    long samples need.

    >>> chunked_prefill_batch([5, 90, 7], [(2, 32), (8, 32), (2, 128), (8, 128)])
    (2, 128, [0, 1])
    >>> chunked_prefill_batch([5, 90, 7], [(2, 32), (8, 128)], longest_first=True)
    (8, 128, [1, 2, 0])
    """
    order, widths = list(range(len(lengths))), sorted({width for _, width in shapes})
    width = next((width for width in widths if width >= max(lengths)), widths[-1])
    count = len(lengths)
    if longest_first:
        order.sort(key=lambda i: -lengths[i])
        narrower = max((each for each in widths if each < width), default=0)
        count = sum(length > narrower for length in lengths)
    rows = [rows for rows, each in shapes if each == width]
    num_rows = max([rows[0], *(each for each in rows if each <= count)])
    return num_rows, width, order[:num_rows]


def chunked_prefill_inputs(
    pieces: Sequence[Sequence[int]],
    cached_lengths: Sequence[int],
    rows: int,
    width: int,
    table: np.ndarray,
    images: Sequence[tuple[ImageInputs | None, int]] = (),
    histories: Sequence[Sequence[int]] = (),
    history_tokens: int = 0,
) -> ChunkedPrefill:
    """Builds the inputs of `extend`: `pieces` follow `cached_lengths` tokens in the cache.

    `table` is the page table of the rows; `images` are the image inputs of each whole sequence and
    the offset of rotary positions after them; `histories` are all tokens of each, for speculation.
    """
    zeros: Any = np.zeros
    inputs = ChunkedPrefill(
        zeros((rows, width), np.int32),
        zeros(rows, np.int32) + 1,
        zeros(rows, np.int32),
        zeros((rows, table.shape[1]), np.int32) + table,
        zeros((rows, history_tokens), np.int32),
    )
    for row, (piece, cached) in enumerate(zip(pieces, cached_lengths, strict=True)):
        inputs.tokens[row, : len(piece)] = piece
        inputs.lengths[row], inputs.cached_lengths[row] = len(piece), cached
    for row, tokens in enumerate(histories if history_tokens else ()):
        inputs.history[row, : len(tokens)] = tokens
    ends = [cached + len(piece) for piece, cached in zip(pieces, cached_lengths, strict=True)]
    image_rows = [
        (
            sights,
            (np.arange(cached, end) + offset != sights.positions[0, cached:end, 0])
            | (np.asarray(sights.feature_index)[0, cached:end] >= 0),
        )
        for (sights, offset), cached, end in zip(images, cached_lengths, ends, strict=False)
        if sights is not None
    ]
    # After the last image, positions follow from the offset alone: no image inputs needed.
    if any(differs.any() for _, differs in image_rows):
        image_inputs = empty_image_inputs(rows, width, image_rows[0][0].features.shape[1])
        for row, ((sights, offset), cached, end) in enumerate(
            zip(images, cached_lengths, ends, strict=True)
        ):
            write_image_inputs(
                image_inputs, sights or text_image_inputs(end, offset), row, 0, cached, end
            )
        inputs = dataclasses.replace(inputs, sights=image_inputs)
    return inputs


def page_writes(
    page_writes: Sequence[tuple[int, int, int]], size: int, num_pages: int
) -> PageWrites:
    """Arrays of (page, index of the prompt in the prefix, offset of the page's first token in it).

    Padded to `size` with a page id past the last.
    """
    columns: Any = np.zeros((3, size), np.int32)
    columns[0] = num_pages
    if page_writes:
        columns[:, : len(page_writes)] = np.transpose(page_writes)
    return PageWrites(*columns)


def _packed_rows(lengths: Sequence[int], width: int, shares_rows: bool) -> list[list[int]]:
    if shares_rows and _prompts_per_row(width) > 1:
        return pack(lengths, width)
    return [[i] for i in range(len(lengths))]


def _prompts_per_row(width: int) -> int:
    """Most prompts per row, on average."""
    return max(1, width // MIN_WIDTH) if width <= prefill.PREFILL_CHUNK_TOKENS else 1


def _shape(num_rows: int, longest: int, max_tokens: int, shapes: Sequence[RowShape]) -> RowShape:
    """The first of `shapes` that fits the longest prompt, else one of at least `num_rows` rows."""
    width = _width(longest, max_tokens)
    return next(
        (shape for shape in shapes if shape[1] >= longest), (_num_rows(num_rows, width), width)
    )


def _width(length: int, max_tokens: int) -> int:
    return bucket(length, smallest=MIN_WIDTH, largest=max_tokens)


def _num_rows(count: int, width: int) -> int:
    return min(bucket(count), max(1, MAX_PREFILL_TOKENS // width))


def insert_args(
    entering: Sequence[tuple[int, int, np.ndarray, SamplingParams]],
    size: int,
    num_slots: int,
    offsets: Sequence[int] = (),
    adjustments: LogitAdjustments | None = None,
    masks: np.ndarray | None = None,
) -> InsertArgs:
    """Arguments of an insert, padded to `size` samples with slot `num_slots`.

    `entering` are (index of the prompt in the prefix, slot, key, parameters); `offsets` are
    `Request.offset` of each, by default zero; `adjustments` and `masks` those of `size` rows.
    """
    padding = (0, num_slots, np.zeros(2, np.uint32), SamplingParams(max_tokens=1))
    rows = [*entering, *[padding] * (size - len(entering))]
    prompts, slots, keys, params = zip(*rows, strict=True)

    array: Any = np.array  # typed as a device array: jit transfers it

    def column(field: str, dtype: Any = np.float32) -> Any:
        return np.array([getattr(p, field) for p in params], dtype)

    stops = array(np.full((size, requests.NUM_STOP_TOKENS), -1, np.int32))
    for i, p in enumerate(params):
        stops[i, : len(p.stop_tokens)] = p.stop_tokens
    sampler = SamplerState(
        keys=array(keys, np.uint32),
        temperature=column("temperature"),
        top_k=column("top_k", np.int32),
        top_p=column("top_p"),
        min_p=column("min_p"),
        support_tokens=column("support_tokens", np.int32),
    )
    mask_array: Any = masks
    return InsertArgs(
        prompt_indices=array(prompts, np.int32),
        slots=array(slots, np.int32),
        max_new_tokens=column("max_tokens", np.int32),
        stop_tokens=stops,
        sampler=sampler,
        rotary_offsets=array([*offsets, *[0] * (size - len(offsets))], np.int32),
        adjustments=adjustments,
        masks=mask_array,
    )
