"""Numbers of two seeded runs: kept by machine, or compared between two versions of the package.

`PYTHONPATH=.:tests python tests/e2e/curves.py` replaces those of this machine in
`tests/goldens/curves.json` or adds them; after a change that is meant to change numbers, remove the
other machines' first. `test_kept_curves.py` compares.

With `--against=REVISION` nothing is kept: the working tree and that git revision run in turns on
this machine, and their numbers must be the same to the bit. This is the proof of a refactoring on
any machine.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import jax
import jaxlib
import runs

FILE = pathlib.Path(__file__).parents[1] / "goldens" / "curves.json"
CONFIGS = ("grpo_tiny", "ppo_tiny")
STEPS = "trainer.num_steps"
# As in the config files, but for a shorter warm start and 20 steps.
SETTINGS = {
    "warm_start.num_steps": 100,
    STEPS: 20,
    "metrics.tensorboard": False,
}
NAMES = (
    "critic/rewards/mean",
    "response_length/mean",
    "actor/entropy",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/kl_loss",
    "critic/values/mean",
    "critic/vf_loss",
    "critic/grad_norm",
    "training/rollout_probs_diff_mean",
    "val-core/arithmetic/mean@4",
    "val-aux/response_length/mean",
)


def machine() -> dict[str, str]:
    """Returns what the bits of a number depend on beside our code."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    of_one = dict.fromkeys(s for s in lines if s.startswith(("model name", "flags", "Features")))
    compiler = shutil.which("c++")  # of the kernels that decode
    said = [compiler, "--version"] if compiler else ["echo", "none"]
    return {
        "processor": " ".join([platform.machine(), *(" ".join(s.split()) for s in of_one)]),
        "cores": str(len(os.sched_getaffinity(0))),
        "compiler": subprocess.run(said, capture_output=True, text=True).stdout.split("\n")[0],
        "jax": f"{jax.__version__} {jaxlib.__version__}",
    }


def metrics(
    name: str, workdir: pathlib.Path, cache: pathlib.Path, num_steps: int, root: pathlib.Path
) -> dict[int, dict[str, float]]:
    """Runs a config with the package of a source tree; all its numbers by step, from 0 on."""
    settings = {**SETTINGS, STEPS: num_steps}
    flags = [f"--config={root / 'configs' / name}.py", f"--workdir={workdir}"]
    flags += [f"--config.{key}={value}" for key, value in settings.items()]
    runs.launch("train", flags, cache, root=root)
    by_step = runs.metrics(workdir)
    assert list(by_step) == list(range(num_steps + 1))
    return by_step


def curves(
    name: str, workdir: pathlib.Path, cache: pathlib.Path, num_steps: int = SETTINGS[STEPS]
) -> dict[str, list[float | None]]:
    """Runs a config; each kept number by step, from 0 on, None where a step has none."""
    by_step = metrics(name, workdir, cache, num_steps, runs.ROOT)
    return {name: [data.get(name) for data in by_step.values()] for name in NAMES}


def shared_names(
    here: Mapping[int, Mapping[str, float]], there: Mapping[int, Mapping[str, float]]
) -> list[str]:
    """The numbers that both runs have and that another run must repeat: no times."""
    names = [
        set(runs.repeatable(dict.fromkeys(set().union(*run.values())))) for run in (here, there)
    ]
    return sorted(names[0] & names[1])


def first_difference(
    here: Mapping[int, Mapping[str, float]], there: Mapping[int, Mapping[str, float]]
) -> str:
    """The first step and number of `shared_names` that two runs do not share to the bit, or ""."""
    names = shared_names(here, there)
    for step in here:
        for name in names:
            values = here[step].get(name), there[step].get(name)
            if repr(values[0]) != repr(values[1]):  # NaN is NaN
                return f"step {step}: {name} is {values[0]!r} here, {values[1]!r} there"
    return ""


def compare(
    revision: str, names: Sequence[str], num_steps: int, root: pathlib.Path = runs.ROOT
) -> dict[str, str]:
    """Runs each config with the working tree and with a git revision; `first_difference` of each.

    The revision is checked out beside the working tree in a temporary folder, which is removed.
    """
    git = ["git", "-C", str(root), "worktree"]
    differences = {}
    with tempfile.TemporaryDirectory() as folder:
        there = pathlib.Path(folder, "there")
        subprocess.run([*git, "add", "--quiet", "--detach", there, revision], check=True)
        try:
            for name in names:
                both = [
                    metrics(name, pathlib.Path(folder, name, version), cache, num_steps, tree)
                    for version, tree, cache in (
                        ("here", root, pathlib.Path(folder, "compiled_here")),
                        ("there", there, pathlib.Path(folder, "compiled_there")),
                    )
                ]
                differences[name] = first_difference(*both)
                count = len(shared_names(*both))
                assert count, "the versions share no name of a number"
                same = f"{count} numbers are the same at every step from 0 to {num_steps}"
                said = differences[name] or same
                print(f"{name}: {said}", flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", there], check=True)
    return differences


def write(made_by: dict[str, str], made: dict[str, dict[str, list[float | None]]]) -> None:
    """Writes the file with the curves of this machine among those of others, a curve a line."""
    others = [kept for kept in json.loads(FILE.read_text()) if kept["made_by"] != made_by]
    text = json.dumps([*others, {"made_by": made_by, **made}], indent=1)
    FILE.write_text(re.sub(r"\n   *(?=[-\dn\]])", " ", text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", metavar="REVISION", help="compare with this git revision")
    parser.add_argument("--configs", nargs="+", default=CONFIGS, choices=CONFIGS)
    parser.add_argument("--steps", type=int, default=SETTINGS[STEPS])
    options = parser.parse_args()
    if options.against:
        sys.exit(any(compare(options.against, options.configs, options.steps).values()))
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        made = {name: curves(name, root / name, root / "compiled") for name in CONFIGS}
    write(machine(), made)


if __name__ == "__main__":
    main()
