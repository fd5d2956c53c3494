"""The frame of every command: XLA flags, multi-process setup, error reporting."""

import errno
import importlib.util
import logging as std_logging
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from typing import NoReturn

import jax
from absl import logging

from jaxrl_llm import console
from jaxrl_llm.config import ProcessesConfig
from jaxrl_llm.errors import EXIT_FAILED, EXIT_USER_ERROR, Interrupted, UserError
from jaxrl_llm.sharding import cluster_detection, multihost
from jaxrl_llm.storage import files
from jaxrl_llm.storage.address import is_remote

# Libraries whose INFO lines only concern their developers.
_QUIET_LIBRARIES = ("orbax", "tensorboardX", "xla_bridge", "httpx")
# Errors that a user can fix: a full disk, missing permission, a name that cannot be a folder.
_DISK_ERRORS = (
    {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}
    | {errno.EACCES, errno.EPERM, errno.EROFS}
    | {errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR}
)

_ASYNC_FUSION = "xla_tpu_enable_async_collective_fusion"

# Platform -> environment variable -> flag -> value: overlap communication with compute.
XLA_FLAGS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "tpu": {
        "LIBTPU_INIT_ARGS": {
            # Collectives overlap with independent matmuls. The compiler chooses which collectives:
            # requesting all-gathers explicitly is an error on all TPUs but v5e.
            _ASYNC_FUSION: "true",
            f"{_ASYNC_FUSION}_multiple_steps": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
            "xla_enable_async_all_gather": "true",
        }
    },
    "cpu": {
        "XLA_FLAGS": {
            # Programs compile in parallel already: do not split each one over threads too.
            "xla_cpu_parallel_codegen_split_count": "1",
        }
    },
    "gpu": {
        "XLA_FLAGS": {
            # Starts communication as early, and waits as late, as memory allows.
            "xla_gpu_enable_latency_hiding_scheduler": "true",
            # In a scan over layers, each layer overlaps the all-gather of the next layer's weights
            # and the reduce-scatter of the previous layer's gradients.
            "xla_gpu_enable_pipelined_all_gather": "true",
            "xla_gpu_enable_pipelined_reduce_scatter": "true",
            "xla_gpu_enable_pipelined_all_reduce": "true",
        }
    },
}


def _platform(environment: Mapping[str, str]) -> str:
    """The platform of this process, guessed without initializing a JAX backend."""
    requested = environment.get("JAX_PLATFORMS", "").partition(",")[0]
    if requested:
        return {"cuda": "gpu", "rocm": "gpu"}.get(requested, requested)
    if importlib.util.find_spec("libtpu") and any(pathlib.Path("/dev").glob("accel*")):
        return "tpu"
    return "gpu" if pathlib.Path("/dev/nvidia0").exists() else "cpu"


def set_xla_flags(environment: MutableMapping[str, str] = os.environ) -> None:
    """Adds XLA flags that the user has not set; call it before any device is used."""
    for variable, flags in XLA_FLAGS.get(_platform(environment), {}).items():
        user_flags = environment.get(variable, "")
        names = {word.lstrip("-").partition("=")[0] for word in user_flags.split()}
        added = [f"--{name}={value}" for name, value in flags.items() if name not in names]
        environment[variable] = " ".join([user_flags, *added]).strip()


def run(main: Callable[[], None], processes: ProcessesConfig = ProcessesConfig()) -> None:  # noqa: B008
    """Joins the other processes of the run, if any, and runs `main`.

    A `UserError` exits with its message, not a traceback; any other error with a traceback and
    EXIT_FAILED. A process that fails stops the others.
    """
    set_xla_flags()
    logging.set_verbosity(logging.INFO)
    root = std_logging.getLogger()
    root.removeHandler(logging.get_absl_handler())
    for handler in [each for each in root.handlers if type(each) is std_logging.StreamHandler]:
        root.removeHandler(handler)  # added by a library that logged earlier
    root.addHandler(_HANDLER)  # once
    console.show_compilations()
    try:
        multihost.join(
            cluster_detection.detect_start(
                processes.start,
                processes.coordinator,
                processes.num_processes,
                processes.process_id,
            )
        )
        console.DISPLAY.silent = not multihost.is_first()
        main()
        multihost.leave()
    except Interrupted as interrupted:  # all processes stop together
        multihost.leave()
        _exit_at_once(interrupted.exit_code)
    except UserError as error:
        _exit_with_message(str(error), error.exit_code)
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            _exit_with_traceback(error)
        _exit_with_message(f"{error}; check free space, quota and permission of the folder")
    except KeyboardInterrupt:
        multihost.abandon("was interrupted", EXIT_USER_ERROR)
        raise
    except Exception as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            multihost.wait_for_heartbeats()  # another process may have died in a collective
        _exit_with_traceback(error)


def _exit_with_message(message: str, exit_code: int = EXIT_USER_ERROR) -> NoReturn:
    console.DISPLAY.close()
    print(f"error: {message}", file=sys.stderr, flush=True)
    multihost.abandon(message, exit_code)
    sys.exit(exit_code)


def _exit_with_traceback(error: Exception) -> NoReturn:
    """Ends the program as Python does for an exception, but with an exit code of its own."""
    console.DISPLAY.close()
    traceback.print_exception(error)
    multihost.abandon(repr(error))
    sys.exit(EXIT_FAILED)


def _exit_at_once(code: int) -> NoReturn:
    """Exits without waiting for library threads that the signal interrupted."""
    console.DISPLAY.close()
    logging.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _is_shown(record: std_logging.LogRecord) -> bool:
    if "orbax" in record.pathname and record.exc_info:
        return False  # raised again where the save was requested
    chatty = any(name in record.pathname for name in _QUIET_LIBRARIES)
    return record.levelno >= std_logging.WARNING or not chatty


_HANDLER = console.LogHandler()
_HANDLER.addFilter(_is_shown)


def enable_compilation_cache(workdir: str | os.PathLike[str], model: str = "") -> None:
    """Enables JAX's compilation cache, unless JAX_COMPILATION_CACHE_DIR is set.

    It lies beside `workdir`; of a command that has none ("") beside the folder of the model, or, if
    that is not on this machine, in `~/.cache/jaxrl_llm`.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    if files.in_bucket(workdir) or (not workdir and is_remote(model, "model")):
        home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        folder = pathlib.Path(home) / "jaxrl_llm" / "jax_cache"
    else:
        folder = pathlib.Path(workdir or model).absolute().parent / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
