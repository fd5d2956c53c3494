"""The row and position of every token in packed rows: host code, for a run and for its plan."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.data import packing
from jaxrl_llm.data.packing import Microbatch
from jaxrl_llm.models.attention import KEY_BLOCK, MOST_KEYS

Rows = Sequence[Sequence[packing.Piece]]


def filled(
    microbatches: Sequence[Rows],
    shape: tuple[int, int, int],
    most: int,
    lengths: Int[np.ndarray, " B"],
    chosen: Int[np.ndarray, " b"],
    asked: Bool[np.ndarray, "B T"],
) -> Microbatch:
    """Returns the rows of every microbatch, of `most` sequences, in arrays of `shape` (M, R, W).

    `scored` and `key_blocks` have all columns that a row can have. The members of pieces count
    through `chosen`. With `asked` [B, 0] no scored tokens are listed.
    """
    segment_ids = np.zeros(shape, np.int32)
    prefix_ids, positions, before = (np.zeros_like(segment_ids) for _ in range(3))
    wanted = np.zeros(shape if asked.size else (*shape[:2], 0), bool)
    blocks = 0 if shape[2] % KEY_BLOCK else shape[2] // KEY_BLOCK
    sees = np.zeros((*shape[:2], blocks, blocks), bool)
    sequences = np.full((shape[0], most), len(lengths), np.int32)
    rows, starts, beginnings, shared = (np.zeros_like(sequences) for _ in range(4))
    for g, batch in enumerate(microbatches):
        held = 0
        for r, row in enumerate(batch):
            end = 0
            for piece in row:
                begin, skip = end, piece.shared
                end += skip
                prefix = -1 - int(chosen[piece.members[0]])
                segment_ids[g, r, begin:end] = prefix_ids[g, r, begin:end] = prefix
                positions[g, r, begin:end] = np.arange(skip)
                beginning = _blocks(begin, end)
                sees[g, r, beginning, beginning] = True
                for sequence in chosen[list(piece.members)].tolist():
                    length = int(lengths[sequence])
                    start, end = end, end + length - skip
                    own = np.s_[g, r, start:end]
                    segment_ids[own] = sequence + 1
                    prefix_ids[own] = prefix if skip else sequence + 1
                    positions[own] = np.arange(skip, length)
                    before[own] = np.arange(start - 1, end - 1)
                    before[g, r, start] = max(begin + skip - 1, 0)
                    wanted[own] = asked[sequence, skip:length]
                    sees[g, r, _blocks(start, end), _blocks(start, end)] = True
                    sees[g, r, _blocks(start, end), beginning] = True
                    sequences[g, held], rows[g, held] = sequence, r
                    starts[g, held], beginnings[g, held] = start - skip, begin
                    shared[g, held] = skip
                    held += 1
    key_blocks, scored = _columns(sees & np.tri(blocks, dtype=bool)), _columns(wanted)
    before = np.take_along_axis(before, np.minimum(scored, shape[2] - 1), axis=-1)
    on_host: tuple[Any, ...] = (
        segment_ids, prefix_ids, key_blocks, positions, sequences, rows, starts, beginnings,
        shared, scored, before, np.zeros((*shape, 0), np.int16),
        np.zeros((*shape, 0), np.int32), np.zeros((*shape, 0), np.float32),
        np.zeros((*shape, 0), np.int32), np.zeros((*shape, 0), np.int32),
        np.zeros((shape[0], 0, 0), np.float32),
    )  # fmt: skip
    return Microbatch(*on_host)


def _blocks(start: int, end: int) -> slice:
    return slice(start // KEY_BLOCK, -(-end // KEY_BLOCK) if end > start else 0)


def rows(
    lengths: Int[np.ndarray, " b"],
    common: packing.Beginnings,
    width: int,
    scored: Int[np.ndarray, " b"] | None = None,
    most_scored: int = 0,
) -> tuple[list[packing.Piece], list[list[int]]]:
    """Returns pieces of sequences and the pieces of each row, as `packing.pack` takes `scored`."""
    if scored is None:
        scored = np.zeros(len(lengths), np.int64)
    pieces = packing.pieces(lengths, common, width, scored, most_scored)
    of_pieces = [int(scored[list(piece.members)].sum()) for piece in pieces]
    return pieces, packing.pack([piece.length for piece in pieces], width, of_pieces, most_scored)


def with_room(width: int, most_seen: int) -> int:
    """Returns blocks of keys, one more than seen: later steps may see more."""
    return most_seen + (keys_compared(width, most_seen + 1) < width)


def keys_compared(width: int, most_seen: int) -> int:
    """Returns how many keys a query is compared with: those of its blocks, or of the whole row."""
    keys = most_seen * KEY_BLOCK
    return keys if 0 < keys < width and keys <= MOST_KEYS else width


def _in_rows(lengths: Int[np.ndarray, " b"], common: packing.Beginnings, width: int):
    """Returns `rows` of these sequences, and `keys_compared` there."""
    pieces, packed = rows(lengths, common, width)
    one = [[[pieces[p] for p in row] for row in packed]]
    asked = np.zeros((len(lengths), 0), bool)
    shape = 1, len(packed), width
    found = filled(one, shape, len(lengths), lengths, np.arange(len(lengths)), asked)
    return pieces, packed, keys_compared(width, most_listed(np.asarray(found.key_blocks)))


def best_width(
    lengths: Int[np.ndarray, " b"],
    common: packing.Beginnings,
    width: int,  # of rows in which nothing is shared
    max_tokens: int,  # of a microbatch on a device
    num_shards: int,  # devices that rows are split over
    parity: int,  # keys of a query that cost as much as the rest of the network
) -> int:
    """Returns the tokens of rows in which beginnings are shared; 0 if that is not faster."""

    def cost(needed: int, width: int, keys: int) -> float:  # in tokens that attend to nothing
        count = -(-needed // (max_tokens // width * num_shards))
        even = -(-needed // (count * num_shards)) * num_shards
        return count * even * width * (1 + keys / parity)

    # Halves of the plain width, up to rows that hold whole groups.
    longest = max(piece.length for piece in packing.pieces(lengths, common, max_tokens))
    costs = {}
    for halves in range(2, 2 * max_tokens // width + 1):
        wide = width * halves // 2
        _, packed, keys = _in_rows(lengths, common, wide)
        costs[wide] = cost(len(packed), wide, keys)
        if wide >= longest:
            break
    best = min(costs, key=costs.__getitem__)
    alone = cost(len(packing.pack(lengths, width)), width, width)
    return best if costs[best] < alone else 0


def fewest_tokens(platform: str, num_shards: int) -> int:
    """Returns the tokens on a device below which a microbatch is slow."""
    return 512 if (platform, num_shards) == ("cpu", 1) else 3072


def thin(needed: int, even: int, num_shards: int, fewest: int) -> int:
    """Returns the rows of a microbatch: so few that one with empty rows wastes little of a step.

    That is a sixteenth of the rows needed by a minibatch, but at least `fewest` on each shard
    (fewer are slow) and at most `even`, the rows of the fewest microbatches that fit.
    """
    rows = max(needed // 16, max(fewest, 1) * num_shards)
    return min(even, -(-rows // num_shards) * num_shards)


@dataclasses.dataclass(frozen=True)
class RowsShape:
    """The rows of a microbatch on one device."""

    rows: float  # a fraction where an estimate is of shorter sequences
    width: int  # tokens of each
    keys: int  # that each query is compared with
    gathered: int  # copies of each key, one for each block of queries; 0: none
    scored: int  # tokens of a row that the head looks at
    count: int  # microbatches


@functools.lru_cache(maxsize=1024)
def longest(
    num_sequences: int,
    samples: int,  # of one prompt
    prompt: int,
    response: int,
    max_tokens: int,  # of a microbatch on a device
    num_shards: int,
    parity: int,  # as in `best_width`; 0: nothing is shared
    fewest_tokens: int,  # on a device; a microbatch with fewer is slow
    stages: int = 1,  # that want a microbatch each
) -> RowsShape:
    """Returns the rows of `num_sequences` sequences that all are as long as a run allows."""
    width = prompt + response
    lengths = np.full(num_sequences, width)
    groups = np.arange(num_sequences) // samples
    common = packing.Beginnings(groups, np.full(num_sequences, prompt))
    keys, needed, scored = width, num_sequences, response
    share = parity and samples > 1
    if wide := best_width(lengths, common, width, max_tokens, num_shards, parity) if share else 0:
        pieces, packed, keys = _in_rows(lengths, common, wide)
        keys = with_room(wide, keys // KEY_BLOCK) * KEY_BLOCK if keys < wide else keys
        needed, width = len(packed), wide
        scored = response * max(sum(len(pieces[p].members) for p in row) for row in packed)
    here, room = -(-needed // num_shards), max(1, max_tokens // width)
    room = min(room, max(1, needed // (stages * num_shards))) if stages > 1 else room
    in_one = here
    if here > room:
        even = -(-here // -(-here // room))
        in_one = thin(needed, even * num_shards, num_shards, fewest_tokens // width) // num_shards
    gathered = keys // KEY_BLOCK if keys < width else 0
    scored = -(-width * min(8, -(-scored * 8 // width)) // 8)
    return RowsShape(in_one, width, keys, gathered, scored, -(-here // in_one))


def _columns(wanted: Bool[np.ndarray, "... W"]) -> Int[np.ndarray, "... W"]:
    """Returns the wanted columns of each row in order; W fills the rest."""
    width = wanted.shape[-1]
    return np.sort(np.where(wanted, np.arange(width, dtype=np.int32), np.int32(width)), axis=-1)


def most_listed(columns: Int[np.ndarray, "... W"]) -> int:
    """Returns the most columns that `filled` lists for a row."""
    return int((columns < columns.shape[-1]).sum(-1).max(initial=0))
