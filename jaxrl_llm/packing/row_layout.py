"""The row and column of every token in packed rows: host code, for a run and for its plan."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jaxrl_llm.models.attention import KEY_BLOCK, MAX_BLOCK_KEYS
from jaxrl_llm.packing import packed_batch
from jaxrl_llm.packing.packed_batch import Microbatch

MicrobatchRows = Sequence[Sequence[packed_batch.PrefixPiece]]


def build_rows(
    microbatches: Sequence[MicrobatchRows],
    shape: tuple[int, int, int],
    num_slots: int,
    lengths: Int[np.ndarray, " B"],
    chosen: Int[np.ndarray, " b"],
    scored_mask: Bool[np.ndarray, "B T"],
) -> Microbatch:
    """The arrays of packed microbatches, of `shape` (M, R, W), each with `num_slots` sequences.

    `scored_tokens` and `key_blocks` have all columns that a row can have. The members of pieces are
    indices into `chosen`. With `scored_mask` [B, 0] no scored tokens are listed.
    """
    segment_ids = np.zeros(shape, np.int32)
    prefix_ids, positions, before = (np.zeros_like(segment_ids) for _ in range(3))
    is_scored = np.zeros(shape if scored_mask.size else (*shape[:2], 0), bool)
    blocks = 0 if shape[2] % KEY_BLOCK else shape[2] // KEY_BLOCK
    sees = np.zeros((*shape[:2], blocks, blocks), bool)
    sequences = np.full((shape[0], num_slots), len(lengths), np.int32)
    rows, starts, beginnings, shared = (np.zeros_like(sequences) for _ in range(4))
    # A row is a list of pieces; a piece is the shared prefix, once, then the own tokens of its
    # members. Two samples of prompt PPP, AAA and BB, and a lone sequence CCCC (0 is padding):
    #   tokens       P  P  P  A  A  A  B  B  C  C  C  C
    #   segment_ids -1 -1 -1  1  1  1  2  2  3  3  3  3  0    a prefix: minus its first member's id
    #   prefix_ids  -1 -1 -1 -1 -1 -1 -1 -1  3  3  3  3  0    the segment attended to before its own
    #   positions    0  1  2  3  4  5  3  4  0  1  2  3  0    in the sequence, not in the row
    for m, batch in enumerate(microbatches):
        slot = 0
        for r, row in enumerate(batch):
            end = 0
            for piece in row:
                begin, prefix_length = end, piece.prefix_length
                end += prefix_length
                prefix_id = -1 - int(chosen[piece.members[0]])
                segment_ids[m, r, begin:end] = prefix_ids[m, r, begin:end] = prefix_id
                positions[m, r, begin:end] = np.arange(prefix_length)
                prefix_blocks = _blocks(begin, end)
                sees[m, r, prefix_blocks, prefix_blocks] = True
                for sequence in chosen[list(piece.members)].tolist():
                    length = int(lengths[sequence])
                    start, end = end, end + length - prefix_length
                    own = np.s_[m, r, start:end]
                    segment_ids[own] = sequence + 1
                    prefix_ids[own] = prefix_id if prefix_length else sequence + 1
                    positions[own] = np.arange(prefix_length, length)
                    # The logits of a token stand at its predecessor: one column to the left, but
                    # for the first own token of every member at the end of the shared prefix.
                    before[own] = np.arange(start - 1, end - 1)
                    before[m, r, start] = max(begin + prefix_length - 1, 0)
                    is_scored[own] = scored_mask[sequence, prefix_length:length]
                    sees[m, r, _blocks(start, end), _blocks(start, end)] = True
                    sees[m, r, _blocks(start, end), prefix_blocks] = True
                    sequences[m, slot], rows[m, slot] = sequence, r
                    # The column of token 0 as if the prefix stood before the own tokens: then
                    # `starts + position` is the column of every own token.
                    starts[m, slot], beginnings[m, slot] = start - prefix_length, begin
                    shared[m, slot] = prefix_length
                    slot += 1
    key_blocks, scored = _true_columns(sees & np.tri(blocks, dtype=bool)), _true_columns(is_scored)
    before = np.take_along_axis(before, np.minimum(scored, shape[2] - 1), axis=-1)
    on_host: tuple[Any, ...] = (
        segment_ids, prefix_ids, key_blocks, positions, sequences, rows, starts, beginnings,
        shared, scored, before, np.zeros((*shape, 0), np.int16),
        np.zeros((*shape, 0), np.int32),
        np.zeros((*shape, 0), np.int32), np.zeros((*shape, 0), np.float32),
        np.zeros((*shape, 0), np.int32), np.zeros((*shape, 0), np.int32),
        np.zeros((shape[0], 0, 0), np.float32),
    )  # fmt: skip
    return Microbatch(*on_host)


def _blocks(start: int, end: int) -> slice:
    """The blocks of `KEY_BLOCK` columns that contain columns `start` to `end`; none if empty."""
    return slice(start // KEY_BLOCK, -(-end // KEY_BLOCK) if end > start else 0)


def pack_pieces(
    lengths: Int[np.ndarray, " b"],
    common: packed_batch.SharedPrefixes,
    width: int,
    scored: Int[np.ndarray, " b"] | None = None,
    max_scored: int = 0,
) -> tuple[list[packed_batch.PrefixPiece], list[list[int]]]:
    """Sequences as pieces, and the pieces of each row.

    `scored_tokens` counts the scored tokens of each sequence; a row has at most `max_scored`.
    """
    if scored is None:
        scored = np.zeros(len(lengths), np.int64)
    pieces = packed_batch.prefix_pieces(lengths, common, width, scored, max_scored)
    piece_scored = [int(scored[list(piece.members)].sum()) for piece in pieces]
    return pieces, packed_batch.pack(
        [piece.length for piece in pieces], width, piece_scored, max_scored
    )


def with_slack(width: int, num_blocks: int) -> int:
    """Blocks of keys: one more than needed so far, for later steps, if still less than the row."""
    return num_blocks + (keys_per_query(width, num_blocks + 1) < width)


def keys_per_query(width: int, num_blocks: int) -> int:
    """The number of keys that a query is compared with: its blocks of keys, or the whole row."""
    keys = num_blocks * KEY_BLOCK
    return keys if 0 < keys < width and keys <= MAX_BLOCK_KEYS else width


def _packed_rows(lengths: Int[np.ndarray, " b"], common: packed_batch.SharedPrefixes, width: int):
    """Pieces and rows, as `pack_pieces` returns them, and the keys that each query is compared
    with.
    """
    pieces, packed = pack_pieces(lengths, common, width)
    batches = [[[pieces[p] for p in row] for row in packed]]
    unscored = np.zeros((len(lengths), 0), bool)
    shape = 1, len(packed), width
    arrays = build_rows(batches, shape, len(lengths), lengths, np.arange(len(lengths)), unscored)
    return pieces, packed, keys_per_query(width, max_listed_columns(np.asarray(arrays.key_blocks)))


def best_row_width(
    lengths: Int[np.ndarray, " b"],
    common: packed_batch.SharedPrefixes,
    width: int,  # of rows in which nothing is shared
    max_tokens: int,  # of a microbatch on a device
    num_shards: int,  # devices that rows are split over
    parity: int,  # keys of a query that cost as much as the rest of the network
) -> int:
    """The cheapest width of rows in which prefixes are shared; 0 if that is not faster."""

    # A wider row holds more samples of a prompt, so the prefix is computed fewer times; but each
    # query is compared with more keys, and rows are rounded up to full microbatches. This cost
    # weighs all three; its unit is one token without attention.
    def cost(needed: int, width: int, keys: int) -> float:
        count = -(-needed // (max_tokens // width * num_shards))
        even = -(-needed // (count * num_shards)) * num_shards
        return count * even * width * (1 + keys / parity)

    # Multiples of half the plain width, up to rows that hold whole groups.
    longest = max(piece.length for piece in packed_batch.prefix_pieces(lengths, common, max_tokens))
    costs = {}
    for halves in range(2, 2 * max_tokens // width + 1):
        wide = width * halves // 2
        _, packed, keys = _packed_rows(lengths, common, wide)
        costs[wide] = cost(len(packed), wide, keys)
        if wide >= longest:
            break
    best = min(costs, key=costs.__getitem__)
    unshared_cost = cost(len(packed_batch.pack(lengths, width)), width, width)
    return best if costs[best] < unshared_cost else 0


def min_efficient_tokens(platform: str, num_shards: int) -> int:
    """The tokens on a device below which a microbatch is slow."""
    return 512 if (platform, num_shards) == ("cpu", 1) else 3072


def rows_per_microbatch(needed: int, even: int, num_shards: int, fewest: int) -> int:
    """The rows of each of several microbatches: few, so that padding rows waste little of a step.

    A sixteenth of the rows that a minibatch needs, but at least `fewest` on each shard (fewer are
    slow) and at most `even`, the rows of the fewest microbatches that fit.
    """
    rows = max(needed // 16, max(fewest, 1) * num_shards)
    return min(even, -(-rows // num_shards) * num_shards)


@dataclasses.dataclass(frozen=True)
class RowsShape:
    """The rows of a microbatch on one device."""

    rows: float  # a fraction in an estimate for shorter sequences
    width: int  # tokens of each
    keys: int  # that each query is compared with
    key_copies: int  # copies of each key, one for each block of queries; 0: none
    scored_tokens: int  # columns of a row that the head computes
    num_microbatches: int  # microbatches


@functools.lru_cache(maxsize=1024)
def worst_case_rows(
    num_sequences: int,
    samples: int,  # of one prompt
    prompt: int,
    response: int,
    max_tokens: int,  # of a microbatch on a device
    num_shards: int,
    parity: int,  # as in `best_row_width`; 0: nothing is shared
    fewest_tokens: int,  # on a device; a microbatch with fewer is slow
    stages: int = 1,  # of the pipeline, which needs a microbatch for each
) -> RowsShape:
    """The rows of `num_sequences` sequences that are all as long as the run allows."""
    width = prompt + response
    lengths = np.full(num_sequences, width)
    groups = np.arange(num_sequences) // samples
    common = packed_batch.SharedPrefixes(groups, np.full(num_sequences, prompt))
    keys, needed, scored = width, num_sequences, response
    share = parity and samples > 1
    if (
        wide := best_row_width(lengths, common, width, max_tokens, num_shards, parity)
        if share
        else 0
    ):
        pieces, packed, keys = _packed_rows(lengths, common, wide)
        keys = with_slack(wide, keys // KEY_BLOCK) * KEY_BLOCK if keys < wide else keys
        needed, width = len(packed), wide
        scored = response * max(sum(len(pieces[p].members) for p in row) for row in packed)
    local_rows, max_rows = -(-needed // num_shards), max(1, max_tokens // width)
    max_rows = min(max_rows, max(1, needed // (stages * num_shards))) if stages > 1 else max_rows
    rows_in_one = local_rows
    if local_rows > max_rows:
        even = -(-local_rows // -(-local_rows // max_rows))
        rows_in_one = rows_per_microbatch(
            needed, even * num_shards, num_shards, fewest_tokens // width
        )
        rows_in_one //= num_shards
    gathered = keys // KEY_BLOCK if keys < width else 0
    scored = -(-width * min(8, -(-scored * 8 // width)) // 8)
    return RowsShape(rows_in_one, width, keys, gathered, scored, -(-local_rows // rows_in_one))


def _true_columns(mask: Bool[np.ndarray, "... W"]) -> Int[np.ndarray, "... W"]:
    """The columns of each row where `mask` is true, in order; W fills the rest."""
    width = mask.shape[-1]
    return np.sort(np.where(mask, np.arange(width, dtype=np.int32), np.int32(width)), axis=-1)


def max_listed_columns(columns: Int[np.ndarray, "... W"]) -> int:
    """The most columns that `build_rows` lists for a row."""
    return int((columns < columns.shape[-1]).sum(-1).max(initial=0))
