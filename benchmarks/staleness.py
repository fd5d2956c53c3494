"""What stale samples cost: held-out accuracy with the default correction, and without.

    python benchmarks/staleness.py --seeds=3 --out=staleness.jsonl

Runs of `configs/grpo_async_tiny.py` from the same warm start: synchronous, and K versions behind,
with `algorithm.correction` as by default ("token") and "none". It is the worst case of a K: the
learner counts as slower than rollout, so that nearly every token is as old as K allows. (A run of
its own pace has younger samples; here what is asked of a clock is answered "not yet".)

It prints the accuracy halfway and at the end, of four answers to each of the 488 sums that no run
trains on (standard error of one figure at most 1.1 points, for independent answers). Each run that
ended is a line of `--out`; the next call does only what is missing there, so several calls may
share the work by seeds.
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
from jaxrl_llm.sampling import async_source
from jaxrl_llm.trainer import rl, supervised

ROOT = pathlib.Path(__file__).resolve().parents[1]
WAYS = {
    "synchronous": {"trainer.sampling": "sync", "trainer.max_staleness": 1},
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
        "data.arithmetic_eval_prompts": 488,
        "evaluation.every": num_steps // 2,
        "evaluation.before": False,
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
    """Returns the accuracy of a run halfway and at the end, and the mean age of its tokens."""
    values = flags.load(str(ROOT / "configs/grpo_async_tiny.py"))
    for name, value in changes.items():
        group, _, key = name.rpartition(".")
        place = functools.reduce(lambda at, part: at[part], filter(None, group.split(".")), values)
        place[key] = value
    with tempfile.TemporaryDirectory() as folder:
        rl.train(from_config_dict(values), folder)
        lines = pathlib.Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    name = next(n for numbers in steps for n in numbers if n.startswith("val-core/"))
    accuracies = [numbers[name] for numbers in steps if name in numbers]
    of_age = "training/off_policy/staleness/mean"
    ages = [numbers[of_age] for numbers in steps if of_age in numbers]
    return {
        "halfway": accuracies[0],
        "accuracy": accuracies[-1],
        "age": statistics.mean(ages) if ages else 0.0,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="", help="file of the runs that ended, read and appended")
    arguments = parser.parse_args()
    out = pathlib.Path(arguments.out or os.devnull)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    async_source._all_ready = lambda pending: False
    warm_start = supervised.warm_start
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        taught: list = []

        def same_start(config, models, run, taught=taught):
            if not taught:
                params = warm_start(config, models, run)
                taught.append((jax.device_get(params), jax.tree.map(lambda a: a.sharding, params)))
            return jax.device_put(*taught[0])

        supervised.warm_start = same_start
        for way, changes in WAYS.items():
            if any((run["seed"], run["way"]) == (seed, way) for run in done):
                continue
            numbers = train({**settings(seed, arguments.steps), **changes})
            done.append({"seed": seed, "way": way, **numbers})
            with out.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(done[-1], flush=True)
    print("| | mean age | halfway, mean | at the end, by seed | mean |")
    print("|---|---|---|---|---|")
    for way in WAYS:
        runs = [run for run in done if run["way"] == way]
        accuracies = [run["accuracy"] for run in runs]
        age = statistics.mean(run["age"] for run in runs)
        texts = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies)
        halfway = statistics.mean(run["halfway"] for run in runs)
        print(
            f"| {way} | {age:.2f} | {halfway:.3f} | {texts} | {statistics.mean(accuracies):.3f} |"
        )


if __name__ == "__main__":
    main()
