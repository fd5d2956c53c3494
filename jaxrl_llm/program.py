"""What every command does around its work: flags of XLA, processes, errors."""

import errno
import importlib.util
import logging as std_logging
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import NoReturn

import jax
from absl import logging

from jaxrl_llm import console
from jaxrl_llm.config import ProcessesConfig
from jaxrl_llm.errors import EXIT_MENDABLE, Interrupted, UserError
from jaxrl_llm.sharding import cluster, hosts

# Libraries whose INFO lines are for their developers.
_CHATTY = ("orbax", "tensorboardX", "xla_bridge")
# What a user can mend: a full disk, missing permission, a name that cannot be a folder.
_DISK_ERRORS = (
    {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}
    | {errno.EACCES, errno.EPERM, errno.EROFS}
    | {errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR}
)

_ASYNC = "xla_tpu_enable_async_collective_fusion"

# Platform -> variable of its compiler -> flag -> value: communication beside arithmetic.
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
    "cpu": {
        "XLA_FLAGS": {
            # Programs are compiled side by side: parts of one need no threads of their own.
            "xla_cpu_parallel_codegen_split_count": "1",
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


def _platform(environment: Mapping[str, str]) -> str:
    """Returns the platform of this process, as far as it is known before a backend is made."""
    wanted = environment.get("JAX_PLATFORMS", "").partition(",")[0]
    if wanted:
        return {"cuda": "gpu", "rocm": "gpu"}.get(wanted, wanted)
    if importlib.util.find_spec("libtpu") and any(pathlib.Path("/dev").glob("accel*")):
        return "tpu"
    return "gpu" if pathlib.Path("/dev/nvidia0").exists() else "cpu"


def set_flags(environment: MutableMapping[str, str] = os.environ) -> None:
    """Adds flags that the user has not set to the environment; before any device is used."""
    for variable, wanted in FLAGS.get(_platform(environment), {}).items():
        given = environment.get(variable, "")
        names = {word.lstrip("-").partition("=")[0] for word in given.split()}
        more = [f"--{name}={value}" for name, value in wanted.items() if name not in names]
        environment[variable] = " ".join([given, *more]).strip()


def run(main: Callable[[], None], processes: ProcessesConfig = ProcessesConfig()) -> None:  # noqa: B008
    """Joins the other processes of the run, if any, and runs `main`.

    A `UserError` ends it with a message, not a trace. A process that fails ends the others.
    """
    set_flags()
    logging.set_verbosity(logging.INFO)
    root = std_logging.getLogger()
    root.removeHandler(logging.get_absl_handler())
    for handler in [each for each in root.handlers if type(each) is std_logging.StreamHandler]:
        root.removeHandler(handler)  # of a library that logged before
    root.addHandler(_HANDLER)  # once
    console.show_compilations()
    try:
        told = processes.coordinator, processes.num_processes, processes.process_id
        hosts.join(cluster.find(processes.start, *told))
        console.SCREEN.silent = not hosts.is_first()
        main()
        hosts.leave()
    except Interrupted as ended:  # all processes end together
        hosts.leave()
        _leave(ended.exit_code)
    except UserError as error:
        _end(str(error))
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            hosts.abandon(repr(error), with_trace=True)
            raise
        _end(f"{error}; check free space, quota and permission of the folder")
    except KeyboardInterrupt:
        hosts.abandon("was interrupted")
        raise
    except Exception as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            hosts.wait_for_verdict()  # another process may have died in a collective
        hosts.abandon(repr(error), with_trace=True)
        raise


def _end(message: str) -> NoReturn:
    console.SCREEN.close()
    print(f"error: {message}", file=sys.stderr, flush=True)
    hosts.abandon(message)
    sys.exit(EXIT_MENDABLE)


def _leave(code: int) -> NoReturn:
    """Ends the process without waiting for threads of libraries that the signal interrupted."""
    console.SCREEN.close()
    logging.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_ours(record: std_logging.LogRecord) -> bool:
    if "orbax" in record.pathname and record.exc_info:
        return False  # it is raised again where the save was asked for
    chatty = any(name in record.pathname for name in _CHATTY)
    return record.levelno >= std_logging.WARNING or not chatty


_HANDLER = console.LogHandler()
_HANDLER.addFilter(_is_ours)


def keep_compilations(workdir: str | os.PathLike[str]) -> None:
    """Makes JAX keep compiled programs beside `workdir`, if JAX_COMPILATION_CACHE_DIR is unset."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = pathlib.Path(workdir).absolute().parent / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
