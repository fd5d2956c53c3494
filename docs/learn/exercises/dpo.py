"""The loss of direct preference optimization (chapter 6)."""

import jax
import jax.numpy as jnp


def dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    """Returns the mean over pairs of -log sigmoid(beta (log-ratio chosen - log-ratio rejected)).

    It must be finite where the margin is -10,000.

    Args:
      chosen, rejected, ref_chosen, ref_rejected: [pairs], sums of log-probs of whole answers.
    """
    raise NotImplementedError
