"""XLA flags that let communication overlap with arithmetic, in one place.

The compilers read them from the environment when a backend is made, so a program sets them before
it asks for devices. A flag that the user has set, to whatever value, is left alone.
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
            # Collectives run beside the products that do not need them yet, over several of them.
            # Which ones is left to the compiler: all-gathers in this form, when asked for, are an
            # error on all TPUs but v5e.
            _ASYNC: "true",
            f"{_ASYNC}_multiple_steps": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
            "xla_enable_async_all_gather": "true",
        }
    },
    "gpu": {
        "XLA_FLAGS": {
            # Starts what waits for the network as early, and asks for it as late, as memory allows.
            "xla_gpu_enable_latency_hiding_scheduler": "true",
            # In a scan over layers: the next layer's weights are gathered during this one, and
            # the last one's gradients scattered.
            "xla_gpu_enable_pipelined_all_gather": "true",
            "xla_gpu_enable_pipelined_reduce_scatter": "true",
            "xla_gpu_enable_pipelined_all_reduce": "true",
        }
    },
}


def platform(environment: Mapping[str, str] = os.environ) -> str:
    """Returns what this process will compute on, as far as can be told without a backend."""
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
