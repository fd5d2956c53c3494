"""Which tokens of packed rows are looked at, and where the hidden state is that predicts each."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxrl_llm.sharding.mesh import constrain


@dataclasses.dataclass(frozen=True)
class Everywhere:
    """All tokens that follow another one of their sequence."""

    segment_ids: Int[Array, "B T"]

    @property
    def valid(self) -> Bool[Array, "B T"]:
        """Where token t+1 belongs to the same sequence as token t."""
        after = jnp.pad(self.segment_ids[:, 1:], ((0, 0), (0, 1)))
        return (self.segment_ids == after) & (self.segment_ids != 0)

    def states(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the hidden states that tokens are drawn from."""
        return hidden

    def taken(self, x: Shaped[Array, "B T *n"]) -> Shaped[Array, "B T *n"]:
        """Returns what is known of each token, at the place of its hidden state."""
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2)))

    def put(self, x: Shaped[Array, "B T *n"]) -> Shaped[Array, "B T *n"]:
        """Returns what was found at hidden states, at the places of tokens; else zero."""
        x = jnp.pad(x[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (x.ndim - 2)))
        return constrain(x, "batch", "length", *(None,) * (x.ndim - 2))


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Some tokens of each row, none the first of its sequence."""

    positions: Int[Array, "B chosen"]  # each at most once in a row; T: no token
    before: Int[Array, "B chosen"]  # position of the token before each of them, in the same row
    length: int  # T

    @property
    def valid(self) -> Bool[Array, "B chosen"]:
        """Which of them are tokens."""
        return self.positions < self.length

    def states(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B chosen D"]:
        """Returns the hidden states that tokens are drawn from."""
        return jnp.take_along_axis(hidden, self.before[..., None], axis=1)

    def taken(self, x: Shaped[Array, "B T *n"]) -> Shaped[Array, "B chosen *n"]:
        """Returns what is known of each token, at the place of its hidden state."""
        inside = jnp.minimum(self.positions, self.length - 1)
        return jnp.take_along_axis(x, inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), axis=1)

    def put(self, x: Shaped[Array, "B chosen *n"]) -> Shaped[Array, "B T *n"]:
        """Returns what was found at hidden states, at the places of tokens; else zero."""

        def in_row(positions: Array, found: Array) -> Array:
            blank = jnp.zeros((self.length, *found.shape[1:]), found.dtype)
            return blank.at[positions].set(found, mode="drop")

        # Row by row: were the row an index, every device would first collect those of all others.
        placed = jax.vmap(in_row)(self.positions, x)
        return constrain(placed, "batch", "length", *(None,) * (x.ndim - 2))


Places = Everywhere | Chosen
