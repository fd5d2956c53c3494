"""Log-ratios of two policies on the same tokens, bounded so that their exponent is finite."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.algorithms.masked import zero_outside

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far above every clip, and its square is finite


def log_ratio(
    log_probs: Float[Array, "B T"],
    base_log_probs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    """Returns `log_probs - base_log_probs` inside the mask and 0 (ratio 1) outside.

    Example:
      >>> mask = jnp.array([[True, False]])
      >>> print(log_ratio(jnp.array([[-1.0, jnp.nan]]), jnp.array([[-1.5, 0.0]]), mask))
      [[0.5 0. ]]
    """
    log_probs, base_log_probs = zero_outside(mask, log_probs, base_log_probs)
    return log_probs - base_log_probs


def bounded(log_ratios: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns log-ratios clipped to [-20, 20]; beyond, the gradient is 0.

    Example:
      >>> print(bounded(jnp.array([-50.0, 1.0])))
      [-20.   1.]
    """
    return jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)
