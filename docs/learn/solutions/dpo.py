"""The loss of direct preference optimization (chapter 6)."""

import jax
import jax.numpy as jnp


def dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.1):
    margins = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return -jnp.mean(jax.nn.log_sigmoid(margins))
