"""PPO's clipped loss with dual clip (chapter 3)."""

import jax.numpy as jnp


def clipped_loss(log_ratios, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0):
    """Returns the loss of each token, of the shape of its arguments.

    max(-A ratio, -A clip(ratio)), and where A < 0 at most -A dual_clip.

    Args:
      log_ratios: Log-prob now minus log-prob when the step began, with gradient.
    """
    raise NotImplementedError
