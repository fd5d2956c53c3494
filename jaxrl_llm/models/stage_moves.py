"""What moves between the stages of a mesh, and what each stage takes from what it holds.

Every function here works on local arrays: nothing is left to the compiler's choice of exchanges.
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

from jaxrl_llm.models import casting
from jaxrl_llm.sharding.mesh import STAGE

Params = dict[str, Any]


class Item(NamedTuple):
    """One microbatch in one round, on each stage."""

    valid: Bool[Array, "*stages"]  # whether there is one
    round: Int[Array, "*stages"]
    microbatch: Int[Array, "*stages"]

    @classmethod
    def of(cls, number: Int[Array, "*stages"], count: Int[Array, ""], rounds: int) -> "Item":
        """Returns the items of these numbers, of `count` microbatches a round."""
        inside = jnp.clip(number, 0, rounds * count - 1)
        return cls(number == inside, inside // count, inside % count)

    def within(self, round: int) -> "Item":
        """Returns these items, valid in one round alone."""
        return self._replace(valid=self.valid & (self.round == round))


@dataclasses.dataclass(frozen=True)
class Moves:
    """The moves of hidden states of one shape."""

    stages: int
    rounds: int
    turns: int  # of as many microbatches as stages
    rows: P  # how the hidden states [R, W, D] of a microbatch are split

    @property
    def most(self) -> int:
        """Microbatches that there is room for."""
        return self.turns * self.stages

    def place(self, item: Item) -> Int[Array, " stages"]:
        """Returns the slots of items in buffers that hold all of them."""
        return item.round * self.most + item.microbatch

    def blank(self, slots: int, like: Float[Array, "turns stages R W D"]) -> Array:
        """Returns an empty buffer of hidden states, [stages, slots, R, W, D]."""
        blank = jnp.zeros((self.stages, slots, *like.shape[2:]), like.dtype)
        return lax.with_sharding_constraint(blank, self._spec(blank))

    def aligned(self, queue: Array, count: Int[Array, ""], onward: int) -> Array:
        """Returns a queue whose last turn, if not full, stands as if the rest of it had passed."""
        missing, turn = -count % self.stages, (count - 1) // self.stages

        def local(queue: Array, turn: Array, missing: Array) -> Array:
            column = lax.dynamic_index_in_dim(queue, turn, keepdims=False)
            hop = lambda _, column: self._sent(column, onward)  # noqa: E731
            column = lax.fori_loop(0, missing, hop, column)
            return lax.dynamic_update_index_in_dim(queue, column, turn, 0)

        spec = P(None, STAGE, *self.rows)
        return _mapped(local, (spec, P(), P()), spec)(queue, turn, missing)

    def entered(
        self,
        held: Array,
        queue: Array,
        slot: Int[Array, " stages"],
        item: Item,
        stage: int,
        onward: int,
    ) -> tuple[Array, Array]:
        """Returns a buffer with the next of a queue in the slot of one stage, and the rest of it.

        Microbatch m waits on stage m % stages; all of its turn move to the neighbour at each step.
        `item` is of that stage in this step.
        """

        def local(held: Array, queue: Array, slot: Array, item: Item) -> tuple[Array, Array]:
            turn = item.microbatch // self.stages
            column = lax.dynamic_index_in_dim(queue, turn, keepdims=False)
            here = item.valid & (lax.axis_index(STAGE) == stage)
            before = lax.dynamic_index_in_dim(held[0], slot[0], keepdims=False)
            value = jnp.where(here, column[0], before)
            held = lax.dynamic_update_index_in_dim(held, value[None], slot[0], 1)
            column = self._sent_if(item.valid, column, onward)
            return held, lax.dynamic_update_index_in_dim(queue, column, turn, 0)

        specs = self._spec(held), P(None, STAGE, *self.rows)
        return _mapped(local, (*specs, P(STAGE), P()), specs)(held, queue, slot, item)

    def left(
        self,
        queue: Array,
        values: Float[Array, "stages R W D"],
        item: Item,
        stage: int,
        onward: int,
    ) -> Array:
        """Returns a queue with the value of one stage, which is of `item`, if that is valid.

        The others of its turn have moved to the neighbour: at last microbatch m is on stage
        m % stages.
        """

        def local(queue: Array, values: Array, item: Item) -> Array:
            turn = item.microbatch // self.stages
            column = lax.dynamic_index_in_dim(queue, turn, keepdims=False)
            column = self._sent_if(item.valid, column, onward)
            here = item.valid & (lax.axis_index(STAGE) == stage)
            column = jnp.where(here, values, column)
            return lax.dynamic_update_index_in_dim(queue, column, turn, 0)

        spec = P(None, STAGE, *self.rows)
        return _mapped(local, (spec, P(STAGE, *self.rows), P()), spec)(queue, values, item)

    def _sent(self, value: Array, onward: int) -> Array:
        """Returns what the stage before (1), or behind (-1), has; the stages are a ring."""
        ring = [(stage, (stage + onward) % self.stages) for stage in range(self.stages)]
        return lax.ppermute(value, STAGE, ring)

    def _sent_if(self, wanted: Bool[Array, ""], value: Array, onward: int) -> Array:
        """Returns what `_sent` does where that is wanted by all stages, or else the value."""
        sent = lambda v: self._sent(v, onward)  # noqa: E731
        # XLA on CPUs runs what is in a condition beside other collectives, in an order of each
        # device's own, and they wait for each other for ever. There the bytes cost nothing.
        always = lambda wanted, v: jnp.where(wanted, sent(v), v)  # noqa: E731
        if_wanted = lambda wanted, v: lax.cond(wanted, sent, lambda v: v, v)  # noqa: E731
        return lax.platform_dependent(wanted, value, cpu=always, default=if_wanted)

    def taken(self, held: Any, slot: Int[Array, " stages"]) -> Any:
        """Returns each stage's entry of buffers, [stages, ...]."""
        specs = jax.tree.map(self._spec, held)

        def local(held: Any, slot: Array) -> Any:
            return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a[0], slot[0]), held)

        out = jax.tree.map(_of_one, specs)
        return _mapped(local, (specs, P(STAGE)), out)(held, slot)

    def put(
        self,
        held: Any,
        values: Any,  # [stages, ...]
        slot: Int[Array, " stages"],
        valid: Bool[Array, " stages"],
        onward: int = 0,
    ) -> Any:
        """Returns buffers with new entries where they are valid.

        With `onward` 1 a stage gets those of the stage before it, with -1 of the one behind it;
        `slot` and `valid` are those of the stage that gets them.
        """
        specs = jax.tree.map(self._spec, held)

        def local(held: Any, values: Any, slot: Array, valid: Array) -> Any:
            def put(a: Array, value: Array) -> Array:
                value = self._sent(value, onward) if onward else value
                before = lax.dynamic_index_in_dim(a[0], slot[0], keepdims=False)
                value = jnp.where(valid[0], value[0].astype(a.dtype), before)
                return lax.dynamic_update_index_in_dim(a, value[None], slot[0], 1)

            return jax.tree.map(put, held, values)

        split = jax.tree.map(_of_one, specs), P(STAGE), P(STAGE)
        return _mapped(local, (specs, *split), specs)(held, values, slot, valid)

    def _spec(self, buffer: Array) -> P:
        if buffer.ndim == 5:  # hidden states
            return P(STAGE, None, *self.rows)
        if buffer.ndim == 6:  # of layers: the experts that tokens visited
            return P(STAGE, None, None, *self.rows[:2], None)
        return P(STAGE, *(None,) * (buffer.ndim - 1))

    def in_round(
        self, layers: Params, specs: Params, of: Int[Array, " stages"], compute_dtype: str
    ) -> Params:
        """Returns the layers of each stage in its round, [stages, n, ...], cast to compute with.

        `layers` are [L, ...] of all stages and rounds, split as `specs`.
        """

        def local(layers: Params, of: Array) -> Params:
            def rows(path: Any, a: Array) -> Array:
                size = a.shape[0] // self.rounds
                part = lax.dynamic_slice_in_dim(a, of[0] * size, size)
                return casting.of_stage(path, part, of[0], compute_dtype)[None]

            return jax.tree.map_with_path(rows, layers)

        out = jax.tree.map(_of_round, specs)
        return _mapped(local, (specs, P(STAGE)), out)(layers, of)

    def added(
        self,
        sums: Sequence[Array],
        parts: Sequence[Array],
        specs: Sequence[P],
        of: Int[Array, " stages"],
    ) -> list[Array]:
        """Returns sums of gradients of layers with those of each stage's round.

        `sums` are [L, ...], split as `specs`; `parts` [stages, n, ...].
        """

        def local(sums: list[Array], parts: list[Array], of: Array) -> list[Array]:
            def add(a: Array, b: Array) -> Array:
                start = of[0] * b.shape[1]
                here = lax.dynamic_slice_in_dim(a, start, b.shape[1]) + b[0].astype(a.dtype)
                return lax.dynamic_update_slice_in_dim(a, here, start, 0)

            return [add(a, b) for a, b in zip(sums, parts, strict=True)]

        of_sums, of_parts = list(specs), list(map(_of_round, specs))
        return _mapped(local, (of_sums, of_parts, P(STAGE)), of_sums)(list(sums), list(parts), of)


def _mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns a function of local arrays as one of whole arrays."""
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _of_one(spec: P) -> P:
    """Returns how an entry of a buffer is split."""
    return P(spec[0], *spec[2:])


def _of_round(spec: P) -> P:
    """Returns how the layers [stages, n, ...] of a round are split, of all layers [L, ...]."""
    return P(spec[0], None, *spec[1:])
