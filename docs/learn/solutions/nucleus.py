"""Nucleus sampling that does not depend on neighbours (chapter 7)."""

import numpy as np


def nucleus(logits, top_p, seed, sample, position):
    shifted = logits - logits.max()
    log_probs = shifted - np.log(np.exp(shifted).sum())
    order = np.argsort(-log_probs, kind="stable")
    mass = np.cumsum(np.exp(log_probs[order]))
    kept = order[: 1 + np.searchsorted(mass, top_p)]
    cumulative = np.cumsum(np.exp(log_probs[kept]))
    uniform = np.random.default_rng([seed, sample, position]).random() * cumulative[-1]
    token = kept[np.searchsorted(cumulative, uniform, side="right")]
    return int(token), float(log_probs[token])
