"""What every command of `launch/` does around its work."""

import errno
import logging as std_logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

import jax
from absl import app, flags, logging

from jaxrl_llm import compiler_flags
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import parse_flags
from jaxrl_llm.console import screen
from jaxrl_llm.errors import EXIT_MENDABLE, Interrupted, Problem, UserError
from jaxrl_llm.sharding import cluster, hosts

# Libraries whose INFO lines are for their developers.
_CHATTY = ("orbax", "tensorboardX", "xla_bridge")
# What a user can mend: a full disk, missing permission, a name that cannot be a folder.
_DISK_ERRORS = (
    {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}
    | {errno.EACCES, errno.EPERM, errno.EROFS}
    | {errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR}
)

_START = flags.DEFINE_enum("start", "auto", cluster.STARTS, "How processes find each other.")
_COORDINATOR = flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0; see --start.")
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", -1, "Processes of the run; -1: as the launcher says."
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", -1, "Number of this process; -1: as the launcher says."
)


def run(main: Callable[[], None]) -> None:
    """Parses flags, joins the other processes of the run, if any, and runs `main`.

    A `UserError` ends it with a message, not a trace. A process that fails ends the others.
    """

    def guarded(_):
        compiler_flags.set_defaults()
        logging.set_verbosity(logging.INFO)
        root = std_logging.getLogger()
        root.removeHandler(logging.get_absl_handler())
        root.addHandler(_HANDLER)  # once
        screen.show_compilations()
        try:
            address = cluster.Address(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
            hosts.join(cluster.find(_START.value, address))
            screen.SCREEN.silent = not hosts.is_first()
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

    app.run(guarded, flags_parser=parse_flags)


def _end(message: str) -> NoReturn:
    screen.SCREEN.close()
    print(f"error: {message}", file=sys.stderr, flush=True)
    hosts.abandon(message)
    sys.exit(EXIT_MENDABLE)


def _leave(code: int) -> NoReturn:
    """Ends the process without waiting for its threads; what had to be saved is on disk.

    If a signal stopped a library before it registered how to end a thread, Python would wait for
    that thread for ever.
    """
    screen.SCREEN.close()
    logging.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def refuse(problems: Iterable[Problem]) -> None:
    """Raises `ConfigError` if there are problems with the flags."""
    if found := [f"--{name}: {message}" for name, message in problems]:
        raise ConfigError(found)


def _is_ours(record: std_logging.LogRecord) -> bool:
    if "orbax" in record.pathname and record.exc_info:
        return False  # it is raised again where the save was asked for
    chatty = any(name in record.pathname for name in _CHATTY)
    return record.levelno >= std_logging.WARNING or not chatty


_HANDLER = screen.LogHandler()
_HANDLER.addFilter(_is_ours)


def keep_compilations(workdir: str | os.PathLike[str]) -> None:
    """Makes JAX keep compiled programs beside `workdir`, for this run's next start and others.

    `JAX_COMPILATION_CACHE_DIR` names another folder; empty, it turns the cache off.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = pathlib.Path(workdir).absolute().parent / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
