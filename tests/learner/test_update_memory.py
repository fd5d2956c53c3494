"""What the compiler says of the update's memory."""

import dataclasses

import jax
import pytest
import tiny

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import compiled_memory


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
    models = compiled_memory.abstract_models(config, shape, jax.devices()[:1])
    program = compiled_memory.program_lowerings(config, models)["train"]().compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_logits_are_never_there_at_one_time():
    # The same program but for the tokens whose logits exist at one time: 256, or all 4096.
    assert 4 * temporary(256) <= temporary(4096)


@pytest.mark.slow
def test_a_layer_costs_a_tpu_its_input_and_a_narrow_gradient(tpu_devices):
    devices = tpu_devices("v5e:2x4")
    tokens, width, mlp = 1024, 512, 2048
    config = from_config_dict(
        {
            "model": {"compute_dtype": "bfloat16", "remat": "full"},
            "algorithm": {"recipe": "grpo", "samples_per_prompt": 8},
            "data": {"max_prompt_tokens": tokens // 2},
            "rollout": {"max_response_tokens": tokens // 2},
            "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
            "trainer": {"prompts_per_step": 1, "max_tokens_per_microbatch": tokens},
            "mesh": {"fsdp": 8},
        }
    )

    def temporary(num_layers: int) -> int:
        shape = dataclasses.replace(
            tiny.SHAPE,
            vocab_size=1024,
            hidden_size=width,
            num_layers=num_layers,
            num_heads=4,
            num_kv_heads=4,
            head_size=128,
            mlp_size=mlp,
        )
        models = compiled_memory.abstract_models(config, shape, devices)
        program = compiled_memory.program_lowerings(config, models)["train"]().compile()
        return program.memory_analysis().temp_size_in_bytes

    few, many = 16, 64
    weights = (4 * width * width + 3 * width * mlp) // len(devices)
    # Two bytes of each: neither a float32 gradient nor a second copy of the weights.
    expected = 2 * (tokens * width + weights)
    assert temporary(many) - temporary(few) <= 1.1 * expected * (many - few)
