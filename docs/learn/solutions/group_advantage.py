"""GRPO's advantage (chapter 5)."""

import numpy as np


def group_advantage(scores, group_ids, group_std=True):
    scores, found = np.asarray(scores, float), np.zeros(len(scores))
    for group in np.unique(group_ids):
        rows = np.asarray(group_ids) == group
        own = scores[rows]
        scale = own.std(ddof=1) + 1e-6 if group_std and len(own) > 1 else 1.0
        found[rows] = (own - own.mean()) / scale if len(own) > 1 else own
    return found
