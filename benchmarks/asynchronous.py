"""Steps per hour of the ways to sample ahead, where a few responses are much longer than most.

    python benchmarks/asynchronous.py           # simulated device time: says nothing of a processor
    python benchmarks/asynchronous.py --real    # what this processor needs, nothing simulated

Each way is a run of the package's own loop by two processes of one device: the first learns, the
second samples, or both do both ("same devices"). Lengths of responses are lognormal, the 99th
percentile ten times the median, the same in every run. Weights are random: 0.05M parameters, with
`--real` 11M, and then each process has a core of its own, and a step has a quarter of the prompts.

SIMULATED DEVICE TIME. The programs run on the processor, but their devices count as busy until a
clock says otherwise, and the host sleeps until then: a decode step takes `--decode_s` for any
number of slots (a decode step on an accelerator reads all weights), each token that is read
`--read_s`, what a learner does in a step `--learn_s` on its half of the devices and half of that on
all of them. A device does one thing after the other. The figures tell what the order of work gains,
for devices with these times; they are no measurement of an accelerator.

It prints a table: steps per hour by the mean of the steps in the middle of a run, and that over the
first way's.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Name, flags of trainer.*, whether all devices do both.
WAYS = {
    "synchronous": ({}, False),
    "one step ahead": ({"sampling": "async", "new_weights": "drain"}, False),
    "interrupted, K = 1": ({"sampling": "async"}, False),
    "interrupted, K = 4": ({"sampling": "async", "max_staleness": 4}, False),
    "kept, K = 4": ({"sampling": "async", "max_staleness": 4, "new_weights": "keep"}, False),
    "synchronous, same devices": ({}, True),
    "interrupted, K = 4, same devices": ({"sampling": "async", "max_staleness": 4}, True),
}
# Tokens of a response, by whether the run is real; the longest has twelve times as many.
MEDIAN = {False: 16, True: 64}
# Sizes of the model, by the same.
MODELS = {
    False: {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_size": 128},
    True: {
        "hidden_size": 384,
        "num_layers": 6,
        "num_heads": 6,
        "num_kv_heads": 6,
        "mlp_size": 1024,
    },
}
_COMPILES_FAST = (  # programs of many shapes, each for a few steps
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Steps that are measured: programs are compiled, and work is in flight. Afterwards some are traced,
# and in the last ones nothing more is begun.
FIRST, TRACED, REST = 4, 3, 5


def score(data_source, solution_str, ground_truth, extra_info):
    """Returns a reward that differs within groups, so that every step is learned from."""
    return sum(letter.isdigit() for letter in solution_str) / max(1, len(solution_str))


class Device:
    """When a device that does one thing after the other has done what it was given."""

    def __init__(self):
        self.free_at = 0.0

    def give(self, seconds: float) -> float:
        """Returns when that will be done."""
        self.free_at = max(self.free_at, time.perf_counter()) + seconds
        return self.free_at


def wait(until: float) -> None:
    time.sleep(max(0.0, until - time.perf_counter()))


def drawn_length(key, median: int) -> int:
    """Returns the tokens of a response: by its key, so that it is the same in every run."""
    import numpy as np

    normal = np.random.default_rng([int(word) for word in key]).normal()
    return int(np.clip(median * 10 ** (normal / 2.326), 2, 12 * median))


def skew_lengths(median: int) -> None:
    """Every response ends where its own length says, not where the model would."""
    from jaxrl_llm.rollout import episode_runner, episodes

    left, params = episode_runner.EpisodeRunner._remaining_tokens, episodes.sampling_params

    def shorter(self, episode):
        tokens = sum(len(sequence.tokens) for sequence in episode)
        return min(left(self, episode), drawn_length(episode[0].key, median) - tokens)

    def without_stops(*args):
        return dataclasses.replace(params(*args), stop_tokens=())

    episode_runner.EpisodeRunner._remaining_tokens, episodes.sampling_params = (
        shorter,
        without_stops,
    )


def simulate(decode_s: float, read_s: float, learn_s: float, num_updates: int, same: bool) -> None:
    """Makes devices as slow as the module's text says."""
    from jaxrl_llm.learner import update
    from jaxrl_llm.metrics import timers
    from jaxrl_llm.rollout.engine import engine
    from jaxrl_llm.sampling import async_source

    learner = Device()
    sampler = learner if same else Device()
    chunks: dict[int, collections.deque] = collections.defaultdict(collections.deque)
    decode, take, insert = (getattr(engine.Engine, n) for n in ("_dispatch", "_take", "_insert"))
    learn, seconds, is_ready = update.Updater.update, timers.Clock.seconds, async_source._all_ready

    def _dispatch(self, *args):
        chunks[id(self)].append(sampler.give(self.chunk_steps * decode_s))
        return decode(self, *args)

    def _take(self, chunk):
        before = self.statistics.decode_steps
        take(self, chunk)
        # A chunk ends early where slots are free and samples wait: all after it comes earlier.
        saved = (self.chunk_steps - (self.statistics.decode_steps - before)) * decode_s
        sampler.free_at -= saved
        of_self = chunks[id(self)]
        until = of_self.popleft() - saved
        chunks[id(self)] = collections.deque(later - saved for later in of_self)
        wait(until)

    def _insert(self, prefix, prompts, version):
        tokens = sum(len(sample.prompt) for sample in prompts)
        wait(sampler.give(tokens * read_s))
        return insert(self, prefix, prompts, version)

    def slow_update(self, *args, **kwargs):
        learner.give((learn_s / 2 if same else learn_s) / num_updates)
        return learn(self, *args, **kwargs)

    def slow_seconds(self):
        wait(learner.free_at)
        return seconds(self)

    def slow_ready(tree):
        return time.perf_counter() >= learner.free_at and is_ready(tree)

    engine.Engine._dispatch, engine.Engine._take, engine.Engine._insert = _dispatch, _take, _insert
    update.Updater.update, timers.Clock.seconds = slow_update, slow_seconds
    async_source._all_ready = slow_ready


