"""Generalized advantage estimation (chapter 2)."""

import numpy as np


def gae(rewards, values, gamma, gae_lambda):
    advantages, later, next_value = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        surprise = rewards[t] + gamma * next_value - values[t]
        later = surprise + gamma * gae_lambda * later
        advantages[t], next_value = later, values[t]
    return advantages
