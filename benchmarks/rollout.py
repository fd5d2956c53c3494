"""Tokens per second of the rollout engine, compared with its peers and with an upper bound.

`python benchmarks/rollout.py --model=FOLDER --workload=r1 --peers=SCRIPTS --peer-home=HOME`

A model folder holds a Hugging Face checkpoint and `workload.json` (`prompt_ids`, `lengths`).
Workloads: r1 is 8 prompts x 4 samples of 128 tokens each. r2 is 32 prompts x 4 samples with the
lengths in `lengths`, many short and few long. Random weights, temperature 1, no stop tokens.

Peers are `rollout_hf.py` and `rollout_tunix.py` in SCRIPTS. The interpreters
`HOME/venv-torch/bin/python` and `HOME/venv-tunix/bin/python` run them. Without `--peers` there are
none. The upper bound is one `lax.while_loop` over a full batch of equal lengths, in turns with
ours: no host work, no queue, no change of window. With `--one-core` everything runs on one core and
is timed by its CPU seconds, which other load disturbs less. `--speculate=K` compares an engine with
K draft tokens per step with one without. `--greedy` makes every sample greedy: the text of a small
random network then soon repeats itself.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--workload", action="append", choices=["r1", "r2"], required=True)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--chunk-steps", type=int, default=16)
    parser.add_argument("--cache-tokens", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", default="")
    parser.add_argument("--peer-home", default="")
    parser.add_argument("--one-core", action="store_true")
    parser.add_argument("--speculate", type=int, default=0)
    parser.add_argument("--greedy", action="store_true")
    return parser.parse_args()


class Ours:
    """The engine with one model and workload."""

    def __init__(
        self, folder: pathlib.Path, workload: str, args: argparse.Namespace, draft_tokens: int = 0
    ):
        import jax

        from jaxrl_llm.config import MeshConfig, SpeculationConfig
        from jaxrl_llm.models.hf import checkpoint
        from jaxrl_llm.models.transformer import Network
        from jaxrl_llm.rollout.engine.engine import Engine
        from jaxrl_llm.sampling import policy_sampler
        from jaxrl_llm.sharding import mesh as mesh_lib

        self.mesh = mesh_lib.make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
        network = Network(checkpoint.read_architecture(folder))
        axes, units = network.logical_axes(), network.sharding_units
        abstract = network.abstract_params()
        layout = mesh_lib.shardings(abstract, axes, self.mesh, mesh_lib.TRAIN, units)
        weights = checkpoint.load(folder, network, layout)
        self.network = network.for_decoding(self.mesh)
        mover = policy_sampler.resharder(network, self.network, self.mesh, "tensor")
        with jax.set_mesh(self.mesh):
            self.params = mover.reshard(mover.zeros(), weights)
        work = json.loads((folder / "workload.json").read_text())
        prompts, limits = (8, [128] * 32) if workload == "r1" else (32, work["lengths"])
        self.prompts = [tuple(ids) for ids in work["prompt_ids"][:prompts]]
        self.limits = [limits[4 * i : 4 * i + 4] for i in range(prompts)]
        self.useful = sum(map(sum, self.limits))
        self.engine = Engine(
            self.network,
            self.mesh,
            num_slots=args.slots,
            max_tokens=64 + max(map(max, self.limits)),
            chunk_steps=args.chunk_steps,
            speculation=SpeculationConfig(draft_tokens=draft_tokens),
            cache_tokens=args.cache_tokens,
        )
        self.temperature = 0.0 if args.greedy else 1.0

    def run(self, seed: int) -> None:
        import jax
        import numpy as np

        from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

        keys = jax.random.split(jax.random.key(seed), (len(self.prompts), 4))
        keys = np.asarray(jax.random.key_data(keys))
        self.engine.generate(
            self.params,
            [
                Request(
                    prompt,
                    keys[i],
                    tuple(SamplingParams(n, self.temperature) for n in self.limits[i]),
                )
                for i, prompt in enumerate(self.prompts)
            ],
        )


def one_loop(ours: Ours) -> Callable[[int], None]:
    """Returns a function that samples r1's batch in one loop on the device, including prefill."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_llm.rollout.engine import decode_steps, device_programs, host_inputs, prefill
    from jaxrl_llm.rollout.engine.requests import NUM_STOP_TOKENS
    from jaxrl_llm.rollout.engine.token_sampling import SamplerState

    slots, new, network = 32, 128, ours.network
    own = network.decode_attention is not None
    # The first of three pages of 64 tokens is the prompt's.
    table = np.repeat(np.arange(8), 4)[:, None] * np.array([1, 0, 0]) + [0, 8, 8]
    writes = host_inputs.page_writes([(i, i, 0) for i in range(8)], 8, 9)
    zeros, ones = jnp.zeros(slots), jnp.ones(slots)

    @jax.jit
    def run(params, prompts, keys):
        prefix = prefill.prefill(network, params, prompts)
        sampler = SamplerState(keys, ones, zeros.astype(int), ones, zeros, zeros.astype(int))
        state = device_programs.empty_state(network, slots, 9, 64)
        admission = device_programs.InsertArgs(
            jnp.repeat(jnp.arange(8), 4),
            jnp.arange(slots),
            jnp.full(slots, new),
            jnp.full((slots, NUM_STOP_TOKENS), -1),
            sampler,
            jnp.zeros(slots, jnp.int32),
        )
        switches = {"filtered": False, "num_top": 0}
        state, first = device_programs.insert(state, prefix, admission, writes, **switches)
        _, rest = decode_steps.generate(
            network,
            params,
            state,
            jnp.asarray(table, jnp.int32),
            jnp.int32(slots),
            num_steps=new - 1,
            num_slots=slots,
            window=64,
            reader="own" if own else "gather",
            **switches,
        )
        return first.tokens, rest.tokens

    prompts = host_inputs.prompt_rows(ours.prompts[:8], 64)

    def sample(seed: int) -> None:
        keys = jax.random.key_data(jax.random.split(jax.random.key(seed), slots))
        with jax.set_mesh(ours.mesh):
            jax.device_get(run(ours.params, prompts, keys))

    return sample


