"""The commands of `launch/`, called in this process as a user calls them."""

import pathlib
import runpy
import sys

import pytest
from absl import logging

from jaxrl_llm.commands import command_line

ROOT = pathlib.Path(__file__).parents[2]


def call(capsys, name, *arguments):
    """Runs `launch/NAME.py`, or the command that has no such file.

    Returns its exit code, what it printed, and what it logged.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"launch/{name}.py", *map(str, arguments)])
        patch.setenv("JAX_COMPILATION_CACHE_DIR", "")
        patch.chdir(ROOT)
        log = []
        patch.setattr(logging, "error", lambda text, *values: log.append(text % values))
        try:
            if (file := ROOT / "launch" / f"{name}.py").exists():
                runpy.run_path(str(file), run_name="__main__")
            else:
                command_line.run(name)
            code = 0
        except SystemExit as end:
            code = end.code or 0
    said = capsys.readouterr()
    return code, said.out, "\n".join(log) + said.err


def refused(capsys, name, *arguments):
    """Runs `launch/NAME.py`, which must end with a message; returns the message."""
    code, out, log = call(capsys, name, *arguments)
    said = out + log
    assert code == 1 and "Traceback" not in said and f'File "{ROOT}' not in said, said
    return said
