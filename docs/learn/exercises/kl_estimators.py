"""Three estimates of KL(policy || reference) from sampled tokens (chapter 4)."""

import jax
import jax.numpy as jnp


def kl_estimators(log_probs, ref_log_probs):
    """Returns k1, k2, k3 and "k3 with the gradient of k2", each of the shape of `log_probs`.

    The last one has k3's value; its gradient with respect to `log_probs` is that of k2.
    """
    raise NotImplementedError
