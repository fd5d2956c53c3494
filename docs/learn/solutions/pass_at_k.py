"""The unbiased estimate of pass@k (chapter 6)."""

import math


def pass_at_k(num_samples, num_right, k):
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)
