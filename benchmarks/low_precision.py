"""Trains the tiny GRPO config with and without eight bits in sampling, several seeds of each.

`python benchmarks/low_precision.py [--seeds=3] [--only=WORD,...]`

Prints held-out accuracy after RL and the mean difference |p - q| of sampled tokens between rollout
and training, by setting and seed, and the means of each setting.
"""

import argparse
import pathlib

import accuracy
import numpy as np

CONFIG = pathlib.Path(__file__).resolve().parents[1] / "configs" / "grpo_tiny.py"
INT8 = "--config.rollout.quantization=int8"
SETTINGS = {
    "as computed": [],
    "int8 weights": [INT8],
    "int8 weights, not corrected": [INT8, "--config.algorithm.correction=none"],
    "fp8 weights": ["--config.rollout.quantization=fp8"],
    "fp8 cache": ["--config.rollout.cache_dtype=fp8"],
    "int8 weights, fp8 cache": [INT8, "--config.rollout.cache_dtype=fp8"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="settings whose names contain one of these")
    arguments, overrides = parser.parse_known_args()
    print("| sampling | seed | accuracy after RL | mean difference of probabilities |")
    print("|---|---|---|---|")
    for name, settings in SETTINGS.items():
        if not any(word in name for word in arguments.only.split(",")):
            continue
        found = []
        for seed in range(arguments.seeds):
            run = accuracy.run(str(CONFIG), seed, [*settings, *overrides])
            found.append((run.after, run.difference))
            print(f"| {name} | {seed} | {run.after:.3f} | {run.difference:.5f} |", flush=True)
        after, difference = np.mean(found, axis=0)
        print(f"| {name} | mean | {after:.3f} | {difference:.5f} |", flush=True)


if __name__ == "__main__":
    main()
