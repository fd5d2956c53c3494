"""Divergences of the policy from a teacher on the policy's own tokens.

arXiv:2306.13649 (on-policy distillation, GKD) and arXiv:2306.08543 (reverse KL, MiniLLM).
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.algorithms.kl import clip_log_ratios
from jaxrl_llm.algorithms.masked import Floats

_LEAST = 1e-30  # of a probability in a logarithm


def reverse_kl_rewards(teacher_log_probs: Floats, log_probs: Floats) -> Floats:
    """Returns the reverse-KL reward of each token: `log teacher - log policy` in [-20, 20].

    Its mean over the policy's tokens is minus KL(policy || teacher), whose gradient is that of
    REINFORCE with the sum over the tokens from here on (arXiv:2306.08543, Eq. 2). Deviation: a
    token earns its own term alone (a discount of 0), as in arXiv:2306.13649, Eq. 4, where no
    gradient flows through the sampling of earlier tokens.

    >>> print(reverse_kl_rewards(jnp.float32(-1.0), jnp.float32(-3.0)))
    2.0
    """
    return clip_log_ratios(teacher_log_probs - log_probs)


def forward_kl(
    teacher: Float[Array, "*dims k"], policy: Float[Array, "*dims k+1"]
) -> Float[Array, "*dims"]:
    """Returns KL(teacher || policy) over k listed tokens and one bucket for all others.

        sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest),   p_rest = 1 - sum_k p_k

    It is at least 0 and at most the KL over all tokens, as merging tokens into a bucket loses what
    tells them apart; with all tokens listed it is that KL.

    Args:
      teacher: Log-probs p of different tokens.
      policy: Log-probs q of the same tokens, and of all others together.

    >>> both = jnp.log(jnp.array([0.5, 0.25]))
    >>> policy = jnp.log(jnp.array([0.25, 0.25, 0.5]))
    >>> print(forward_kl(both, policy).round(4))  # 0.5 log 2 - 0.25 log 2
    0.1733
    """
    p = jnp.exp(teacher)
    rest = jnp.maximum(1.0 - p.sum(-1), 0.0)
    listed = jnp.sum(p * (teacher - policy[..., :-1]), -1)
    return listed + rest * (jnp.log(jnp.maximum(rest, _LEAST)) - policy[..., -1])


def jensen_shannon(
    teacher: Float[Array, "*dims k"], policy: Float[Array, "*dims k+1"], beta: float
) -> Float[Array, "*dims"]:
    """Returns the generalized Jensen-Shannon divergence over k tokens and one bucket of others.

        beta KL(p || m) + (1 - beta) KL(q || m),    m = beta p + (1 - beta) q

    arXiv:2306.13649, Eq. 1, with beta in (0, 1). Arguments and bucket are those of `forward_kl`;
    with all tokens listed it is the divergence over all of them.

    >>> both = jnp.log(jnp.array([0.5, 0.5]))
    >>> policy = jnp.log(jnp.array([0.5, 0.5, 1e-30]))
    >>> print(abs(jensen_shannon(both, policy, 0.3)).round(4))
    0.0
    """
    rest = jnp.maximum(1.0 - jnp.exp(teacher).sum(-1, keepdims=True), 0.0)
    log_p = jnp.concatenate([teacher, jnp.log(jnp.maximum(rest, _LEAST))], -1)
    mixture = jnp.logaddexp(log_p + math.log(beta), policy + math.log1p(-beta))
    p, q = jnp.concatenate([jnp.exp(teacher), rest], -1), jnp.exp(policy)
    return jnp.sum(beta * p * (log_p - mixture) + (1 - beta) * q * (policy - mixture), -1)
