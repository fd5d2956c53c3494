"""What a token may be by the definitions, and whether draws follow it."""

import numpy as np
import scipy.stats

# Settings of a sampler, each filter alone and all of them at once.
FILTERS = (
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
)


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What a token of one row may be, as transformers' warpers say it: k, then p, then min_p."""
    scaled = np.asarray(logits, np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0.0
        p /= p.sum()
    if top_p < 1.0:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0.0
        p /= p.sum()
    p[p < min_p * p.max()] = 0.0
    return p / p.sum()


def assert_drawn_from(tokens, p):
    counts = np.bincount(tokens, minlength=len(p))
    assert len(counts) == len(p), "a token outside the vocabulary"
    assert counts[p == 0].sum() == 0, "a token of no mass"
    # Rare tokens together, so that every expected count is large enough for the test.
    rare = p * len(tokens) < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(p[~rare], p[rare].sum()) * len(tokens)
    kept = expected > 0
    if kept.sum() > 1:
        assert scipy.stats.chisquare(observed[kept], expected[kept]).pvalue > 1e-4