def config(arguments, way: str):
    """Returns the flags of a run."""
    trainer, same = WAYS[way]
    settings = {
        "warm_start.num_steps": 0,
        "rollout.max_response_tokens": 12 * MEDIAN[arguments.real],
        "rollout.chunk_steps": 16,
        "rollout.stop_tokens": (),
        "rewards.functions": {"digits": {"function": f"{pathlib.Path(__file__).resolve()}:score"}},
        "rewards.num_workers": 1,
        "trainer.sampling": "sync",
        "trainer.max_staleness": 1,
        "trainer.num_steps": arguments.steps,
        "trainer.prompts_per_step": 2 if arguments.real else 8,
        "algorithm.samples_per_prompt": 4,
        "trainer.minibatch_size": 8 if arguments.real else 16,
        "trainer.optimizer.learning_rate": 1e-5,
        "evaluation.every": 0,
        "evaluation.before": False,
        "evaluation.after": False,
        "checkpoint.every": 0,
        "metrics.console": False,
        "profiler.first_step": arguments.steps - REST - TRACED + 1 if arguments.keep else 0,
        "profiler.num_steps": TRACED,
        "mesh.data": 2 if same else 1,
        "mesh.fsdp": 1,
    }
    settings |= {f"model.{name}": size for name, size in MODELS[arguments.real].items()}
    settings |= {f"trainer.{name}": value for name, value in trainer.items()}
    if not same:
        learners = dict.fromkeys(("policy", "critic", "reference", "reward"), "learn")
        settings |= {
            "placement.choice": "by_hand",
            "placement.hosts": "own",
            "placement.pools": {"learn": {"devices": 1}, "sample": {"devices": 1}},
            "placement.roles": {**learners, "rollout": "sample"},
        }
    return [f"--config.{name}={value}" for name, value in settings.items()]


def measure(arguments, way: str) -> dict[str, float]:
    """Runs one way in two processes; returns seconds of a step, idle shares and mean staleness."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if arguments.keep:
            folder = str(pathlib.Path(arguments.keep, re.sub(r"\W+", "_", way)))
            pathlib.Path(folder).mkdir(parents=True)
        told = [
            f"--{name}={getattr(arguments, name)}" for name in ("decode_s", "read_s", "learn_s")
        ]
        told += [f"--steps={arguments.steps}", f"--worker={way}", f"--folder={folder}"]
        told += ["--real"] if arguments.real else []
        told += [f"--keep={arguments.keep}"] if arguments.keep else []
        processes = []
        for process in range(2):
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "" if arguments.real else " ".join(_COMPILES_FAST),
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(process),
            }
            with pathlib.Path(folder, f"log{process}").open("w") as log:
                command = [sys.executable, __file__, *told]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(pathlib.Path(folder, "log0").read_text()[-3000:])
        lines = pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    steps = {line["step"]: line["data"] for line in map(json.loads, lines)}
    last = arguments.steps - REST - TRACED * bool(arguments.keep)
    numbers = [steps[step] for step in range(FIRST, last + 1)]

    def mean(name: str) -> float:
        return sum(of.get(name, 0.0) for of in numbers) / len(numbers)

    idle = [mean(f"perf/idle_share/{pool}") for pool in ("rollout", "learner")]
    names = ("training/off_policy/staleness/mean", "training/off_policy/staleness/max")
    return {
        "seconds": mean("timing_s/step"),
        "rollout": idle[0],
        "learner": idle[1],
        "staleness": mean(names[0]),
        "oldest": max(of.get(names[1], 0.0) for of in numbers),
        "longest": mean("response_length/max") / mean("response_length/mean"),
    }


def work(arguments) -> None:
    """One process of a run."""
    from jaxrl_llm.commands import command_line

    _, same = WAYS[arguments.worker]
    if arguments.real:  # before jax makes its threads
        os.sched_setaffinity(0, {int(os.environ["JAX_PROCESS_ID"])})
    skew_lengths(MEDIAN[arguments.real])
    if not arguments.real:
        simulate(arguments.decode_s, arguments.read_s, arguments.learn_s, 2, same)
    flags = config(arguments, arguments.worker)
    command_line.run(
        "train",
        [
            f"--config={ROOT}/configs/grpo_async_tiny.py",
            f"--workdir={arguments.folder}/run",
            *flags,
        ],
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", action="store_true", help="simulate no device time")
    parser.add_argument("--decode_s", type=float, default=0.06, help="of a decode step")
    parser.add_argument("--read_s", type=float, default=1e-4, help="of a token that is read")
    parser.add_argument("--learn_s", type=float, default=4.0, help="of a step's learning")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--keep", default="", help="new folder for the runs, with a trace of each")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="only these")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    if arguments.real:
        print("device time: of this processor")
    else:
        times = {name: getattr(arguments, name) for name in ("decode_s", "read_s", "learn_s")}
        print(f"device time: SIMULATED, {times}")
    print("| | steps per hour | ratio | rollout idle | learner idle | mean age | oldest |")
    print("|---|---|---|---|---|---|---|")
    base = 0.0
    for way in arguments.way or WAYS:
        found = types.SimpleNamespace(**measure(arguments, way))
        base = base or found.seconds
        idle = f"{found.rollout:.2f} | {found.learner:.2f}" if "ahead" in str(WAYS[way]) else "|"
        print(
            f"| {way} | {3600 / found.seconds:.0f} | {base / found.seconds:.2f} | {idle}"
            f" | {found.staleness:.2f} | {found.oldest_version:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
