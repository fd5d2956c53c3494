"""What the compiler says of the update's memory."""

import dataclasses

import jax
import tiny

from jaxrl_llm.config_bridge import from_config_dict
from jaxrl_llm.learner import lowering


def temporary(vocab_chunk: int) -> int:
    """Bytes of temporary memory of the update of a small model with a large vocabulary."""
    config = from_config_dict(
        {
            "model": {"vocab_chunk": vocab_chunk, "remat": "full"},
            "algorithm": {"recipe": "grpo", "samples_per_prompt": 8},
            "data": {"max_prompt_tokens": 128},
            "rollout": {"max_response_tokens": 384},
            "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
            "trainer": {"prompts_per_step": 1, "max_tokens_per_microbatch": 4096},
        }
    )
    shape = dataclasses.replace(
        tiny.SHAPE, vocab_size=32_768, hidden_size=64, num_layers=1, mlp_size=128
    )
    roles = lowering.abstract_roles(config, shape, jax.devices()[:1])
    return lowering.lowered(roles)["train"]().compile().memory_analysis().temp_size_in_bytes


def test_logits_are_never_there_at_one_time():
    # The same program but for the tokens whose logits exist at one time: 256, or all 4096.
    assert 4 * temporary(256) <= temporary(4096)
