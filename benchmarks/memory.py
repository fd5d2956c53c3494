"""Memory of the policy's update for each `model.remat`, from the report of the TPU compiler.

    TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu python benchmarks/memory.py  # compiled for v5e:2x4
    JAX_PLATFORMS=cpu python benchmarks/memory.py --time    # seconds on this CPU
    JAX_PLATFORMS=cpu python benchmarks/memory.py --logits  # the head, and dense logits

The first command needs the `libtpu` package but no TPU. It prints a Markdown table of bytes per
device for a model of one billion parameters (Llama 3.2 1B): bfloat16 compute, float32 weights,
fully sharded over eight devices, one row of 4096 tokens per device.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.models import heads
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.remat import REMAT_POLICIES
from jaxrl_llm.models.target_positions import AllTargets
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.planning import compiled_memory
from jaxrl_llm.planning.published_shapes import published_shape

GIB = 2**30
POLICIES = ("none", *REMAT_POLICIES)


def compiled_update(remat: str, devices, shape: Architecture, tokens: int, **model):
    """Returns the compiled update of a GRPO policy with one row of `tokens` tokens per device."""
    config = from_config_dict(
        {
            "model": {"compute_dtype": "bfloat16", "remat": remat, **model},
            "algorithm": {"recipe": "grpo", "kl_in": "none", "samples_per_prompt": 8},
            "data": {"max_prompt_tokens": tokens // 4},
            "rollout": {"max_response_tokens": tokens - tokens // 4},
            "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
            "trainer": {
                "prompts_per_step": max(1, len(devices) // 8),
                "max_tokens_per_microbatch": tokens,
            },
        }
    )
    models = compiled_memory.abstract_models(config, shape, devices)
    return compiled_memory.program_lowerings(config, models)["train"]().compile()


def memory_table(topology: str, tokens: int, policies: list[str]) -> None:
    """Prints the memory of each remat policy for a TPU slice; no TPU is needed."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    shape = published_shape("Llama-3.2-1B")
    print("| remat | arguments GiB | temporary GiB | host temporary GiB | compile s |")
    print("|---|---|---|---|---|")
    for remat in policies:
        begin = time.perf_counter()
        try:
            found = compiled_update(remat, devices, shape, tokens).memory_analysis()
        except jax.errors.JaxRuntimeError as error:
            print(f"| {remat} | does not fit: {str(error).splitlines()[0][:160]} |", flush=True)
            continue
        seconds = time.perf_counter() - begin
        sizes = (
            found.argument_size_in_bytes,
            found.temp_size_in_bytes,
            found.host_temp_size_in_bytes,
        )
        cells = " | ".join(f"{size / GIB:.2f}" for size in sizes)
        print(f"| {remat} | {cells} | {seconds:.0f} |", flush=True)


def time_table(policies: list[str]) -> None:
    """Prints seconds of forward and backward pass on this machine, best of five, in turns."""
    shape = dataclasses.replace(
        published_shape("Llama-3.2-1B"),
        vocab_size=8192,
        hidden_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        mlp_size=1024,
    )
    tokens = jnp.ones((2, 512), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(512), tokens.shape)
    programs = {}
    for remat in policies:
        network = Network(shape, remat=remat)

        def loss(params, network=network):
            return jnp.sum(network.forward(params, tokens, positions, tokens)[0])

        params = jax.jit(network.init)(jax.random.key(0))
        programs[remat] = jax.jit(jax.grad(loss)).lower(params).compile()
    best = dict.fromkeys(policies, float("inf"))
    for _ in range(5):
        for remat, program in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(program(params))
            best[remat] = min(best[remat], time.perf_counter() - begin)
    print("| remat | seconds | temporary MiB |")
    print("|---|---|---|")
    for remat, seconds in best.items():
        temporary = programs[remat].memory_analysis().temp_size_in_bytes / 2**20
        print(f"| {remat} | {seconds:.3f} | {temporary:.1f} |")


def head_table() -> None:
    """Prints temporary memory of log-probs and their gradient, in chunks and with dense logits."""
    rows, length, width, vocab = 4, 1024, 512, 32_768
    hidden = jax.ShapeDtypeStruct((rows, length, width), jnp.float32)
    weight = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocab, (rows, length)), jnp.int32)

    def in_chunks(hidden, weight):
        found, *_ = heads.token_statistics(
            hidden, weight, tokens, AllTargets(jnp.ones_like(tokens))
        )
        return jnp.sum(found)

    def dense(hidden, weight):
        logits = jnp.einsum("btd,vd->btv", hidden[:, :-1], weight)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return jnp.sum(picked)

    print("| head | temporary MiB |")
    print("|---|---|")
    for name, loss in (("dense", dense), ("in chunks", in_chunks)):
        program = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, weight).compile()
        print(f"| {name} | {program.memory_analysis().temp_size_in_bytes / 2**20:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the one row per device")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument(
        "--time", action="store_true", help="measure seconds on this machine instead"
    )
    parser.add_argument(
        "--logits", action="store_true", help="measure the memory of the head instead"
    )
    arguments = parser.parse_args()
    if arguments.logits:
        head_table()
    elif arguments.time:
        time_table(arguments.policies)
    else:
        memory_table(arguments.topology, arguments.tokens, arguments.policies)


if __name__ == "__main__":
    main()
