"""Compile time of the policy update on pipeline stages, by layers and by microbatches.

`python benchmarks/stages.py` compiles the update of GRPO for stage 2 x fsdp 2 x tensor 2 on eight
CPU devices, one program after another in one process, without a cache of compiled programs.
Seconds are of the processor, so other work on the machine hardly changes them.
"""

import dataclasses
import os
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import compiled_memory
from jaxrl_llm.planning.published_shapes import SHAPES

TOKENS, SEQUENCES, FSDP = 256, 32, 2


def seconds(layers: int, microbatches: int, rounds: int) -> tuple[float, float]:
    """Returns processor seconds of tracing and of compiling one update."""
    config = from_config_dict(
        {
            "model": {"compute_dtype": "bfloat16", "remat": "full"},
            "algorithm": {"recipe": "grpo", "samples_per_prompt": 8, "kl_in": "none"},
            "data": {"max_prompt_tokens": TOKENS // 2},
            "rollout": {"max_response_tokens": TOKENS // 2},
            "trainer": {
                "prompts_per_step": SEQUENCES // 8,
                "max_tokens_per_microbatch": TOKENS * SEQUENCES // FSDP // microbatches,
                "shared_prompts": "off",
            },
            "rewards": {"functions": {"length": {"function": "length"}}},
            "mesh": {"stage": 2, "fsdp": FSDP, "tensor": 2, "stage_rounds": rounds},
        }
    )
    shape = dataclasses.replace(SHAPES["Qwen2.5-0.5B"], num_layers=layers)
    models = compiled_memory.abstract_models(config, shape, jax.devices())
    begin = time.process_time()
    lowered = compiled_memory.program_lowerings(config, models)["train"]()
    traced = time.process_time()
    lowered.compile()
    return traced - begin, time.process_time() - traced


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    seconds(2, 2, 1)  # what is done once in a process
    print("| layers | microbatches | rounds | tracing s | compiling s |")
    print("|---|---|---|---|---|")
    for layers, microbatches, rounds in ((4, 2, 1), (4, 8, 1), (16, 2, 1), (16, 8, 1), (16, 8, 8)):
        traced, compiled = seconds(layers, microbatches, rounds)
        print(
            f"| {layers} | {microbatches} | {rounds} | {traced:.1f} | {compiled:.1f} |", flush=True
        )


if __name__ == "__main__":
    main()
