"""Numbers of two seeded runs by machine, kept in `tests/goldens/curves.json`.

`PYTHONPATH=.:tests python tests/e2e/curves.py` replaces those of this machine or adds them; after a
change that is meant to change numbers, remove the other machines' first. `test_kept_curves.py`
compares.
"""

import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile

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


def curves(
    name: str, workdir: pathlib.Path, cache: pathlib.Path, num_steps: int = SETTINGS[STEPS]
) -> dict[str, list[float | None]]:
    """Runs a config; returns each number by step, from 0 on, None where a step has none."""
    flags = [f"--config={runs.ROOT / 'configs' / name}.py"]
    flags += [f"--config.{key}={value}" for key, value in {**SETTINGS, STEPS: num_steps}.items()]
    runs.launch("train", [*flags, f"--workdir={workdir}"], cache)
    found = runs.metrics(workdir)
    assert list(found) == list(range(num_steps + 1))
    return {name: [data.get(name) for data in found.values()] for name in NAMES}


def write(made_by: dict[str, str], made: dict[str, dict[str, list[float | None]]]) -> None:
    """Writes the file with the curves of this machine among those of others, a curve a line."""
    others = [kept for kept in json.loads(FILE.read_text()) if kept["made_by"] != made_by]
    text = json.dumps([*others, {"made_by": made_by, **made}], indent=1)
    FILE.write_text(re.sub(r"\n   *(?=[-\dn\]])", " ", text) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        made = {name: curves(name, root / name, root / "compiled") for name in CONFIGS}
    write(machine(), made)


if __name__ == "__main__":
    main()
