"""Trains the tiny configs with several seeds and prints a table of held-out accuracy.

`python benchmarks/accuracy.py --config=configs/grpo_tiny.py --config=configs/ppo_tiny.py`

Each run is a separate process with a new folder and without a compilation cache. Seconds are from
process start to process end.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Run(NamedTuple):
    """What a run reached."""

    before: float  # accuracy after the warm start
    after: float  # after RL
    seconds: float  # of the whole run
    difference: float  # mean |p - q| of sampled tokens between rollout and training


def run(config: str, seed: int, overrides: list[str]) -> Run:
    """Trains a config in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run(
            [
                sys.executable,
                str(ROOT / "launch" / "train.py"),
                f"--config={config}",
                f"--workdir={folder}/run",
                f"--config.seed={seed}",
                "--config.metrics.console=False",
                *overrides,
            ],
            check=True,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - began
        lines = pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]

    def values(name: str) -> list[float]:
        return [data[name] for data in steps if name in data]

    accuracies = values("val-core/arithmetic/mean@4")
    differences = values("training/rollout_probs_diff_mean")
    return Run(accuracies[0], accuracies[-1], seconds, sum(differences) / len(differences))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    arguments, overrides = parser.parse_known_args()
    print("| config | seed | after warm start | after RL | seconds |")
    print("|---|---|---|---|---|")
    for config in arguments.config:
        for seed in range(arguments.seeds):
            before, after, seconds, _ = run(config, seed, overrides)
            name = pathlib.Path(config).stem
            print(f"| {name} | {seed} | {before:.3f} | {after:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
