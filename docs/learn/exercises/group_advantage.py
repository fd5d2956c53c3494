"""GRPO's advantage (chapter 5)."""

import numpy as np


def group_advantage(scores, group_ids, group_std=True):
    """Returns the advantage of each row, [B].

    Score minus the mean of its group; with `group_std` divided by (std + 1e-6), with Bessel's
    correction. Rows of a group need not be neighbours. A group of one keeps its score.

    Args:
      scores: [B].
      group_ids: [B], whole numbers.
    """
    raise NotImplementedError
