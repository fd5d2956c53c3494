"""Truncated importance weights for the engine's samples (chapter 7)."""

import numpy as np


def truncated_weights(old_log_probs, rollout_log_probs, mask, most, whole_sequence=False):
    """Returns the weight of each token, [B, T]; 0 outside of the mask.

    min(exp(old - rollout), most) of each token; with `whole_sequence` every token of a row has the
    row's product of ratios, truncated. Values outside of the mask may be anything.
    """
    raise NotImplementedError
