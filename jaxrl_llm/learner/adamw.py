"""AdamW whose numbers are inputs of a compiled program, for callers that change them each step.

The jobs' optimizer (`optimizer.make_optimizer`) has its numbers compiled in, and the same
arithmetic.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxrl_llm.config import OptimizerConfig
from jaxrl_llm.config.validation import Range, field_rules
from jaxrl_llm.errors import UserError

Tree = Any


class AdamWError(UserError, ValueError):
    """A number of AdamW is out of its range."""


@dataclasses.dataclass(frozen=True)
class AdamWParams:
    """The numbers of one update of AdamW (arXiv:1711.05101); weight decay is decoupled."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = math.inf  # clips the global norm of the gradient; inf: off

    def check(self) -> None:
        """Raises AdamWError with the first number outside the range that it has in a config."""
        rules = {n: rule for n, rule, _ in field_rules(OptimizerConfig) if isinstance(rule, Range)}
        for name, value in vars(self).items():
            if value not in rules[name]:
                raise AdamWError(f"optimizer: {name} is {value!r}; use one {rules[name]}")

    def inputs(self) -> "AdamWInputs":
        """The numbers as a program takes them.

        What a float32 beta would spoil is computed here in float64: 1 - 0.999 has four digits fewer
        after rounding.
        """
        logs = [log_beta(beta) for beta in (self.beta1, self.beta2)]
        numbers = (
            self.learning_rate,
            (self.beta1, 1.0 - self.beta1, logs[0]),
            (self.beta2, 1.0 - self.beta2, logs[1]),
            self.eps,
            self.weight_decay,
            self.max_grad_norm,
        )
        return AdamWInputs(*jax.tree.map(np.float32, numbers))


class AdamWInputs(NamedTuple):
    """The numbers of `AdamWParams` as float32 scalars; a beta with 1 - beta and log(beta)."""

    learning_rate: Float[Array, ""]
    beta1: tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]
    beta2: tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]
    eps: Float[Array, ""]
    weight_decay: Float[Array, ""]
    max_grad_norm: Float[Array, ""]


def log_beta(beta: float) -> float:
    """The logarithm of a decay of moments, that of 0 too."""
    return math.log(beta) if beta else -math.inf


def bias_correction(log_beta: float | Float[Array, ""], count: Int[Array, ""]) -> Float[Array, ""]:
    """`1 - beta**count` with all digits of float32."""
    return -jnp.expm1(count.astype(jnp.float32) * log_beta)


def adamw(inputs: AdamWInputs) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW, for float32 gradients; to be made inside a trace."""

    def bias_corrected(moment: Tree, log_beta: Array, count: Array) -> Tree:
        correction = bias_correction(log_beta, count)
        return jax.tree.map(lambda m: m / correction, moment)

    def update(gradients: Tree, state: optax.ScaleByAdamState, params: Tree = None):
        norm = optax.tree.norm(gradients)
        clips = norm > inputs.max_grad_norm
        gradients = jax.tree.map(
            lambda g: jnp.where(clips, g / norm * inputs.max_grad_norm, g), gradients
        )
        (beta1, rest1, log1), (beta2, rest2, log2) = inputs.beta1, inputs.beta2
        first = jax.tree.map(lambda g, m: rest1 * g + beta1 * m, gradients, state.mu)
        second = jax.tree.map(lambda g, v: rest2 * g * g + beta2 * v, gradients, state.nu)
        count = optax.safe_increment(state.count)
        updates = jax.tree.map(
            lambda m, v, p: (
                -inputs.learning_rate
                * (m / (jnp.sqrt(v) + inputs.eps) + inputs.weight_decay * p.astype(jnp.float32))
            ),
            bias_corrected(first, log1, count),
            bias_corrected(second, log2, count),
            params,
        )
        return updates, optax.ScaleByAdamState(count, first, second)

    return optax.GradientTransformation(init_moments, update)


def init_moments(params: Tree) -> optax.ScaleByAdamState:
    """Moments of zeros in float32."""
    return optax.scale_by_adam().init(jax.tree.map(lambda p: p.astype(jnp.float32), params))
