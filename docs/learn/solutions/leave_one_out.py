"""RLOO's advantage without a loop over rows (chapter 5)."""

import numpy as np


def leave_one_out(scores):
    others = (np.sum(scores, 1, keepdims=True) - scores) / (scores.shape[1] - 1)
    return scores - others
