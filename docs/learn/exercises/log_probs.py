"""Log-probs of given tokens (chapter 1)."""

import jax
import jax.numpy as jnp


def log_probs(logits, tokens, temperature=1.0):
    """Returns the log-prob of each token but the first, [B, T - 1].

    Args:
      logits: [B, T, V]; those at index t predict the token at t + 1.
      tokens: [B, T], whole numbers.
      temperature: Divides the logits.
    """
    raise NotImplementedError
