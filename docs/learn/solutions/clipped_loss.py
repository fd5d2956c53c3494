"""PPO's clipped loss with dual clip (chapter 3)."""

import jax.numpy as jnp


def clipped_loss(log_ratios, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0):
    ratios = jnp.exp(log_ratios)
    clipped = jnp.clip(ratios, 1.0 - clip_low, 1.0 + clip_high)
    losses = jnp.maximum(-advantages * ratios, -advantages * clipped)
    return jnp.where(advantages < 0.0, jnp.minimum(losses, -advantages * dual_clip), losses)
