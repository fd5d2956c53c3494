"""Nucleus sampling that does not depend on neighbours (chapter 7)."""

import numpy as np


def nucleus(logits, top_p, seed, sample, position):
    """Returns one token, and its log-prob under the whole distribution.

    Keep the likeliest tokens until their mass reaches `top_p` (the one that reaches it is kept),
    draw from them. The draw depends on (seed, sample, position) and the logits, on nothing else:
    the same call returns the same token whenever it is made.

    Args:
      logits: [V].
    """
    raise NotImplementedError
