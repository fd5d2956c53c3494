"""Measures whatever accelerator is here: `benchmarks/accelerator.sh` runs it, see there.

One table: sampling with random weights of published shapes (tokens/s, share of the memory's
bandwidth), the update at long rows (share of the arithmetic), planned beside measured memory, and
whole iterations, beside TRL if `--peers` has its script (see `iteration.py`). The table is written
again after each row, so that a run which is cut off loses nothing.

Sampled lengths are log-normal, so many are short and few long. The share of bandwidth counts what a
decode step must read: all weights once, and the keys and values of live tokens.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import train

from jaxrl_llm.config import MeshConfig, RolloutConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.models import flops
from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.planning import accelerators as hardware
from jaxrl_llm.planning import compiled_memory, memory_plan, resolve_sizes
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.rollout.engine import kv_cache
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams
from jaxrl_llm.sampling import policy_sampler
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.trainer import rl

ROOT = pathlib.Path(__file__).resolve().parents[1]
Row = tuple[str, str, str, str]  # what, of which work, value, beside what it could be


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured; a rehearsal measures the same with less work."""

    shapes: dict[str, Architecture]
    sequences: tuple[int, ...] = (64, 256)
    prompt_tokens: int = 128
    longest: int = 1024  # sampled tokens
    median: int = 160
    row_tokens: int = 4096
    rows: int = 8
    steps: int = 4  # of whole iterations
    settings: tuple[dict, ...] = ({}, {"quantization": "int8", "cache_dtype": "fp8"})


FULL = Sizes({n: SHAPES[n] for n in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "SmolLM2-135M")})
_TINY = dataclasses.replace(
    SHAPES["SmolLM2-135M"], vocab_size=512, hidden_size=64, num_layers=2, mlp_size=128
)
REHEARSAL = Sizes({"tiny": _TINY}, (4, 8), 8, 24, 8, 64, 4, 3)


def _compute_dtype() -> str:  # a CPU has no bfloat16 arithmetic of its own
    return "float32" if jax.devices()[0].platform == "cpu" else "bfloat16"


def sampling(sizes: Sizes, name: str, sequences: int, settings: dict) -> Row:
    """Measures the engine on one device, every sequence with a prompt of its own."""
    shape, mesh = sizes.shapes[name], mesh_lib.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    network = Network(shape, compute_dtype=_compute_dtype())
    rollout = policy_sampler.rollout_network(RolloutConfig(**settings), network, mesh)
    mover = policy_sampler.resharder(network, rollout, mesh, "tensor")
    with jax.set_mesh(mesh):
        params = mover.reshard(mover.zeros(), jax.jit(network.init)(jax.random.key(0)))
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(np.log(sizes.median), 0.8, sequences))
    lengths = np.clip(lengths.astype(int), 1, sizes.longest)
    prompts = random.integers(2, shape.vocab_size, (sequences, sizes.prompt_tokens)).tolist()
    longest = sizes.prompt_tokens + sizes.longest
    engine = Engine(rollout, mesh, num_slots=sequences, max_tokens=longest)
    taken = []
    for seed in range(2):  # the first compiles
        keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(seed), sequences)))
        work = [
            Request(tuple(prompt), keys[i : i + 1], (SamplingParams(int(lengths[i])),))
            for i, prompt in enumerate(prompts)
        ]
        began = time.perf_counter()
        engine.generate(params, work)
        taken.append(time.perf_counter() - began)
    done = engine.statistics
    of_weights = sum(a.nbytes for a in jax.tree.leaves(params))
    of_token = kv_cache.cache_bytes(rollout, mesh, 1, 1)
    seen = (lengths * sizes.prompt_tokens + lengths * (lengths + 1) / 2).sum()
    rate = (done.decode_steps * of_weights + seen * of_token) / done.decode_s
    known = hardware.local_device(jax.devices())
    share = rate / known.memory_bandwidth if known and known.memory_bandwidth else None
    how = ", ".join(map(str, settings.values())) or rollout.compute_dtype
    return (
        f"sampling, {name}, {how}",
        f"{sequences} sequences, {lengths.sum()} tokens",
        f"{lengths.sum() / taken[-1]:.0f} tokens/s",
        f"{share:.0%} of the bandwidth" if share else f"{rate / 1e9:.1f} GB/s",
    )


def _config(sizes: Sizes, shape: Architecture):
    """Returns the config of an update of GRPO on rows of the longest sequences."""
    half = sizes.row_tokens // 2
    values = {
        "algorithm": {"recipe": "grpo", "samples_per_prompt": 4},
        "model": {"compute_dtype": _compute_dtype()},
        "data": {"max_prompt_tokens": half},
        "rollout": {"max_response_tokens": half, "num_slots": 8},
        "trainer": {"prompts_per_step": max(1, sizes.rows // 4), "shared_prompts": "off"},
        "rewards": {"functions": {"length": {"function": "length"}}},
        "mesh": {"fsdp": -1},
    }
    return resolve_sizes.choose_sizes(from_config_dict(values), shape, jax.devices())


def updating(sizes: Sizes) -> Iterator[Row]:
    """Measures updates of the smallest large shape, and memory beside the plan."""
    name, shape = next(iter(sizes.shapes.items()))
    config = _config(sizes, shape)
    models = compiled_memory.abstract_models(config, shape, jax.devices())
    work, seconds = train.Work(config, models), []
    for _ in range(4):
        began = time.perf_counter()
        jax.block_until_ready(work.update())
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:])
    lengths = np.full(config.sequences_per_step, config.max_sequence_tokens)
    # Forward and backward pass, and the reference's forward pass.
    done = flops.training(shape, lengths) + flops.forward(shape, lengths)
    mfu = done / median / hardware.peak_flops(jax.devices())
    yield (
        f"update, {name}",
        f"{len(lengths)} rows of {lengths[0]} tokens, remat {config.model.remat}",
        f"{lengths.sum() / median:.0f} tokens/s",
        f"{mfu:.1%} of the arithmetic" if mfu > 0 else f"{done / median / 1e9:.1f} GFLOP/s",
    )
    device = hardware.local_device(jax.devices())
    stats = jax.devices()[0].memory_stats() or {}
    if device is None or "peak_bytes_in_use" not in stats:
        yield "memory, planned and measured", name, "-", "the device does not tell its memory"
        return
    plan = memory_plan.make_plan(config, shape, (), device, len(jax.devices()))
    wanted, peak = plan.programs["train"].total, stats["peak_bytes_in_use"]
    yield (
        "memory of the update",
        name,
        f"{peak / 1e9:.2f} GB",
        f"planned {wanted / 1e9:.2f} GB, measured to planned {peak / wanted:.2f}",
    )


