"""Communication between pipeline stages, and the buffers of microbatches on each stage.

All functions run on local arrays under `shard_map`: no collective is left to the compiler's choice.
Arrays of all stages have a leading dim of stages, and buffers a dim of slots behind it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models import mixed_precision
from jaxrl_llm.sharding.mesh import STAGE

Params = dict[str, Any]


class ScheduleItem(NamedTuple):
    """One microbatch in one round, for each stage: the unit of the pipeline schedule."""

    valid: Bool[Array, "*stages"]  # False: the stage is idle
    round: Int[Array, "*stages"]
    microbatch: Int[Array, "*stages"]

    @classmethod
    def from_number(
        cls, number: Int[Array, "*stages"], count: Int[Array, ""], rounds: int
    ) -> "ScheduleItem":
        """The items with these numbers in the schedule, at `count` microbatches a round."""
        inside = jnp.clip(number, 0, rounds * count - 1)
        return cls(number == inside, inside // count, inside % count)

    def only_in_round(self, round: int) -> "ScheduleItem":
        """These items, valid in one round only."""
        return self._replace(valid=self.valid & (self.round == round))


@dataclasses.dataclass(frozen=True)
class StageTransfers:
    """Transfers and buffers of hidden states of one shape.

    Microbatches wait for the first stage, and results wait after the last one, in arrays
    [M / S, S, R, W, D] that are split over stages: microbatch m is in row m // S, on stage m % S,
    so that every device stores as many.
    """

    stages: int
    rounds: int
    microbatches_per_stage: int  # microbatches stored on each stage: M / S
    row_spec: P  # how the hidden states [R, W, D] of a microbatch are split

    @property
    def max_microbatches(self) -> int:
        """The number of microbatches that the arrays have room for."""
        return self.microbatches_per_stage * self.stages

    def slot_index(self, item: ScheduleItem) -> Int[Array, " stages"]:
        """The slots of items in buffers with a slot for every item."""
        return item.round * self.max_microbatches + item.microbatch

    def empty_buffer(self, slots: int, like: Float[Array, "per_stage stages R W D"]) -> Array:
        """An empty buffer of hidden states, [stages, slots, R, W, D]."""
        blank = jnp.zeros((self.stages, slots, *like.shape[2:]), like.dtype)
        return lax.with_sharding_constraint(blank, self._spec(blank))

    def rotate_partial_row(self, queue: Array, count: Int[Array, ""], direction: int) -> Array:
        """Rotates the last row of a queue over the stages, if `count` does not fill it.

        A row of S microbatches is moved by one stage for each of them that enters or leaves, so a
        full row is back in place afterwards. A partial row makes too few of the S moves, and its
        microbatches would end on the wrong stages: this makes the missing ones.
        """
        missing, row = -count % self.stages, (count - 1) // self.stages

        def local(queue: Array, row: Array, missing: Array) -> Array:
            microbatches = lax.dynamic_index_in_dim(queue, row, keepdims=False)
            hop = lambda _, microbatches: self._shift_stage(microbatches, direction)  # noqa: E731
            microbatches = lax.fori_loop(0, missing, hop, microbatches)
            return lax.dynamic_update_index_in_dim(queue, microbatches, row, 0)

        spec = P(None, STAGE, *self.row_spec)
        return _shard_map(local, (spec, P(), P()), spec)(queue, row, missing)

    def inject(
        self,
        buffer: Array,
        queue: Array,
        slot: Int[Array, " stages"],
        item: ScheduleItem,
        stage: int,
        direction: int,
    ) -> tuple[Array, Array]:
        """Injects the next microbatch of a queue into a slot of one stage's buffer.

        `item` is that of the stage in this step; where it is not valid nothing changes. Returns the
        buffer and the queue.
        """

        # Only `stage` can take from the queue, and its own shard has one microbatch of each row; to
        # fetch one from stage m % S would need a different collective each step. So the row moves
        # on by one stage with every microbatch that is taken, and the next one is always local.
        # `rotate_partial_row` ends these moves for a partial row.
        def local(
            buffer: Array, queue: Array, slot: Array, item: ScheduleItem
        ) -> tuple[Array, Array]:
            row = item.microbatch // self.stages
            microbatch = lax.dynamic_index_in_dim(queue, row, keepdims=False)
            injects = item.valid & (lax.axis_index(STAGE) == stage)
            before = lax.dynamic_index_in_dim(buffer[0], slot[0], keepdims=False)
            value = jnp.where(injects, microbatch[0], before)
            buffer = lax.dynamic_update_index_in_dim(buffer, value[None], slot[0], 1)
            microbatch = self._shifted_if(item.valid, microbatch, direction)
            return buffer, lax.dynamic_update_index_in_dim(queue, microbatch, row, 0)

        specs = self._spec(buffer), P(None, STAGE, *self.row_spec)
        return _shard_map(local, (*specs, P(STAGE), P()), specs)(buffer, queue, slot, item)

    def drain(
        self,
        queue: Array,
        values: Float[Array, "stages R W D"],
        item: ScheduleItem,
        stage: int,
        direction: int,
    ) -> Array:
        """Drains the value of one stage, which belongs to `item`, into a queue, if that is valid.

        The inverse of `inject`: the row moves on by one stage first, so that each microbatch m
        ends on stage m % S once its row is full.
        """

        def local(queue: Array, values: Array, item: ScheduleItem) -> Array:
            row = item.microbatch // self.stages
            microbatch = lax.dynamic_index_in_dim(queue, row, keepdims=False)
            microbatch = self._shifted_if(item.valid, microbatch, direction)
            drains = item.valid & (lax.axis_index(STAGE) == stage)
            microbatch = jnp.where(drains, values, microbatch)
            return lax.dynamic_update_index_in_dim(queue, microbatch, row, 0)

        spec = P(None, STAGE, *self.row_spec)
        return _shard_map(local, (spec, P(STAGE, *self.row_spec), P()), spec)(queue, values, item)

    def _shift_stage(self, value: Array, onward: int) -> Array:
        """The value of the previous stage (`direction` 1) or of the next one (-1), on a ring."""
        ring = [(stage, (stage + onward) % self.stages) for stage in range(self.stages)]
        return lax.ppermute(value, STAGE, ring)

    def _shifted_if(self, condition: Bool[Array, ""], value: Array, onward: int) -> Array:
        """`_shift_stage` where the condition holds (the same on all stages), else the value."""
        shift = lambda v: self._shift_stage(v, onward)  # noqa: E731
        # XLA on CPU runs a collective inside a `cond` concurrently with others, in an order that
        # differs between devices: they wait for each other and the program hangs. So there the
        # exchange runs always; between devices of one host its bytes cost nothing.
        select = lambda condition, v: jnp.where(condition, shift(v), v)  # noqa: E731
        branch = lambda condition, v: lax.cond(condition, shift, lambda v: v, v)  # noqa: E731
        return lax.platform_dependent(condition, value, cpu=select, default=branch)

    def read_slots(self, buffers: Any, slot: Int[Array, " stages"]) -> Any:
        """Each stage's entry of a tree of buffers, at its own slot: [stages, ...]."""
        specs = jax.tree.map(self._spec, buffers)

        def local(buffers: Any, slot: Array) -> Any:
            return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a[0], slot[0]), buffers)

        out_specs = jax.tree.map(_entry_spec, specs)
        return _shard_map(local, (specs, P(STAGE)), out_specs)(buffers, slot)

    def write_slots(
        self,
        buffers: Any,
        values: Any,  # [stages, ...]
        slot: Int[Array, " stages"],
        valid: Bool[Array, " stages"],
        direction: int = 0,
    ) -> Any:
        """Writes each stage's value into its slot of a tree of buffers, where it is valid.

        With `direction` 1 a stage receives the value of the previous stage, with -1 of the next
        one; `slot` and `valid` are those of the receiver.
        """
        specs = jax.tree.map(self._spec, buffers)

        def local(buffers: Any, values: Any, slot: Array, valid: Array) -> Any:
            def write(a: Array, value: Array) -> Array:
                value = self._shift_stage(value, direction) if direction else value
                before = lax.dynamic_index_in_dim(a[0], slot[0], keepdims=False)
                value = jnp.where(valid[0], value[0].astype(a.dtype), before)
                return lax.dynamic_update_index_in_dim(a, value[None], slot[0], 1)

            return jax.tree.map(write, buffers, values)

        entry_specs = jax.tree.map(_entry_spec, specs), P(STAGE), P(STAGE)
        return _shard_map(local, (specs, *entry_specs), specs)(buffers, values, slot, valid)

    def _spec(self, buffer: Array) -> P:
        if buffer.ndim == 5:  # hidden states
            return P(STAGE, None, *self.row_spec)
        if buffer.ndim == 6:  # router outputs by layer: the experts that tokens visited
            return P(STAGE, None, None, *self.row_spec[:2], None)
        return P(STAGE, *(None,) * (buffer.ndim - 1))

    def round_weights(
        self, layers: Params, specs: Params, rounds: Int[Array, " stages"], compute_dtype: str
    ) -> Params:
        """The weights of each stage in its round, [stages, n, ...], cast to the compute dtype.

        `layers` are [L, ...] of all stages and rounds, split as `specs`.
        """

        def local(layers: Params, rounds: Array) -> Params:
            def weights(path: Any, a: Array) -> Array:
                size = a.shape[0] // self.rounds
                part = lax.dynamic_slice_in_dim(a, rounds[0] * size, size)
                return mixed_precision.cast_stage_weight(path, part, rounds[0], compute_dtype)[None]

            return jax.tree.map_with_path(weights, layers)

        out_specs = jax.tree.map(_round_spec, specs)
        return _shard_map(local, (specs, P(STAGE)), out_specs)(layers, rounds)

    def accumulate_gradients(
        self,
        sums: Sequence[Array],
        gradients: Sequence[Array],
        specs: Sequence[P],
        rounds: Int[Array, " stages"],
    ) -> list[Array]:
        """Accumulates the gradients of each stage's layers in its round.

        `sums` are [L, ...], split as `specs`; `gradients` [stages, n, ...].
        """

        def local(sums: list[Array], gradients: list[Array], rounds: Array) -> list[Array]:
            def add(a: Array, b: Array) -> Array:
                start = rounds[0] * b.shape[1]
                total = lax.dynamic_slice_in_dim(a, start, b.shape[1]) + b[0].astype(a.dtype)
                return lax.dynamic_update_slice_in_dim(a, total, start, 0)

            return [add(a, b) for a, b in zip(sums, gradients, strict=True)]

        sum_specs, gradient_specs = list(specs), list(map(_round_spec, specs))
        return _shard_map(local, (sum_specs, gradient_specs, P(STAGE)), sum_specs)(
            list(sums), list(gradients), rounds
        )


def _shard_map(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` without its check of replicated results."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _entry_spec(spec: P) -> P:
    """The spec of one entry of a buffer."""
    return P(spec[0], *spec[2:])


def _round_spec(spec: P) -> P:
    """The spec of one round's layers, [stages, n, ...], from that of all layers, [L, ...]."""
    return P(spec[0], None, *spec[1:])
