"""The commands of `launch/`, called in this process as a user calls them."""

import pathlib
import runpy
import sys

import pytest
from absl import app, flags, logging

from jaxrl_llm import program  # noqa: F401  # its flags are every command's, defined once
from jaxrl_llm.trainer import rl  # noqa: F401  # so are those of the libraries of a run

ROOT = pathlib.Path(__file__).parents[2]
app.define_help_flags()


def call(capsys, name, *arguments):
    """Runs `launch/NAME.py`; returns its exit code, what it printed, and what it logged."""
    with pytest.MonkeyPatch.context() as patch:
        before = set(flags.FLAGS)
        patch.setattr(sys, "argv", [f"launch/{name}.py", *map(str, arguments)])
        patch.setenv("JAX_COMPILATION_CACHE_DIR", "")
        patch.chdir(ROOT)
        log = []
        patch.setattr(logging, "error", lambda text, *values: log.append(text % values))
        try:
            runpy.run_path(str(ROOT / "launch" / f"{name}.py"), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            for flag in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, flag)
    said = capsys.readouterr()
    return code, said.out, "\n".join(log) + said.err


def refused(capsys, name, *arguments):
    """Runs `launch/NAME.py`, which must end with a message; returns the message."""
    code, out, log = call(capsys, name, *arguments)
    said = out + log
    assert code == 1 and "Traceback" not in said and f'File "{ROOT}' not in said, said
    return said