def iterations(sizes: Sizes) -> Row:
    """Measures whole steps of `rl.train` with a random model of the first shape's sizes."""
    name, shape = next(iter(sizes.shapes.items()))
    fields = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "mlp_size")
    values = {
        "model": {field: getattr(shape, field) for field in fields},
        "algorithm": {"recipe": "grpo", "samples_per_prompt": 8},
        "data": {"max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": min(256, 2 * sizes.longest)},
        "trainer": {"prompts_per_step": 8, "num_steps": sizes.steps},
        "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
        "evaluation": {"before": False, "after": False},
        "metrics": {"console": False, "tensorboard": False, "rollouts_every": 0},
        "mesh": {"fsdp": -1},
    }
    with tempfile.TemporaryDirectory() as folder:
        rl.train(from_config_dict(values), pathlib.Path(folder) / "run")
        text = pathlib.Path(folder, "run", "metrics.jsonl").read_text()
    steps = [json.loads(line)["data"] for line in text.splitlines()]
    seconds = statistics.median(step["timing_s/step"] for step in steps[1:])
    tokens = statistics.median(step["response_length/mean"] for step in steps[1:])
    return (
        f"iteration of GRPO, {name}'s layers",
        f"64 sequences of {tokens:.0f} sampled tokens",
        f"{seconds:.3f} s",
        f"sampling {statistics.median(s['timing_s/gen'] for s in steps[1:]):.3f} s",
    )


def beside_trl(peers: str, model: str) -> Row:
    """Runs `iteration.py` with TRL, which generates with transformers."""
    command = [sys.executable, str(ROOT / "benchmarks" / "iteration.py"), f"--peers={peers}"]
    command += ["--models", model, "--systems", "jaxrl_llm", "trl", "--rounds", "1", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {r["system"]: r["iter_s"] for r in map(json.loads, _objects(done.stdout))}
    ours, theirs = found["jaxrl_llm"], found["trl"]
    beside = f"TRL {theirs:.3f} s, {theirs / ours:.2f} times ours"
    return "iteration beside TRL", model, f"{ours:.3f} s", beside


def _objects(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith('{"system"')]


def measurements(sizes: Sizes, peers: str, model: str) -> Iterator[Callable[[], list[Row]]]:
    """Yields what to measure, the most telling first."""
    first, *others = sizes.shapes
    yield functools.partial(_one, sampling, sizes, first, sizes.sequences[0], sizes.settings[0])
    yield lambda: list(updating(sizes))
    if peers:
        yield functools.partial(_one, beside_trl, peers, model)
    yield functools.partial(_one, iterations, sizes)
    rest = [(first, n, s) for n in sizes.sequences for s in sizes.settings][1:]
    rest += [(name, n, sizes.settings[0]) for name in others for n in sizes.sequences]
    for work in rest:
        yield functools.partial(_one, sampling, sizes, *work)


def _one(function: Callable[..., Row], *arguments) -> list[Row]:
    return [function(*arguments)]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="accelerator.md", help="file of the table")
    parser.add_argument("--seconds", type=float, default=480.0, help="begin nothing after these")
    parser.add_argument("--peers", default="", help="folder with grpo_trl.py, see iteration.py")
    parser.add_argument("--model", default="", help="with --peers: a folder with workload.json")
    parser.add_argument("--rehearse", action="store_true", help="the same with tiny models")
    arguments = parser.parse_args()
    began, sizes = time.monotonic(), REHEARSAL if arguments.rehearse else FULL
    kind = jax.devices()[0].device_kind
    lines = [
        f"{len(jax.devices())} x {kind}, jax {jax.__version__}",
        "",
        "| what | work | value | beside it |",
        "|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    slowest = 0.0
    for measure in measurements(sizes, arguments.peers, arguments.model):
        now = time.monotonic() - began
        if now + slowest > arguments.seconds:
            rows = [("cut off", "", f"after {now:.0f} s", "the rest was not measured")]
        else:
            try:
                rows = measure()
            except Exception as error:  # one that fails leaves the others
                rows = [("failed", "", type(error).__name__, str(error).split("\n")[0][:200])]
            slowest = max(slowest, time.monotonic() - began - now)
        more = ["| " + " | ".join(row) + " |" for row in rows]
        print("\n".join(more), flush=True)
        lines += more
        pathlib.Path(arguments.out).write_text("\n".join(lines) + "\n")
        if rows[0][0] == "cut off":
            break


if __name__ == "__main__":
    main()
