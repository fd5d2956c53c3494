"""Generalized advantage estimation (chapter 2)."""

import numpy as np


def gae(rewards, values, gamma, gae_lambda):
    """Returns the advantages of one sequence, [T]; the value after its end is 0.

    Args:
      rewards: [T].
      values: [T]; values[t] is predicted before the token at t is chosen.
    """
    raise NotImplementedError
