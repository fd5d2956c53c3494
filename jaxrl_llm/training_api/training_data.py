"""Sequences to train on, given by the caller, as the padded and packed arrays of one pass."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.errors import UserError
from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.packing import packed_batch
from jaxrl_llm.packing.packed_batch import PackedBatch

_SMALLEST_WIDTH = 32  # tokens of the narrowest row, so that few widths are compiled
_FLOAT32_MAX = float(np.finfo(np.float32).max)


class TrainingDataError(UserError, ValueError):
    """A sequence, or a number that belongs to one of its tokens, cannot be trained on."""


@dataclasses.dataclass(frozen=True)
class Datum:
    """A sequence and what its loss reads, a number for each token.

    Index t of every field is about `tokens[t]`. Nothing predicts the first token: it has no
    log-prob, and its numbers have no effect.
    """

    tokens: Sequence[int] | Int[np.ndarray, " T"]  # prompt and response, T of them
    # By name, [T] each: "weights", "advantages", "old_log_probs", or as a loss of yours names them.
    # "mask" has the tokens of the loss, by default all.
    fields: Mapping[str, Sequence[float] | Float[np.ndarray, " T"]] = dataclasses.field(
        default_factory=dict
    )
    # Tokens that are scored in the place of `tokens`, which the model still reads; (): `tokens`.
    targets: Sequence[int] | Int[np.ndarray, " T"] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """The data of one pass. Rows past the last datum are empty."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    mask: Bool[Array, "B T"]  # tokens of the loss
    fields: Mapping[str, Float[Array, "B T"]]
    packed: PackedBatch


def make_batch(
    data: Sequence[Datum], packer: Packer, vocab_size: int, max_tokens: int
) -> TrainingBatch:
    """Checks, pads and packs the data of one pass.

    Raises:
      TrainingDataError: With the first datum that cannot be trained on, and why.
    """
    names = checked_fields(data, vocab_size, max_tokens)
    # Few numbers of rows mean few compiled programs: empty rows fill up to a power of two.
    num_rows, width = packed_batch.bucket(len(data)), padded_width(data, packer)
    arrays: tuple[Any, Any, Any, Any, Any] = padded_arrays(data, names, num_rows, width)
    packed = packer.pack(arrays[2], np.arange(len(data)), width=width)
    return TrainingBatch(*arrays, packed)


def checked_fields(data: Sequence[Datum], vocab_size: int, max_tokens: int) -> list[str]:
    """The names of the fields that all data have, without the mask.

    Raises:
      TrainingDataError: With the first datum that cannot be trained on, and why.
    """
    if not data:
        raise TrainingDataError("data: empty; give at least one datum")
    names = [name for name in data[0].fields if name != "mask"]
    for i, datum in enumerate(data):
        _check(datum, f"data[{i}]", names, vocab_size, max_tokens)
    return names


def padded_width(data: Sequence[Datum], packer: Packer) -> int:
    """The tokens of a row for some data: one of few widths."""
    longest = max(len(datum.tokens) for datum in data)
    limit = packer.max_tokens * packer.length_shards
    return packed_batch.bucket(longest, smallest=_SMALLEST_WIDTH, largest=limit)


def padded_arrays(
    data: Sequence[Datum], names: Sequence[str], num_rows: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Tokens, targets, lengths, mask and fields of a `TrainingBatch` [num_rows, width].

    They are still on the host: the jitted program transfers them.
    """
    lengths = np.zeros(num_rows, np.int32)
    lengths[: len(data)] = [len(datum.tokens) for datum in data]
    tokens, targets = (np.zeros((num_rows, width), np.int32) for _ in range(2))
    mask = np.zeros((num_rows, width), bool)
    fields = {name: np.zeros((num_rows, width), np.float32) for name in names}
    for i, datum in enumerate(data):
        length = lengths[i]
        tokens[i, :length] = datum.tokens
        targets[i, :length] = datum.targets if len(datum.targets) else datum.tokens
        mask[i, 1:length] = np.asarray(datum.fields.get("mask", np.ones(length)))[1:] != 0
        for name in names:
            fields[name][i, :length] = datum.fields[name]
    return tokens, targets, lengths, mask, fields


def _check(
    datum: Datum, where: str, names: Sequence[str], vocab_size: int, max_tokens: int
) -> None:
    count = len(datum.tokens)
    if not 2 <= count <= max_tokens:
        raise TrainingDataError(
            f"{where}: {count} tokens; a sequence has 2 to {max_tokens}: the first predicts the"
            " second, and config.data.max_prompt_tokens + config.rollout.max_response_tokens is"
            " the limit"
        )
    for name, tokens in (("tokens", datum.tokens), ("targets", datum.targets)):
        ids = np.asarray(tokens)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TrainingDataError(f"{where}.{name}: expected a list of token ids")
        if unknown := ids[(ids < 0) | (ids >= vocab_size)].tolist():
            raise TrainingDataError(
                f"{where}.{name}: {unknown[0]} is not a token; the model has 0 to {vocab_size - 1}"
            )
    if len(datum.targets) not in (0, count):
        raise TrainingDataError(
            f"{where}.targets: {len(datum.targets)} for {count} tokens; give one for each"
        )
    if {*datum.fields} - {"mask"} != set(names):
        raise TrainingDataError(
            f"{where}: has the fields {', '.join(sorted(datum.fields)) or 'none'}, and data[0] has"
            f" {', '.join(sorted(names)) or 'none'}; give all data of a pass the same"
        )
    for name, values in datum.fields.items():
        numbers = np.asarray(values)
        if numbers.shape != (count,) or numbers.dtype.kind not in "fiub":
            raise TrainingDataError(
                f"{where}.fields[{name!r}]: expected {count} numbers, one for each token, got"
                f" {numbers.dtype} of shape {list(numbers.shape)}"
            )
        largest = float(np.max(np.abs(numbers.astype(np.float64))))
        if not (math.isfinite(largest) and largest <= _FLOAT32_MAX):
            raise TrainingDataError(f"{where}.fields[{name!r}]: holds {largest}, not a float32")
