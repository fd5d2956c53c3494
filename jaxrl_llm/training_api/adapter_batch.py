"""Passes of several policies over one base, each with adapters of its own, in one program.

Each policy has a block of the rows, and its factors stand beside those of the others (see
`layers.Linear`). Its numbers come from its own rows: in a batch of the same shape and in the same
block they are the same bit for bit, whatever the other blocks hold.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.learner.batches import Packer
from jaxrl_llm.packing import packed_batch, row_layout
from jaxrl_llm.packing.packed_batch import PackedBatch, PrefixPiece
from jaxrl_llm.training_api.loss_functions import Loss
from jaxrl_llm.training_api.policy_base import PolicyBase
from jaxrl_llm.training_api.training_data import (
    Datum,
    TrainingBatch,
    checked_fields,
    padded_arrays,
    padded_width,
)
from jaxrl_llm.training_api.training_session import PassResult, TrainingSession, pass_result

_MAX_PADDING = 2  # rows of the batch for each row that a policy would need alone


class BlockShape(NamedTuple):
    """The sizes of a policy's block. Powers of two, mostly: few programs are compiled."""

    num_sequences: int
    num_rows: int
    width: int  # tokens of a row

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width


@dataclasses.dataclass(frozen=True)
class BlockPlace:
    """Where a pass was computed: the same place gives the same numbers again, bit for bit."""

    num_blocks: int
    block: int
    shape: BlockShape

    def to_json(self) -> dict[str, Any]:
        return {"num_blocks": self.num_blocks, "block": self.block, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "BlockPlace":
        return cls(values["num_blocks"], values["block"], BlockShape(*values["shape"]))


@dataclasses.dataclass(frozen=True)
class SessionPass:
    """A pass of a session."""

    session: TrainingSession
    data: Sequence[Datum]
    loss: Loss
    settings: Mapping[str, float]


def can_batch(base: PolicyBase) -> bool:
    """Whether passes over a base can be batched.

    Not with experts, where a token's numbers depend on the others' in the last bits, and not where
    stages or shards of rows need layouts of their own.
    """
    shape, packer = base.models.policy.shape, base.models.packer
    return shape.experts is None and shape.stages == 1 and packer.length_shards == 1


def num_blocks(num_passes: int) -> int:
    """The blocks of a batch of some passes: the next power of two."""
    return packed_batch.bucket(num_passes)


def check_data(base: PolicyBase, data: Sequence[Datum]) -> list[str]:
    """The names of the fields of some data; raises TrainingDataError."""
    return checked_fields(
        data, base.models.policy.shape.vocab_size, base.config.max_sequence_tokens
    )


def block_shape(data: Sequence[Datum], packer: Packer) -> BlockShape:
    """The block that the data of a pass need alone."""
    width = padded_width(data, packer)
    num_rows = len(packed_batch.pack([len(datum.tokens) for datum in data], width))
    shards = packer.num_shards  # each has the same number of rows
    num_rows = -(-packed_batch.bucket(num_rows) // shards) * shards
    return BlockShape(packed_batch.bucket(len(data)), num_rows, width)


def common_shape(
    shapes: Sequence[BlockShape], max_blocks: int, packer: Packer
) -> tuple[int, BlockShape]:
    """How many of some passes, from the first on, share a batch; and the shape of their blocks.

    As many as fit into one microbatch, without more than half of a block being padding.
    """
    count, chosen = 0, shapes[0]
    for i, shape in enumerate(shapes[:max_blocks]):
        joint = BlockShape(*map(max, chosen, shape))
        smallest = min(each.num_tokens for each in shapes[: i + 1])
        total = num_blocks(i + 1) * joint.num_tokens
        is_wasteful = joint.num_tokens > _MAX_PADDING * smallest
        if is_wasteful or total > packer.max_tokens * packer.num_shards:
            break
        count, chosen = i + 1, joint
    return count, chosen


def forward_backward(passes: Sequence[SessionPass], shape: BlockShape) -> list[PassResult]:
    """`TrainingSession.forward_backward` of several sessions over one base, in one program.

    Args:
      passes: Of different sessions; with the same shapes of adapters, loss, and names of settings
        and fields.
      shape: Of each block, as from `common_shape`.

    Raises:
      TrainingDataError, LossError: If data or loss cannot be used; no gradient is added.
    """
    return _forward_backward(passes, range(len(passes)), num_blocks(len(passes)), shape)


def forward_backward_at(each: SessionPass, place: BlockPlace) -> PassResult:
    """A pass that was computed in a batch, again: with the same numbers, bit for bit."""
    return _forward_backward([each], [place.block], place.num_blocks, place.shape)[0]


def _forward_backward(
    passes: Sequence[SessionPass], blocks: Sequence[int], total: int, shape: BlockShape
) -> list[PassResult]:
    first = passes[0].session
    batch = make_block_batch(first.base, [each.data for each in passes], blocks, total, shape)
    for each in passes:
        each.loss.check(batch.fields, each.settings)
    by_block: list[SessionPass] = [passes[0]] * total  # empty blocks borrow the first's
    for each, block in zip(passes, blocks, strict=True):
        by_block[block] = each
    settings = {
        name: np.array([each.settings[name] for each in by_block], np.float32)
        for name in passes[0].settings
    }
    zeros = first.programs.shared_zero_gradients
    program = first.programs.batched_forward_backward(passes[0].loss)
    with jax.set_mesh(first.base.models.mesh):
        gradients, outputs = program(
            tuple(each.session.gradients or zeros for each in by_block),
            tuple(each.session.state.params for each in by_block),
            first.frozen,
            batch,
            settings,
        )
    losses, metrics, log_probs = jax.device_get(outputs)
    results = []
    for each, block in zip(passes, blocks, strict=True):
        each.session.gradients = gradients[block]
        own_metrics = {name: values[block] for name, values in metrics.items()}
        results.append(pass_result(each.data, (losses[block], own_metrics, log_probs[block])))
    return results


def make_block_batch(
    base: PolicyBase,
    data: Sequence[Sequence[Datum]],
    blocks: Sequence[int],
    total: int,
    shape: BlockShape,
) -> TrainingBatch:
    """The data of several passes as a batch of one microbatch, each in its block.

    Sequences [total * shape.num_sequences, shape.width] and rows [total * shape.num_rows,
    shape.width] are block after block.

    Raises:
      TrainingDataError: With the first datum that cannot be trained on, and why.
    """
    names, *_ = [check_data(base, each) for each in data]
    by_block: list[Sequence[Datum]] = [()] * total
    for each, block in zip(data, blocks, strict=True):
        by_block[block] = each
    padded = [padded_arrays(each, names, shape.num_sequences, shape.width) for each in by_block]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *padded)
    arrays: tuple[Any, Any, Any, Any, Any] = joined
    return TrainingBatch(*arrays, _pack_blocks(by_block, shape, arrays[2]))


def _pack_blocks(
    by_block: Sequence[Sequence[Datum]], shape: BlockShape, lengths: np.ndarray
) -> PackedBatch:
    rows: list[list[PrefixPiece]] = []
    for block, data in enumerate(by_block):
        first = block * shape.num_sequences
        packed = packed_batch.pack([len(datum.tokens) for datum in data], shape.width)
        pieces = [
            [PrefixPiece((first + i,), 0, int(lengths[first + i])) for i in row] for row in packed
        ]
        rows += pieces + [[]] * (shape.num_rows - len(pieces))
    count = len(lengths)
    every_token = np.ones((count, shape.width), bool)
    arrays: Any = row_layout.build_rows(
        [rows], (1, len(rows), shape.width), count, lengths, np.arange(count), every_token
    )
    microbatches = dataclasses.replace(  # no prefix is shared
        arrays, prefix_ids=arrays.prefix_ids[..., :0], key_blocks=arrays.key_blocks[..., :0, :0]
    )
    is_member: Any = lengths > 0
    return PackedBatch(microbatches, np.array(1, np.int32), is_member)  # type: ignore[arg-type]
