"""The bound of log-ratios of two policies, so that their exponent is finite."""

import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import Floats

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far above every clip, and its square is finite


def bounded(log_ratios: Floats) -> Floats:
    """Returns log-ratios clipped to [-20, 20]; beyond, the gradient is 0.

    >>> print(bounded(jnp.array([-50.0, 1.0])))
    [-20.   1.]
    """
    return jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)
