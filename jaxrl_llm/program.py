"""What every command of `launch/` does around its work."""

import errno
import logging as std_logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterable

import jax
from absl import app, logging

from jaxrl_llm import config_bridge
from jaxrl_llm.config import ConfigError, Problem
from jaxrl_llm.errors import EXIT_MENDABLE, Interrupted, UserError

# Libraries that report at INFO what only their own developers want to know.
_CHATTY = ("orbax", "tensorboardX", "xla_bridge")
# A folder that cannot be written or read is the user's to mend, whoever noticed it.
_DISK_ERRORS = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EEXIST,
        errno.EFBIG,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)


def run(main: Callable[[], None]) -> None:
    """Parses flags and runs `main`; what the user can mend ends it with a message, not a trace."""

    def guarded(_):
        logging.set_verbosity(logging.INFO)
        logging.get_absl_handler().addFilter(_is_ours)
        try:
            main()
        except Interrupted as ended:
            sys.exit(ended.exit_code)
        except UserError as error:
            logging.error("%s", error)
            sys.exit(EXIT_MENDABLE)
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            logging.error("%s; check free space, quota and permission of the folder", error)
            sys.exit(EXIT_MENDABLE)

    app.run(guarded, flags_parser=config_bridge.parse_flags)


def refuse(problems: Iterable[Problem]) -> None:
    """Raises `ConfigError` if there are problems with the flags."""
    if found := [f"--{name}: {message}" for name, message in problems]:
        raise ConfigError(found)


def _is_ours(record: std_logging.LogRecord) -> bool:
    if "orbax" in record.pathname and record.exc_info:
        return False  # raised once more, and reported by who asked for the save
    chatty = any(name in record.pathname for name in _CHATTY)
    return record.levelno >= std_logging.WARNING or not chatty


def keep_compilations(workdir: str | os.PathLike[str]) -> None:
    """Makes JAX keep compiled programs beside `workdir`, for this run's next start and others.

    `JAX_COMPILATION_CACHE_DIR` names another folder; empty, it turns the cache off.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = pathlib.Path(workdir).absolute().parent / ".jax_cache"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
