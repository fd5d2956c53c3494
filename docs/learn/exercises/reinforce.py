"""The loss of REINFORCE (chapter 1)."""

import jax
import jax.numpy as jnp


def reinforce(log_probs, scores, mask):
    """Returns a number whose gradient is minus the policy gradient.

    The mean over sequences of (score - mean of all scores) times the sum of log-probs in the mask.
    No gradient flows through scores.

    Args:
      log_probs: [B, T], with gradient.
      scores: [B].
      mask: [B, T], true at sampled tokens; values elsewhere may be anything, also NaN.
    """
    raise NotImplementedError
