"""Sums, means and group statistics over the entries that a mask keeps.

Values outside the mask never matter, not even NaN, and get no gradient. An empty mask gives 0, so
a batch of padding is harmless. The order of rows does not matter. Everything here may be jitted.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# The arrays of this folder; B sequences, T tokens of a sequence.
PerToken = Float[Array, "B T"]
Mask = Bool[Array, "B T"]
PerRow = Float[Array, " B"]
RowMask = Bool[Array, " B"]
GroupIds = Int[Array, " B"]
Scalar = Float[Array, ""]
Floats = Float[Array, "..."]
Bools = Bool[Array, "..."]


def zero_outside(mask: Bool[Array, "*dims"], *arrays: Float[Array, "*dims"]) -> tuple[Array, ...]:
    """Returns the arrays with 0 outside `mask`; the gradient of what 0 replaced is exactly 0.

    >>> (x,) = zero_outside(jnp.array([True, False]), jnp.array([2.0, jnp.nan]))
    >>> print(x)
    [2. 0.]
    """
    return tuple(jnp.where(mask, array, jnp.zeros_like(array)) for array in arrays)


def sum(x: Floats, mask: Bools, axis: int | None = None) -> Floats:
    """Returns the sum of `x` where `mask`, over `axis` or over everything.

    >>> print(sum(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])))
    3.0
    """
    return jnp.sum(jnp.where(mask, x, jnp.zeros_like(x)), axis=axis)


def mean(x: Floats | Bools, mask: Bools, axis: int | None = None) -> Floats:
    """Returns the mean of `x` where `mask`; of flags, the share set; 0 where the mask is empty.

    >>> print(mean(jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])))
    1.5
    """
    return sum(x * 1.0, mask, axis) / jnp.maximum(jnp.sum(mask, axis=axis), 1)


def variance(x: Floats, mask: Bools) -> Scalar:
    """Returns the unbiased variance of `x` where `mask`; 0 for fewer than two entries.

    >>> print(variance(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False])))
    2.0
    """
    (x,) = zero_outside(mask, x)
    squares = sum(jnp.square(x - mean(x, mask)), mask)
    return squares / jnp.maximum(jnp.sum(mask) - 1, 1)


def max(x: Floats, mask: Bools, axis: int | None = None) -> Floats:
    """Returns the largest `x` where `mask`; 0 where the mask is empty.

    >>> print(max(jnp.array([-1.0, 3.0]), jnp.array([True, False])))
    -1.0
    """
    largest = jnp.max(jnp.where(mask, x, -jnp.inf), axis=axis, initial=-jnp.inf)
    return jnp.where(jnp.any(mask, axis=axis), largest, 0.0)


def min(x: Floats, mask: Bools, axis: int | None = None) -> Floats:
    """Returns the smallest `x` where `mask`; 0 where the mask is empty.

    >>> print(min(jnp.array([1.0, -3.0]), jnp.array([True, False])))
    1.0
    """
    return -max(-x, mask, axis)


def dominating_offset(smallest: Floats, largest: Floats) -> Floats:
    """The smallest of some numbers if it is so large that their mean would lose digits, else 0.

    Float32 has 24 bits. Where an offset is 1024 times the spread, ten of them are lost in a mean,
    and all of them at 1e7. The offset is subtracted first there; elsewhere results keep their bits.

    >>> print(dominating_offset(jnp.array([1e7, 1.0]), jnp.array([1e7 + 1, 3.0])))
    [1.e+07 0.e+00]
    """
    spread = largest - smallest
    dominates = (spread > 0) & (jnp.minimum(abs(smallest), abs(largest)) > 1024 * spread)
    return jnp.where(dominates, smallest, 0.0)


def whiten(x: PerToken, mask: Mask) -> PerToken:
    """Returns `x` shifted and scaled to mean 0 and variance 1 over the masked tokens.

        (x - mean) / sqrt(variance + 1e-8)

    Every token weighs the same, so long responses weigh more. A single token becomes 0.

    >>> x, mask = jnp.array([[1.0, 3.0, 7.0]]), jnp.array([[True, True, False]])
    >>> print(whiten(x, mask).round(4))
    [[-0.7071  0.7071  0.    ]]
    """
    (x,) = zero_outside(mask, x)
    # Equal numbers whiten to equal bits, whatever the compiler could fuse into the sums.
    x = jax.lax.optimization_barrier(x)
    x = x - dominating_offset(
        jnp.min(jnp.where(mask, x, jnp.inf), initial=jnp.inf),
        jnp.max(jnp.where(mask, x, -jnp.inf), initial=-jnp.inf),
    )
    scaled = (x - mean(x, mask)) * jax.lax.rsqrt(variance(x, mask) + 1e-8)
    return jnp.where(mask, scaled, 0.0)


def returns_to_go(rewards: PerToken, mask: Mask) -> PerToken:
    """Returns, for each response token, the rewards from it to the end; 0 outside the mask.

    >>> print(returns_to_go(jnp.array([[1.0, 9.0, 2.0]]), jnp.array([[True, False, True]])))
    [[3. 0. 2.]]
    """
    (inside,) = zero_outside(mask, rewards)
    (to_go,) = zero_outside(mask, jax.lax.cumsum(inside, axis=1, reverse=True))
    return to_go


def group_sum(x: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns, for each row, the sum of `x` over the members of its group.

    Group ids are in [0, B), in any order, with gaps. Other rows than `members` count in no group.

    >>> x, groups = jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 1, 0])
    >>> print(group_sum(x, groups, jnp.ones(3, bool)))
    [5. 2. 5.]
    """
    totals = jax.ops.segment_sum(jnp.where(members, x, 0.0), group_ids, x.shape[0])
    return totals[group_ids]


