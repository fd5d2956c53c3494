"""Log-probs of given tokens (chapter 1)."""

import jax
import jax.numpy as jnp


def log_probs(logits, tokens, temperature=1.0):
    all_log_probs = jax.nn.log_softmax(logits[:, :-1] / temperature, axis=-1)
    return jnp.take_along_axis(all_log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
