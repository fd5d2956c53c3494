"""Log-ratios of two policies, estimates of the KL to the reference, and its control."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import Floats, Scalar
from jaxrl_llm.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: far above every clip, and its square is finite
MAX_K3 = 10.0  # a token that the reference thinks impossible must not be the whole loss
MAX_RELATIVE_ERROR = 0.2  # of the adaptive controller


def clip_log_ratios(log_ratios: Floats) -> Floats:
    """Returns log-ratios clipped to [-20, 20]; beyond, the gradient is 0.

    >>> print(clip_log_ratios(jnp.array([-50.0, 1.0])))
    [-20.   1.]
    """
    return jnp.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _k3(difference: Floats) -> Floats:
    negative = clip_log_ratios(-difference)
    return jnp.clip(jnp.exp(negative) - negative - 1.0, -MAX_K3, MAX_K3)


KL_ESTIMATORS: dict[str, Callable[[Floats], Floats]] = {
    "k1": lambda difference: difference,
    "abs": jnp.abs,
    "k2": lambda difference: 0.5 * jnp.square(difference),
    "k3": _k3,
}


def estimated_kl(name: str, log_probs: Floats, ref_log_probs: Floats) -> Floats:
    """Returns the estimate `name` of KL(policy || reference) from sampled tokens.

    With d = log_probs - ref_log_probs on tokens of the policy:

        k1       d                  unbiased, negative on single tokens
        abs      |d|                a distance, not the KL
        k2       d**2 / 2           slightly biased, low variance, the right gradient
        k3       exp(-d) + d - 1    unbiased, never negative (arXiv:2402.03300, Eq. 4)
        NAME+    the value of NAME with the gradient of k2

    The gradients of k1 and k3 are not the KL's: on average that of k1 is 0 and that of k3 belongs
    to KL(reference || policy). k3 clips `d` to [-20, 20] and its result to at most 10.
    Names: http://joschu.net/blog/kl-approx.html.

    >>> ours, theirs = jnp.float32(-1.0), jnp.float32(-1.5)
    >>> print(*(estimated_kl(name, ours, theirs).round(4) for name in KL_ESTIMATORS))
    0.5 0.5 0.125 0.1065
    >>> print(jax.grad(lambda x: estimated_kl("k3+", x, theirs))(ours))
    0.5
    """
    difference = log_probs - ref_log_probs
    value = KL_ESTIMATORS[name.removesuffix("+")](difference)
    if not name.endswith("+"):
        return value
    carrier = KL_ESTIMATORS["k2"](difference)
    return jax.lax.stop_gradient(value) + (carrier - jax.lax.stop_gradient(carrier))


def next_kl_coef(
    kl_coef: Scalar | float,
    current_kl: Scalar | float,
    num_sequences: Scalar | int,
    config: AlgorithmConfig,
) -> Scalar:
    """Returns the KL coefficient of the next step.

    `fixed` returns `kl_coef`. `adaptive` (arXiv:1909.08593, section 2.2):

        error = clip(current_kl / kl_target - 1, -0.2, 0.2)
        kl_coef * (1 + error * num_sequences / kl_horizon)

    `current_kl` is what `kl_shaped` measured on `num_sequences` sequences.

    >>> config = AlgorithmConfig(kl_controller="adaptive", kl_target=6.0, kl_horizon=1000)
    >>> print(next_kl_coef(0.1, 12.0, 500, config).round(4))
    0.11
    """
    kl_coef = jnp.asarray(kl_coef, jnp.float32)
    if config.kl_controller == "fixed":
        return kl_coef
    error = jnp.asarray(current_kl, jnp.float32) / config.kl_target - 1.0
    error = jnp.clip(error, -MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR)
    return kl_coef * (1.0 + error * num_sequences / config.kl_horizon)
