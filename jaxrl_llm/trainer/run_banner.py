"""The banner of a run before its first step, and the summary after its last."""

import math
import pathlib
import time
from collections.abc import Callable

import jax

from jaxrl_llm import console
from jaxrl_llm.config import JobConfig
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.planning import accelerators
from jaxrl_llm.planning.accelerators import GIB
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import multihost
from jaxrl_llm.storage import files, line_log


def print_banner(
    config: JobConfig, models: Models, planned_bytes: float, workdir: pathlib.Path
) -> Callable[[int, str, str], None]:
    """Prints the banner of a run; returns a function that prints its result after the last step.

    The function gets the last step, why the run ended before `num_steps`, if it did, and the line
    about its goodput, "" without one.

    `planned_bytes` is the planned peak of a device.
    """
    if not (config.metrics.console and multihost.is_first()):
        return lambda *_: None
    begin = time.monotonic()
    for name, text in _banner_lines(config, models, planned_bytes, workdir).items():
        print(f"{name:<7}  {text}", flush=True)

    def close(step: int, reason: str, goodput: str) -> None:
        dumps = [workdir / "rollouts" / name for name in files.names(workdir / "rollouts")]
        dumps = [path for path in dumps if path.suffix == ".jsonl" and path.stem.isdecimal()]
        dumps.sort(key=lambda path: int(path.stem))
        outputs = [("numbers", workdir / "metrics.jsonl")]
        outputs += [("samples", path) for path in dumps[-1:]]
        outputs.append(("weights", workdir / "checkpoints" / str(step)))
        try:
            metrics = line_log.read_log(workdir / "metrics.jsonl")
        except FileNotFoundError:
            metrics = b""
        console.print_summary(metrics, time.monotonic() - begin, outputs, reason)
        if goodput:
            print(f"{'goodput':<12}{goodput}", flush=True)

    return close


def _banner_lines(
    config: JobConfig, models: Models, planned_bytes: float, workdir: pathlib.Path
) -> dict[str, str]:
    """The lines of the banner, by label."""
    count = sum(math.prod(a.shape) for a in jax.tree.leaves(models.policy.abstract_params()))
    power = min(3, int(math.log10(count)) // 3)  # three digits and a unit letter
    number = f"{count / 1000**power:.3g} {' kMB'[power]}".strip()
    model = config.model.path or f"{config.model.family} with new weights"
    trained = f", adapters of rank {config.lora.rank}" if config.lora.rank else ""
    kind = models.mesh.devices.flat[0].device_kind
    split = " x ".join(f"{axis} {n}" for axis, n in models.mesh.shape.items() if n > 1)
    if models.meshes["rollout"] != models.mesh:
        split += f"; {models.meshes['rollout'].size} sample"
    memory = "not planned, the devices are not known"
    if planned_bytes:
        device = accelerators.local_device(mesh_lib.run_devices())
        total = f" of {device.memory_bytes / GIB:.3g}" if device else ""
        memory = f"{planned_bytes / GIB:.3g}{total} GiB planned on each device"
    return {
        "policy": f"{model}, {number} parameters{trained}",
        "devices": f"{len(mesh_lib.run_devices())} {kind}" + (f", {split}" if split else ""),
        "memory": memory,
        "steps": f"{config.trainer.num_steps}, each {config.step_contents}",
        "files": str(files.absolute(workdir)),
    }
