"""Compiles the policy update with rows split over a sequence axis, ahead of time for TPUs.

`python benchmarks/long_rows.py` (with `libtpu` installed; no TPU needed)

Llama 3.1 8B, float32 weights and AdamW moments, bfloat16 compute, every layer recomputed in the
backward pass; one sequence of maximum length for each group of `--sequence` devices. Bytes are per
device, from the compiler's report.
"""

import argparse
import os
import time
from collections.abc import Iterator

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.models import attention
from jaxrl_llm.planning import compiled_memory, published_shapes


def compiled(arguments: argparse.Namespace, form: str) -> str:
    """Returns bytes and compile time of the update with this form of sequence attention."""
    rows = arguments.fsdp
    values = {
        "model": {"compute_dtype": "bfloat16", "remat": "full"},
        "algorithm": {"recipe": "grpo", "samples_per_prompt": rows},
        "data": {"max_prompt_tokens": arguments.tokens // 2},
        "rollout": {"max_response_tokens": arguments.tokens // 2},
        "trainer": {
            "prompts_per_step": 1,
            "max_tokens_per_microbatch": arguments.tokens // arguments.sequence,
        },
        "rewards": {"functions": {"length": {"function": "length"}}},
        "mesh": {
            "fsdp": rows,
            "sequence": arguments.sequence,
            "sequence_attention": form,
        },
    }
    devices = topologies.get_topology_desc(arguments.topology, platform="tpu").devices
    begin = time.perf_counter()
    shape = published_shapes.SHAPES["Llama-3.1-8B"]
    config = from_config_dict(values)
    models = compiled_memory.abstract_models(config, shape, devices)
    lowered = compiled_memory.program_lowerings(config, models)["train"]()
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    found, spent = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return f"{found / 1e9:.2f} | {spent / 1e9:.2f} | {time.perf_counter() - begin:.0f}"


def on_cpu() -> Iterator[str]:
    """Yields memory and time of attention over two rows, in blocks and with all scores at once."""
    keys = jax.random.split(jax.random.key(0), 3)
    heads = zip(keys, (16, 2, 2), strict=True)
    q, k, v = (jax.random.normal(key, (2, 2048, number, 64)) for key, number in heads)
    segment_ids = jnp.ones((2, 2048), jnp.int32)

    def total(q, k, v):
        return attention.full_attention(q, k, v, segment_ids).sum()

    for block in (512, 2048):
        attention.QUERY_BLOCK = block
        program = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, v).compile()
        jax.clear_caches()  # so that it is traced again
        jax.block_until_ready(program(q, k, v))
        begin = time.process_time()
        jax.block_until_ready(program(q, k, v))
        spent = time.process_time() - begin
        mib = program.memory_analysis().temp_size_in_bytes / 2**20
        yield f"| blocks of {block} queries | {mib:.0f} MiB | {spent:.1f} s of CPU |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--fsdp", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a sequence")
    parser.add_argument("--cpu", action="store_true", help="measure attention alone, on this CPU")
    parser.add_argument("--forms", nargs="+", default=["all_to_all", "ring"])
    arguments = parser.parse_args()
    if arguments.cpu:
        print("\n".join(on_cpu()))
        return
    print("| attention | arguments GB | temporary GB | compile s |\n|---|---|---|---|")
    for form in arguments.forms:
        print(f"| {form} | {compiled(arguments, form)} |", flush=True)


if __name__ == "__main__":
    main()
