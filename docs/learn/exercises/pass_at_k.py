"""The unbiased estimate of pass@k (chapter 6)."""

import math


def pass_at_k(num_samples, num_right, k):
    """Returns the chance that at least one of k answers is right, k <= num_samples.

    The k answers are drawn without replacement from `num_samples`, of which `num_right` are right.
    """
    raise NotImplementedError