def peers(folder: pathlib.Path, workload: str, args: argparse.Namespace) -> dict[str, float]:
    """Returns the tokens per second of every peer."""
    scripts, home = pathlib.Path(args.peers), pathlib.Path(args.peer_home)
    threads = "1" if args.one_core else str(os.cpu_count())
    common = ["--model", str(folder), "--workload", workload, "--reps", str(args.repeats)]
    torch, tunix = (str(home / name / "bin" / "python") for name in ("venv-torch", "venv-tunix"))
    hf = [torch, str(scripts / "rollout_hf.py"), *common, "--threads", threads, "--engine"]
    commands = {
        "transformers, static batch": [*hf, "static"],
        "transformers, continuous batching": [*hf, "cb"],
        "Tunix": [tunix, str(scripts / "rollout_tunix.py"), *common],
    }
    env = os.environ | {"PEER_HOME": str(home)}
    env |= {"PEER_CLOCK": "cpu"} if args.one_core else {"PEER_PATIENCE": "0"}
    found = {}
    for name, command in commands.items():
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
        found[name] = json.loads(done.stdout.splitlines()[-1])["tok_per_s"]
        print(f"  {name}: {found[name]:.0f} tokens/s", flush=True)
    return found


def compare_speculation(
    ours: Ours, folder: pathlib.Path, workload: str, args: argparse.Namespace, clock
) -> None:
    """Runs the engine with and without draft tokens, in turns."""
    other = Ours(folder, workload, args, args.speculate)
    seconds: dict[Ours, list[float]] = {ours: [], other: []}
    for seed in range(args.repeats + 1):
        for engine, taken in seconds.items():
            taken.append(timed(engine.run, seed, clock))
    plain, guessing = (statistics.median(taken[1:]) for taken in seconds.values())
    found = other.engine.statistics
    print(
        f"  {args.speculate} guesses a step: {other.useful / guessing:.0f} useful tokens/s,"
        f" {plain / guessing:.2f} times {ours.useful / plain:.0f} without;"
        f" {found.acceptance:.1%} of guesses right, {found.tokens_per_forward:.2f} tokens a step",
        flush=True,
    )


def timed(run: Callable[[int], None], seed: int, clock) -> float:
    """Returns the seconds of one run."""
    began = clock()
    run(seed)
    return clock() - began


def measure(folder: pathlib.Path, workload: str, args: argparse.Namespace) -> None:
    clock = time.process_time if args.one_core else time.perf_counter
    print(f"{folder.name} {workload}", flush=True)
    ours = Ours(folder, workload, args)
    ours.run(0)
    loop = one_loop(ours) if workload == "r1" else None
    if loop:
        loop(0)
    rows: list[tuple[float, Any]] = []
    loops: list[float] = []

    def repeat() -> None:
        for _ in range(args.repeats):
            seed = len(rows) + 1
            rows.append((timed(ours.run, seed, clock), ours.engine.statistics))
            if loop:
                loops.append(timed(loop, seed, clock))

    repeat()
    compiled = ours.engine.num_compilations()
    theirs = peers(folder, workload, args) if args.peers else {}
    repeat()  # before and after the peers, because the speed of a machine drifts
    seconds = statistics.median(taken for taken, _ in rows)
    last = rows[-1][1]
    speed = ours.useful / seconds
    decoding = last.prefill_s + last.decode_s
    print(f"  ours: {speed:.0f} useful tokens/s, {seconds:.2f} s of {len(rows)} runs")
    print(
        f"  occupancy {last.occupancy:.1%} until the queue was empty,"
        f" {last.decode_tokens / (last.decode_steps * args.slots):.1%} of all slots and steps;"
        f" prefill {last.prefill_s / decoding:.0%}, decode {last.decode_s / decoding:.0%};"
        f" {last.prefill_positions / last.prefill_tokens - 1:.0%} padding of prompts;"
        f" {ours.engine.num_compilations() - compiled} compilations after the first runs"
    )
    layout = ours.engine.programs.pages
    dense = layout.num_slots * layout.max_tokens
    held, used = (n * layout.page_tokens for n in (layout.num_pages, last.peak_pages))
    print(
        f"  cache of {held} tokens, {held / dense:.2f} of slots x longest; {used} were held at the"
        f" most, {used / dense:.2f}; {last.num_preemptions} samples preempted,"
        f" {last.recomputed_tokens} tokens"
        " read again"
    )
    if args.speculate:
        compare_speculation(ours, folder, workload, args, clock)
    if loops:
        most = ours.useful / statistics.median(loops)
        print(f"  one loop on the device: {most:.0f} tokens/s; ours is {speed / most:.2f} of it")
    if theirs:
        best = max(theirs, key=lambda name: theirs[name])
        print(f"  {speed / theirs[best]:.2f} times the best peer ({best})", flush=True)


def main() -> None:
    args = arguments()
    if args.one_core:
        # Before jax counts the cores; child processes inherit it.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
    for folder in args.model:
        for workload in args.workload:
            measure(pathlib.Path(folder), workload, args)


if __name__ == "__main__":
    main()
