"""Sessions over a small base, and sequences to train on."""

import dataclasses
import functools

import jax
import numpy as np

from jaxrl_llm.config import (
    DataConfig,
    LoraConfig,
    ModelConfig,
    RLConfig,
    RLTrainerConfig,
    RolloutConfig,
)
from jaxrl_llm.training_api import policy_base
from jaxrl_llm.training_api.training_data import Datum
from jaxrl_llm.training_api.training_session import TrainingSession

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
MODEL = ModelConfig(**SIZES, head_size=8, mlp_size=48, remat="none")
LORA = LoraConfig(rank=4, alpha=32.0)
CONFIG = RLConfig(
    model=MODEL,
    lora=LORA,
    data=DataConfig(max_prompt_tokens=32),
    trainer=RLTrainerConfig(max_tokens_per_microbatch=64, prompts_per_step=4),
    rollout=RolloutConfig(max_response_tokens=32, suppress_unused_tokens=False),
)


@functools.cache
def base(**settings):
    return policy_base.load_base(dataclasses.replace(CONFIG, **settings))


def session(seed=0, **settings):
    """A session whose adapters already change something."""
    made = TrainingSession(base(**settings), seed=seed)
    random = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda a: jax.device_put(a + random.normal(0, 0.1, a.shape).astype(a.dtype), a.sharding),
        made.state.params,
    )
    made.state = dataclasses.replace(made.state, params=params)
    return made


@functools.cache
def data(count=7, seed=0):
    random = np.random.default_rng(seed)
    vocab = base().models.policy.shape.vocab_size
    made = []
    for length in random.integers(5, 30, count):
        fields = {name: random.normal(0, 1, length) for name in ("weights", "advantages")}
        fields["old_log_probs"] = -random.uniform(2, 5, length)
        made.append(Datum(tuple(random.integers(0, vocab, length).tolist()), fields))
    return tuple(made)


def close(actual, expected, tolerance=1e-6):
    """All arrays within a share of their largest number."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = max(float(np.abs(b).max()), 1e-30)
        np.testing.assert_allclose(np.asarray(a) / scale, np.asarray(b) / scale, atol=tolerance)
