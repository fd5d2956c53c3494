"""Where every token of a plan stands: sequences cut into pieces, pieces in rows.

Host code over lengths; `batches` makes plans of it.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.data import packing
from jaxrl_llm.models.attention import KEY_BLOCK, MOST_KEYS

Rows = Sequence[Sequence[packing.Piece]]


@dataclasses.dataclass(frozen=True)
class Filled:
    """Rows with every token in its place; fields of the same name are those of `Microbatch`."""

    segment_ids: Int[np.ndarray, "M R W"]
    prefix_ids: Int[np.ndarray, "M R W"]
    positions: Int[np.ndarray, "M R W"]
    sequences: Int[np.ndarray, "M b"]
    rows: Int[np.ndarray, "M b"]
    starts: Int[np.ndarray, "M b"]
    beginnings: Int[np.ndarray, "M b"]
    shared: Int[np.ndarray, "M b"]
    asked: Bool[np.ndarray, "M R W"]  # tokens whose log-probs are wanted
    before: Int[np.ndarray, "M R W"]  # where the token before each stands
    sees: Bool[np.ndarray, "M R Q Q"]  # blocks of keys that hold what a block of queries sees

    def most_seen(self) -> int:
        """Returns the most blocks of keys that a block of queries sees; 0 of uneven rows."""
        return int(self.sees.sum(-1).max(initial=0))


def filled(
    microbatches: Sequence[Rows],
    shape: tuple[int, int, int],
    most: int,
    lengths: Int[np.ndarray, " B"],
    chosen: Int[np.ndarray, " b"],
    asked: Bool[np.ndarray, "B T"],
) -> Filled:
    """Returns the rows of every microbatch.

    Args:
      microbatches: The pieces in every row of each.
      shape: (M, R, W).
      most: Sequences that a microbatch has places for.
      lengths: Tokens of every sequence of the step.
      chosen: The sequences that pieces are of.
      asked: Tokens whose log-probs are wanted.
    """
    segment_ids = np.zeros(shape, np.int32)
    prefix_ids, positions, before = (np.zeros_like(segment_ids) for _ in range(3))
    wanted = np.zeros(shape, bool)
    blocks = 0 if shape[2] % KEY_BLOCK else shape[2] // KEY_BLOCK
    sees = np.zeros((*shape[:2], blocks, blocks), bool)
    sequences = np.full((shape[0], most), len(lengths), np.int32)
    rows, starts, beginnings, shared = (np.zeros_like(sequences) for _ in range(4))
    for g, batch in enumerate(microbatches):
        place = 0
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
                    sequences[g, place], rows[g, place] = sequence, r
                    starts[g, place], beginnings[g, place] = start - skip, begin
                    shared[g, place] = skip
                    place += 1
    return Filled(
        segment_ids=segment_ids,
        prefix_ids=prefix_ids,
        positions=positions,
        sequences=sequences,
        rows=rows,
        starts=starts,
        beginnings=beginnings,
        shared=shared,
        asked=wanted,
        before=before,
        sees=sees & np.tri(blocks, dtype=bool),
    )


def _blocks(start: int, end: int) -> slice:
    """Returns the blocks that hold the tokens from `start` up to `end`."""
    return slice(start // KEY_BLOCK, -(-end // KEY_BLOCK) if end > start else 0)


def rows(
    lengths: Int[np.ndarray, " b"],
    common: packing.Beginnings,
    width: int,
    scored: Int[np.ndarray, " b"] | None = None,
    most_scored: int = 0,
) -> tuple[list[packing.Piece], list[list[int]]]:
    """Returns pieces of sequences and the pieces of each row.

    Args:
      lengths: Tokens of each sequence.
      common: What they begin with alike.
      width: Tokens of a row.
      scored: Of each sequence's tokens; None: no limit for them.
      most_scored: In a row.
    """
    if scored is None:
        scored = np.zeros(len(lengths), np.int64)
    pieces = packing.pieces(lengths, common, width, scored, most_scored)
    of_pieces = [int(scored[list(piece.members)].sum()) for piece in pieces]
    return pieces, packing.pack([piece.length for piece in pieces], width, of_pieces, most_scored)


def keys_compared(width: int, most_seen: int) -> int:
    """Returns how many keys a query is compared with: those of its blocks, or of the whole row."""
    keys = most_seen * KEY_BLOCK
    return keys if 0 < keys < width and keys <= MOST_KEYS else width


def keys_in_rows(lengths: Int[np.ndarray, " b"], common: packing.Beginnings, width: int) -> int:
    """Returns `keys_compared` of these sequences in rows of a width."""
    pieces, packed = rows(lengths, common, width)
    one = [[[pieces[p] for p in row] for row in packed]]
    asked = np.zeros((len(lengths), width), bool)
    shape = 1, len(packed), width
    found = filled(one, shape, len(lengths), lengths, np.arange(len(lengths)), asked)
    return keys_compared(width, found.most_seen())


def widths(
    lengths: Int[np.ndarray, " b"], common: packing.Beginnings, width: int, most: int
) -> Iterator[int]:
    """Yields the widths of row that may pay: halves of the plain width, up to whole groups."""
    longest = max(piece.length for piece in packing.pieces(lengths, common, most))
    for halves in range(2, 2 * most // width + 1):
        yield width * halves // 2
        if width * halves // 2 >= longest:
            return


def places(wanted: Bool[np.ndarray, "M R W"], count: int) -> Int[np.ndarray, "M R K"]:
    """Returns the positions that are wanted in each row, the first `count`; W fills the rest."""
    width = wanted.shape[-1]
    places = np.where(wanted, np.arange(width, dtype=np.int32), np.int32(width))
    return np.sort(places, axis=-1)[..., :count]
