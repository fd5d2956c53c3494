"""What the host gives the programs: prompts in rows, what continues them, samples for slots.

Sizes are few, because each is a program to compile.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.data.packing import bucket, pack
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.models.transformer import ROUTE_DTYPE
from jaxrl_llm.rollout import prefill, requests
from jaxrl_llm.rollout.prefill import Prompts
from jaxrl_llm.rollout.programs import Admission, Continuation, Writes
from jaxrl_llm.rollout.requests import SamplingParams
from jaxrl_llm.rollout.sampling import SamplerState

Shape = tuple[int, int]  # rows, and tokens of each

MOST_PROMPT_TOKENS = 4096  # read at one time, padding included
SMALLEST_WIDTH = 32
# (rows, tokens) that continuations are read in: narrow ones first, of these those with few rows.
_CONTINUATIONS = (8, 32), (32, 32), (8, 128), (2, 512)


def few_shapes(num_prompts: int, longest: int, max_tokens: int) -> tuple[Shape, ...]:
    """Returns (rows, width) in which a run reads all its prompts, of up to `longest` tokens.

    One, or two if rows of the longest hold one prompt each; `num_prompts` are of a step.
    """
    width = _width(longest, max_tokens)
    widths = sorted({min(width, prefill.PIECE_TOKENS), width})
    return tuple((_num_rows(num_prompts, each), each) for each in widths)


def num_fitting(lengths: Sequence[int], max_tokens: int, shapes: Sequence[Shape] = ()) -> int:
    """Returns how many prompts of these lengths, from the first on, are read together.

    `shapes` as in `prompt_rows`.
    """

    def too_many(count: int) -> bool:
        most, width = _shape(count, max(lengths[:count]), max_tokens, shapes)
        return count > most * _share(width) or len(_shared(lengths[:count], width)) > most

    return 1 + bisect.bisect_left(range(2, len(lengths) + 1), True, key=too_many)


def prompt_rows(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    shapes: Sequence[Shape] = (),
    routes: Sequence[np.ndarray | None] = (),
    num_routes: int = 0,
    sights: Sequence[Sights | None] = (),
) -> Prompts:
    """Returns prompts in rows as wide as the longest of them needs, short ones sharing a row.

    Rows and widths come in few sizes; `max_tokens` is the widest. They are the first of `shapes`
    that is wide enough, if one is. `routes` are those to follow, `num_routes` of each token;
    `sights` is what images are to each prompt.
    """
    lengths = [len(prompt) for prompt in prompts]
    _, width = _shape(0, max(lengths), max_tokens, shapes)
    rows = _shared(lengths, width)
    needed = max(len(rows), -(-len(prompts) // _share(width)))
    count, _ = _shape(needed, max(lengths), max_tokens, shapes)
    sizes = {seen.vectors.shape[1] for seen in sights if seen is not None}
    batch = empty_rows(count, width, num_routes, *sizes)
    for row, members in enumerate(rows):
        at = 0
        for segment, i in enumerate(members, 1):
            inside = slice(at, at + lengths[i])
            batch.tokens[row, inside] = prompts[i]
            batch.positions[row, inside] = np.arange(lengths[i])
            batch.segment_ids[row, inside] = segment
            batch.starts[i], batch.lengths[i] = row * width + at, lengths[i]
            if routes and (given := routes[i]) is not None:
                batch.routes[row, inside] = given
            if batch.sights is not None:
                seen = sights[i] or plain_sights(lengths[i])
                put_sights(batch.sights, seen, row, at, 0, lengths[i])
            at = inside.stop
    return batch


def row_shapes(num_prompts: int, prompt_tokens: int, max_tokens: int) -> list[tuple[int, int]]:
    """Returns every (rows, width) in which so many prompts of any length are read, rising."""
    shapes = set()
    for width in {_width(n, max_tokens) for n in range(1, prompt_tokens + 1)}:
        fewest = -(-num_prompts // _share(width))
        shapes |= {(_num_rows(n, width), width) for n in range(fewest, num_prompts + 1)}
    return sorted(shapes, key=lambda shape: shape[::-1])


def empty_rows(rows: int, width: int, num_routes: int = 0, vector_size: int = 0) -> Prompts:
    """Returns rows without a prompt; for images, if their vectors have a size."""
    zeros: Any = np.zeros  # the device takes them as they are
    tokens, positions, segment_ids = zeros((3, rows, width), np.int32)
    starts = zeros(rows * _share(width), np.int32)
    own = np.full((rows, width, num_routes), -1, ROUTE_DTYPE)
    own_choice: Any = own
    sights = no_sights(rows, width, vector_size) if vector_size else None
    return Prompts(tokens, positions, segment_ids, starts, starts + 1, own_choice, sights)


def no_sights(rows: int, width: int, vector_size: int) -> Sights:
    """Returns room for images in rows; there is a vector for every token, so that sizes are few."""
    zeros: Any = np.zeros
    vectors = zeros((rows * width, vector_size), np.float32)
    return Sights(zeros((rows, width, 3), np.int32), zeros((rows, width), np.int32) - 1, vectors)


def plain_sights(num_tokens: int, offset: int = 0) -> Sights:
    """Returns what no image is to a row of text."""
    numbers: Any = np.arange(num_tokens)[None] + offset
    parts, nothing = np.repeat(numbers[..., None], 3, -1), np.zeros((0, 0), np.float32)
    at: Any = np.full((1, num_tokens), -1)
    return Sights(parts, at, nothing)  # type: ignore[arg-type]


def longer_sights(sights: Sights | None, num_tokens: int, offset: int) -> Sights | None:
    """Returns what images are to a prompt and the text after it, `num_tokens` together."""
    if sights is None or (count := sights.at.shape[1]) == num_tokens:
        return sights
    more = plain_sights(num_tokens, offset)
    positions = np.concatenate([sights.positions, more.positions[:, count:]], axis=1)
    at = np.concatenate([sights.at, more.at[:, count:]], axis=1)
    return sights._replace(positions=positions, at=at)  # type: ignore[arg-type]


def put_sights(rows: Sights, seen: Sights, row: int, at: int, begin: int, end: int) -> None:
    """Puts what images are to tokens `begin` to `end` of a prompt into a row from column `at`."""
    into: Any = rows
    columns = slice(at, at + end - begin)
    into.positions[row, columns] = seen.positions[0, begin:end]
    wanted = np.asarray(seen.at[0, begin:end])
    columns_with = at + np.flatnonzero(wanted >= 0)
    places = row * rows.at.shape[1] + columns_with
    into.at[row, columns_with] = places
    if len(places):
        into.vectors[places] = np.asarray(seen.vectors)[wanted[wanted >= 0]]


def continuation_sizes(num_slots: int) -> list[tuple[int, int]]:
    """Returns the (rows, tokens) of programs that read what follows samples."""
    return list(dict.fromkeys((min(rows, num_slots), width) for rows, width in _CONTINUATIONS))


def continuation_size(length: int, count: int, num_slots: int) -> tuple[int, int]:
    """Returns (rows, tokens) of a program that reads so many tokens of so many samples.

    It reads a part of them where they are more.
    """
    sizes = continuation_sizes(num_slots)
    width = next((width for _, width in sizes if width >= length), sizes[-1][1])
    rows = [rows for rows, each in sizes if each == width]
    return max([rows[0], *(each for each in rows if each <= count)]), width


def continuation(
    pieces: Sequence[Sequence[int]],
    kept: Sequence[int],
    rows: int,
    width: int,
    table: np.ndarray,
    seen: Sequence[tuple[Sights | None, int]] = (),
    histories: Sequence[Sequence[int]] = (),
    history_tokens: int = 0,
) -> Continuation:
    """Returns tokens that follow `kept` ones of each, in so many rows of this width.

    `table` has the pages of each row; `seen` is what images are to the whole of each, and the
    offset of positions after them; `histories` are all tokens of each, where they are kept.
    """
    zeros: Any = np.zeros
    made = Continuation(
        zeros((rows, width), np.int32),
        zeros(rows, np.int32) + 1,
        zeros(rows, np.int32),
        zeros((rows, table.shape[1]), np.int32) + table,
        zeros((rows, history_tokens), np.int32),
    )
    for row, (piece, before) in enumerate(zip(pieces, kept, strict=True)):
        made.tokens[row, : len(piece)] = piece
        made.lengths[row], made.kept[row] = len(piece), before
    for row, tokens in enumerate(histories if history_tokens else ()):
        made.history[row, : len(tokens)] = tokens
    ends = [before + len(piece) for piece, before in zip(pieces, kept, strict=True)]
    with_images = [
        (sights, np.arange(before, end) + offset != sights.positions[0, before:end, 0])
        for (sights, offset), before, end in zip(seen, kept, ends, strict=False)
        if sights is not None
    ]
    # Behind the last image positions follow from the offset alone.
    if any(before_or_in.any() for _, before_or_in in with_images):
        found = no_sights(rows, width, with_images[0][0].vectors.shape[1])
        for row, ((sights, offset), before, end) in enumerate(zip(seen, kept, ends, strict=True)):
            put_sights(found, sights or plain_sights(end, offset), row, 0, before, end)
        made = dataclasses.replace(made, sights=found)
    return made


def writes(wanted: Sequence[tuple[int, int, int]], size: int, num_pages: int) -> Writes:
    """Returns (page, prompt of the prefix, offset) of `size` pages; unused ones are past the last.

    The offset is that of the page's first token in the prompt.
    """
    filled: Any = np.zeros((3, size), np.int32)
    filled[0] = num_pages
    if wanted:
        filled[:, : len(wanted)] = np.transpose(wanted)
    return Writes(*filled)


def _shared(lengths: Sequence[int], width: int) -> list[list[int]]:
    return pack(lengths, width) if _share(width) > 1 else [[i] for i in range(len(lengths))]


def _share(width: int) -> int:
    """Returns how many prompts fit in a row, on average."""
    return max(1, width // SMALLEST_WIDTH) if width <= prefill.PIECE_TOKENS else 1


def _shape(num_rows: int, longest: int, max_tokens: int, shapes: Sequence[Shape]) -> Shape:
    """Returns the first of `shapes` for the longest prompt, or one of at least so many rows."""
    width = _width(longest, max_tokens)
    return next(
        (each for each in shapes if each[1] >= longest), (_num_rows(num_rows, width), width)
    )


def _width(length: int, max_tokens: int) -> int:
    return bucket(length, smallest=SMALLEST_WIDTH, largest=max_tokens)


def _num_rows(count: int, width: int) -> int:
    return min(bucket(count), max(1, MOST_PROMPT_TOKENS // width))


def admission(
    entering: Sequence[tuple[int, int, np.ndarray, SamplingParams]],
    size: int,
    num_slots: int,
    offsets: Sequence[int] = (),
) -> Admission:
    """Returns the arrays of an insert of `size` samples; unused entries go to slot `num_slots`.

    Each sample is given as (index of its prompt in the prefix, slot, key, parameters); `offsets`
    are `Request.offset` of each, by default zero.
    """
    unused = (0, num_slots, np.zeros(2, np.uint32), SamplingParams(max_tokens=1))
    filled = [*entering, *[unused] * (size - len(entering))]
    prompts, slots, keys, params = zip(*filled, strict=True)

    array: Any = np.array  # the device takes it as it is

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
    )
    limits = column("max_tokens", np.int32)
    given = array(prompts, np.int32), array(slots, np.int32), limits, stops, sampler
    return Admission(*given, array([*offsets, *[0] * (size - len(offsets))], np.int32))