def group_max(x: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns, for each row, the largest `x` in its group; -inf for a group without members.

    >>> x, groups = jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 1, 0])
    >>> print(group_max(x, groups, jnp.ones(3, bool)))
    [4. 2. 4.]
    """
    return jax.ops.segment_max(jnp.where(members, x, -jnp.inf), group_ids, x.shape[0])[group_ids]


def group_size(group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns, for each row, how many members its group has.

    >>> print(group_size(jnp.array([0, 1, 0]), jnp.ones(3, bool)))
    [2. 1. 2.]
    """
    return group_sum(jnp.ones(group_ids.shape, jnp.float32), group_ids, members)


def group_mean(x: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns, for each row, the mean of its group.

    The mean of equal numbers is that number to the bit: their deviations are exactly 0. Where an
    offset is much larger than the differences the mean is rounded to the offset's precision; see
    `group_centered`.

    >>> x, groups = jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 1, 0])
    >>> print(group_mean(x, groups, jnp.ones(3, bool)))
    [2.5 2.  2.5]
    """
    origin, shift = _group_mean_parts(x, group_ids, members)
    return origin + shift


def group_centered(x: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """The difference of each row from the mean of its group, exact at any offset.

    The mean of `[1e7, 1e7, 1e7, 1e7 + 1]` is no float32, the differences from it are.

    >>> x, groups = 1e7 + jnp.array([0.0, 0.0, 0.0, 1.0]), jnp.zeros(4, int)
    >>> print(group_centered(x, groups, jnp.ones(4, bool)))
    [-0.25 -0.25 -0.25  0.75]
    """
    origin, shift = _group_mean_parts(x, group_ids, members)
    return (x - origin) - shift


def _group_mean_parts(x: PerRow, group_ids: GroupIds, members: RowMask) -> tuple[PerRow, PerRow]:
    """The smallest number of each row's group, and the mean's distance from it."""
    smallest = -group_max(-x, group_ids, members)
    origin = jnp.where(jnp.isfinite(smallest), smallest, 0.0)
    size = jnp.maximum(group_size(group_ids, members), 1.0)
    return origin, group_sum(x - origin, group_ids, members) / size


def group_deviation(x: PerRow, group_ids: GroupIds, members: RowMask) -> PerRow:
    """Returns, for each row, the unbiased standard deviation of its group; 1 for a group of one.

    >>> x, groups = jnp.array([1.0, 2.0, 3.0, 5.0, 5.0]), jnp.array([0, 1, 0, 2, 2])
    >>> print(group_deviation(x, groups, jnp.ones(5, bool)).round(4))
    [1.4142 1.     1.4142 0.     0.    ]
    """
    size = group_size(group_ids, members)
    squares = jnp.square(group_centered(x, group_ids, members))
    variance = group_sum(squares, group_ids, members) / jnp.maximum(size - 1.0, 1.0)
    return jnp.where(size > 1.0, jnp.sqrt(variance), 1.0)
