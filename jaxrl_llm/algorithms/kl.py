"""Estimates of KL(policy || reference) from log-probs of sampled tokens, and its control.

http://joschu.net/blog/kl-approx.html names k1, k2 and k3. With d = log_probs - ref_log_probs on
tokens of the policy, the mean of k1 and of k3 is the KL. Their gradients are not the KL's: on
average that of k1 is 0 and that of k3 belongs to KL(reference || policy). The gradient of k2 is
right, so `NAME+` has the value of NAME and the gradient of k2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import Floats, Scalar
from jaxrl_llm.algorithms.ratios import bounded
from jaxrl_llm.config import AlgorithmConfig

Estimator = Callable[[Floats, Floats], Floats]

MAX_K3 = 10.0  # a token that the reference thinks impossible must not be the whole loss
MAX_RELATIVE_ERROR = 0.2  # of the adaptive controller


def k1(log_probs: Floats, ref_log_probs: Floats) -> Floats:
    """Returns `d = log_probs - ref_log_probs`: unbiased, negative on single tokens.

    >>> print(k1(jnp.array([-1.0]), jnp.array([-1.5])))
    [0.5]
    """
    return log_probs - ref_log_probs


def absolute(log_probs: Floats, ref_log_probs: Floats) -> Floats:
    """Returns `|d|`: a distance, not the KL.

    >>> print(absolute(jnp.array([-1.5]), jnp.array([-1.0])))
    [0.5]
    """
    return jnp.abs(log_probs - ref_log_probs)


def k2(log_probs: Floats, ref_log_probs: Floats) -> Floats:
    """Returns `d**2 / 2`: slightly biased, low variance, the right gradient.

    >>> print(k2(jnp.array([-1.0]), jnp.array([-1.5])))
    [0.125]
    """
    return 0.5 * jnp.square(log_probs - ref_log_probs)


def k3(log_probs: Floats, ref_log_probs: Floats) -> Floats:
    """Returns `exp(-d) + d - 1`: unbiased, never negative (arXiv:2402.03300, Eq. 4).

    `d` is clipped to [-20, 20] and the result to at most 10.

    >>> print(k3(jnp.array([-1.0]), jnp.array([-1.5])).round(4))
    [0.1065]
    """
    difference = bounded(ref_log_probs - log_probs)
    return jnp.clip(jnp.exp(difference) - difference - 1.0, -MAX_K3, MAX_K3)


def with_k2_gradient(estimator: Estimator) -> Estimator:
    """Returns an estimator with the values of `estimator` and the gradient of `k2`.

    >>> print(jax.grad(with_k2_gradient(k3))(jnp.array(-1.0), jnp.array(-1.5)))
    0.5
    """

    def straight_through(log_probs: Floats, ref_log_probs: Floats) -> Floats:
        value = jax.lax.stop_gradient(estimator(log_probs, ref_log_probs))
        carrier = k2(log_probs, ref_log_probs)
        return value + (carrier - jax.lax.stop_gradient(carrier))

    return straight_through


KL_ESTIMATORS: dict[str, Estimator] = {"k1": k1, "abs": absolute, "k2": k2, "k3": k3}
KL_ESTIMATORS |= {f"{name}+": with_k2_gradient(plain) for name, plain in KL_ESTIMATORS.items()}


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
