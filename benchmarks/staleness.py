"""What stale samples cost: held-out accuracy with the default correction, and without.

    python benchmarks/staleness.py --seeds=3

Runs of `configs/grpo_async_tiny.py` from the same warm start: synchronous, and K versions behind,
with `algorithm.correction` as by default ("token") and "none". It is the worst case of a K: the
learner counts as slower than rollout, so that nearly every token is as old as K allows. (A run of
its own pace has younger samples; here what is asked of a clock is answered "not yet".)

It prints accuracies: the mean of the last two evaluations.
"""

import argparse
import functools
import json
import os
import pathlib
import statistics
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax

from jaxrl_llm.config import flags
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.learner import ahead
from jaxrl_llm.trainer import rl, supervised

ROOT = pathlib.Path(__file__).resolve().parents[1]
WAYS = {
    "synchronous": {"trainer.sampling": "now", "trainer.max_staleness": 1},
    "K = 1": {"trainer.max_staleness": 1},
    "K = 1, no correction": {"trainer.max_staleness": 1, "algorithm.correction": "none"},
    "K = 4": {"trainer.max_staleness": 4},
    "K = 4, no correction": {"trainer.max_staleness": 4, "algorithm.correction": "none"},
}
LEARNERS = dict.fromkeys(("policy", "critic", "reference", "reward"), "learn")


def settings(seed: int, num_steps: int) -> dict:
    """Returns what all runs have beside the config file: two pools, evaluations at the end."""
    return {
        "seed": seed,
        "trainer.num_steps": num_steps,
        "trainer.optimizer.schedule": "cosine",
        "trainer.optimizer.min_lr_ratio": 0.1,
        "data.arithmetic_eval_prompts": 256,
        "evaluation.every": 15,
        "checkpoint.every": 0,
        "metrics.console": False,
        "metrics.rollouts_every": 0,
        "metrics.tensorboard": False,
        "placement.choice": "by_hand",
        "placement.pools": {"learn": {"devices": 1}, "sample": {"devices": 1}},
        "placement.roles": {**LEARNERS, "rollout": "sample"},
        "mesh.data": 1,
        "mesh.fsdp": 1,
    }


def train(changes: dict) -> dict[str, float]:
    """Returns the numbers of a run."""
    values = flags.load(str(ROOT / "configs/grpo_async_tiny.py"))
    for name, value in changes.items():
        group, _, key = name.rpartition(".")
        place = functools.reduce(lambda at, part: at[part], filter(None, group.split(".")), values)
        place[key] = value
    with tempfile.TemporaryDirectory() as folder:
        rl.train(from_config_dict(values), folder)
        lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    name = next(name for name in steps[0] if name.startswith("val-core/"))
    accuracies = [numbers[name] for numbers in steps if name in numbers]
    of_age = "training/off_policy/staleness/mean"
    ages = [numbers[of_age] for numbers in steps if of_age in numbers]
    return {
        "before": accuracies[0],
        "accuracy": statistics.mean(accuracies[-2:]),
        "age": statistics.mean(ages[10:]) if ages else 0.0,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    ahead._is_ready = lambda pending: False
    warm_start = supervised.warm_start
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        taught: list = []

        def same_start(config, models, run, taught=taught):
            if not taught:
                params = warm_start(config, models, run)
                taught.append((jax.device_get(params), jax.tree.map(lambda a: a.sharding, params)))
            return jax.device_put(*taught[0])

        supervised.warm_start = same_start
        for way, changes in WAYS.items():
            found[way].append(train({**settings(seed, arguments.steps), **changes}))
            print(json.dumps({"seed": seed, "way": way, **found[way][-1]}), flush=True)
    print("| | mean age of a token | held-out accuracy by seed | mean |")
    print("|---|---|---|---|")
    for way, runs in found.items():
        accuracies = [run["accuracy"] for run in runs]
        age = statistics.mean(run["age"] for run in runs)
        texts = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
        print(f"| {way} | {age:.2f} | {texts} | {statistics.mean(accuracies):.3f} |")


if __name__ == "__main__":
    main()
