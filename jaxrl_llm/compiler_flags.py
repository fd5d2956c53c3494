"""XLA flags that let communication overlap with arithmetic.

Compilers read them from the environment when a backend is made, so a program sets them before it
asks for devices. A flag that the user has set is not changed.
"""

import importlib.util
import os
import pathlib
from collections.abc import Mapping, MutableMapping

_ASYNC = "xla_tpu_enable_async_collective_fusion"

# Variable that a compiler reads -> flag -> value.
FLAGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "tpu": {
        "LIBTPU_INIT_ARGS": {
            # Collectives run beside matmuls that do not need them yet. The compiler chooses which:
            # to ask for all-gathers in this form is an error on all TPUs but v5e.
            _ASYNC: "true",
            f"{_ASYNC}_multiple_steps": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
            "xla_enable_async_all_gather": "true",
        }
    },
    "gpu": {
        "XLA_FLAGS": {
            # Starts communication as early, and waits for it as late, as memory allows.
            "xla_gpu_enable_latency_hiding_scheduler": "true",
            # In a scan over layers, during one layer: the next one's weights are gathered, the
            # last one's gradients scattered.
            "xla_gpu_enable_pipelined_all_gather": "true",
            "xla_gpu_enable_pipelined_reduce_scatter": "true",
            "xla_gpu_enable_pipelined_all_reduce": "true",
        }
    },
}


def platform(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the platform of this process, as far as it is known before a backend is made."""
    wanted = environment.get("JAX_PLATFORMS", "").partition(",")[0]
    if wanted:
        return {"cuda": "gpu", "rocm": "gpu"}.get(wanted, wanted)
    if importlib.util.find_spec("libtpu") and any(pathlib.Path("/dev").glob("accel*")):
        return "tpu"
    return "gpu" if pathlib.Path("/dev/nvidia0").exists() else "cpu"


def set_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Adds the flags of this process's platform to its environment; before any device is used."""
    for variable, flags in FLAGS.get(platform(environment), {}).items():
        given = environment.get(variable, "")
        names = {word.lstrip("-").partition("=")[0] for word in given.split()}
        more = [f"--{name}={value}" for name, value in flags.items() if name not in names]
        environment[variable] = " ".join([given, *more]).strip()
