"""One number of a minibatch that is split into microbatches (chapter 5)."""

import numpy as np


def microbatch_share(losses, mask, num_tokens, num_sequences, how):
    losses = np.where(mask, losses, 0.0)
    if how == "token-mean":
        return losses.sum() / num_tokens
    lengths = np.maximum(mask.sum(1), 1)
    return (losses.sum(1) / lengths).sum() / num_sequences
