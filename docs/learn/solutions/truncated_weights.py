"""Truncated importance weights for the engine's samples (chapter 7)."""

import numpy as np


def truncated_weights(old_log_probs, rollout_log_probs, mask, most, whole_sequence=False):
    log_ratios = np.where(mask, old_log_probs - rollout_log_probs, 0.0)
    if whole_sequence:
        log_ratios = np.broadcast_to(log_ratios.sum(1, keepdims=True), log_ratios.shape)
    return np.where(mask, np.minimum(np.exp(np.minimum(log_ratios, 20.0)), most), 0.0)
