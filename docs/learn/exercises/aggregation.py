"""One number of a minibatch that is split into microbatches (chapter 5)."""

import numpy as np


def microbatch_share(losses, mask, num_tokens, num_sequences, how):
    """Returns a microbatch's share; the sum of all shares is the result of the whole minibatch.

    Args:
      losses: [B, T], of this microbatch.
      mask: [B, T]; a row without a true value is padding and no sequence.
      num_tokens: True values of the mask in the whole minibatch.
      num_sequences: Rows with a true value in the whole minibatch.
      how: "token-mean" (sum / tokens) or "seq-mean-token-mean" (mean of the rows' means).
    """
    raise NotImplementedError
