"""Compiles our policy update ahead of time for TPUs and compares it with MaxText's train step.

`python benchmarks/compile_tpu.py` (with `libtpu` installed; no TPU needed)

Llama 3.1, Gemma 3 and models of experts with float32 weights and AdamW moments, bfloat16 compute,
every layer recomputed in the backward pass, with the sequences, tokens and devices of MaxText's
run. Ours is the whole update of GRPO (ratio loss, clipping of the gradient, AdamW, metrics); theirs
is a train step on the next-token loss. Bytes are per device, from the compiler's report. Theirs
were measured with MaxText 0.2.5 (`train_compile`), libtpu 0.0.51 and jax 0.12.0 on two cores.
"""

import argparse
import dataclasses
import json
import os
import time

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
from jax.experimental import topologies

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import compiled_memory, published_shapes


@dataclasses.dataclass(frozen=True)
class Setting:
    """One run of MaxText and the report of its compiler."""

    model: str
    topology: str
    mesh: dict[str, int]
    sequences: int  # of one update, over all devices
    tokens: int  # of a sequence
    arguments_gb: float
    temporary_gb: float
    compile_s: float
    microbatches: int = 1

    @property
    def name(self) -> str:
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        return f"{self.model}, {self.topology}, {mesh}, {self.sequences} x {self.tokens}"


def _stages(stages: int, rounds: int, fsdp: int) -> dict[str, int]:
    return {"stage": stages, "stage_rounds": rounds, "fsdp": fsdp}


SETTINGS = (
    Setting("Llama-3.1-8B", "v5e:4x4", {"fsdp": 16}, 16, 2048, 6.03, 4.02, 87),
    Setting("Llama-3.1-8B", "v5p:2x2x2", {"fsdp": 8}, 16, 4096, 12.05, 9.70, 103),
    Setting("Llama-3.1-8B", "v5p:2x2x2", {"fsdp": 4, "tensor": 2}, 16, 4096, 12.05, 12.12, 72),
    Setting("Llama-3.1-70B", "v5p:4x4x4", {"fsdp": 64}, 64, 4096, 13.24, 15.66, 107),
    Setting("Mixtral-8x7B", "v5p:4x4x4", {"fsdp": 64}, 64, 4096, 8.76, 10.12, 201),
    Setting("Mixtral-8x7B", "v5p:4x4x4", {"fsdp": 8, "expert": 8}, 64, 4096, 8.76, 11.17, 213),
    Setting("Qwen3-30B-A3B", "v5p:4x4x4", {"fsdp": 16, "expert": 4}, 64, 4096, 5.73, 8.36, 379),
    Setting("DeepSeek-V3", "v5p:8x8x8", {"fsdp": 64, "expert": 8}, 512, 4096, 15.78, 40.37, 378),
    Setting("gemma-3-27b", "v5p:2x2x4", {"fsdp": 16}, 16, 4096, 20.28, 19.23, 239),
    Setting("Llama-3.1-8B", "v5p:2x2x2", _stages(2, 16, 4), 16, 4096, 13.62, 9.22, 193, 4),
    Setting("Llama-3.1-70B", "v5p:4x4x4", _stages(4, 20, 16), 128, 4096, 14.41, 23.28, 137, 8),
    Setting("Llama-3.1-70B", "v5p:4x4x4", _stages(4, 1, 16), 128, 4096, 14.41, 80.27, 297, 8),
)


def compiled(setting: Setting, overrides: dict[str, dict[str, object]]) -> dict[str, object]:
    """Returns GB per device and compile seconds of our update in the same setting."""
    row_shards = setting.mesh["fsdp"] * setting.mesh.get("expert", 1)
    values: dict[str, dict[str, object]] = {
        "model": {"compute_dtype": "bfloat16", "remat": "full"},
        "algorithm": {"recipe": "grpo", "samples_per_prompt": 8},
        "data": {"max_prompt_tokens": setting.tokens // 2},
        "rollout": {"max_response_tokens": setting.tokens // 2},
        "trainer": {
            "prompts_per_step": setting.sequences // 8,
            "max_tokens_per_microbatch": setting.tokens
            * setting.sequences
            // (row_shards * setting.microbatches),
        },
        "rewards": {"functions": {"length": {"function": "length"}}},
        "mesh": dict(setting.mesh),
    }
    for group, fields in overrides.items():
        values[group] |= fields
    devices = topologies.get_topology_desc(setting.topology, platform="tpu").devices
    begin, computed = time.perf_counter(), time.process_time()
    config = from_config_dict(values)
    models = compiled_memory.abstract_models(
        config, published_shapes.SHAPES[setting.model], devices
    )
    lowered = compiled_memory.program_lowerings(config, models)["train"]()
    traced = time.perf_counter()
    program = lowered.compile()
    done = time.perf_counter()
    memory = program.memory_analysis()
    return {
        "setting": setting.name,
        "arguments_gb": memory.argument_size_in_bytes / 1e9,
        "temporary_gb": memory.temp_size_in_bytes / 1e9,
        "aliased_gb": memory.alias_size_in_bytes / 1e9,
        "trace_s": traced - begin,
        "compile_s": done - traced,
        "processor_s": time.process_time() - computed,
        "jax": jax.__version__,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=int, nargs="+", default=range(len(SETTINGS)))
    parser.add_argument(
        "--overrides", type=json.loads, default={}, help="JSON of config groups to change"
    )
    arguments = parser.parse_args()
    print("| setting | arguments GB, theirs / ours | temporary GB | ratio | compile s |")
    print("|---|---|---|---|---|")
    for index in arguments.settings:
        theirs = SETTINGS[index]
        ours = compiled(theirs, arguments.overrides)
        print(
            f"| {theirs.name} | {theirs.arguments_gb:.2f} / {ours['arguments_gb']:.2f}"
            f" | {theirs.temporary_gb:.2f} / {ours['temporary_gb']:.2f}"
            f" | {ours['temporary_gb'] / theirs.temporary_gb:.2f}"
            f" | {theirs.compile_s:.0f} / {ours['trace_s'] + ours['compile_s']:.0f} |"
        )
        print(json.dumps(ours), flush=True)


if __name__ == "__main__":
    main()
