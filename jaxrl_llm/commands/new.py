"""Writes a copy of a starter config to edit."""

import pathlib

from jaxrl_llm.commands.options import NewOptions
from jaxrl_llm.config import starters
from jaxrl_llm.errors import ConfigError


def main(options: NewOptions) -> None:
    name, *files = options.name
    source = starters.find(name)
    if source is None:
        raise ConfigError(f"{name}: no starter config; {starters.hint(name)}")
    target = pathlib.Path(files[0] if files else f"{name}.py")
    if target.suffix != ".py":
        raise ConfigError(f"{target}: the copy is a Python file; call it {target}.py")
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: no folder {target.parent}; make it first")
    try:
        with target.open("x") as file:  # "x": never overwrites
            file.write(source.read_text())
    except FileExistsError as error:
        raise ConfigError(f"{target}: exists; name another file, or remove it") from error
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}") from error
    print(f"{target}: a copy of {name}; jaxrl_llm train --config={target} --workdir=DIR runs it")
