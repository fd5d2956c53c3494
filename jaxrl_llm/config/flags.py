"""The command line: `--config=FILE` and `--config.key=value`, checked before absl reads them."""

import dataclasses
import pathlib
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app
from ml_collections.config_flags import config_flags

from jaxrl_llm.config.bridge import described, unknown_field
from jaxrl_llm.config.rl import RLConfig
from jaxrl_llm.errors import ConfigError


def unknown_overrides(argv: Sequence[str], name: str = "config") -> list[str]:
    """Returns what is wrong with `--config=FILE` and the keys of `--config.key=value`.

    Args:
      argv: Arguments of the process.
      name: Name of the config flag.
    """
    text = "\n".join(argv)
    match = re.search(rf"^--?{name}[=\n](.+)$", text, re.MULTILINE)
    file = match[1] if match else ""
    if match and not pathlib.Path(file.partition(":")[0]).is_file():
        return [f"--{name}: {file}: no such file"]
    errors: list[str] = []
    for argument in argv:
        if found := re.match(rf"--?(?:no)?{name}\.([^=]+)", argument):
            errors.extend(_unknown_key(found[1].split("."), RLConfig, name, file))
    return errors


def _unknown_key(parts: Sequence[str], expected: Any, path: str, file: str) -> Iterator[str]:
    for part in parts:
        if dataclasses.is_dataclass(expected):
            hints = typing.get_type_hints(expected)
            if part not in hints:
                yield unknown_field(part, hints, path)
                return
            expected = hints[part]
        elif typing.get_origin(expected) is Mapping:
            entries: Any = config_flags.ConfigFileFlagParser(name="config").parse(file)
            for parent in path.split(".")[1:]:
                entries = entries[parent]
            if part not in entries:
                yield (
                    f"{path}.{part}: the config file has no such entry (it has:"
                    f" {', '.join(entries) or 'none'}); set the whole group,"
                    f" --{path}=\"{{'{part}': {{...}}}}\""
                )
                return
            expected = typing.get_args(expected)[1]
            if parts[-1] in typing.get_type_hints(expected) and parts[-1] not in entries[part]:
                yield (
                    f"{path}.{part}.{parts[-1]}: the config file leaves it out, and what it leaves"
                    f" out cannot be set here; add it to {part!r} in the config file, or set the"
                    f" whole entry, --{path}=\"{{'{part}': {{...}}}}\""
                )
                return
        else:
            yield f"{path}.{part}: {path} is {described(expected)} and has no fields"
            return
        path = f"{path}.{part}"


def parse_flags(argv: Sequence[str]) -> list[str]:
    """Parses flags for `app.run(main, flags_parser=parse_flags)`.

    An unknown `--config.key` ends the program with all such keys named, each with the
    nearest known one, where ml_collections alone would show a KeyError's traceback.
    """
    if errors := unknown_overrides(argv):
        print(f"FATAL {ConfigError(errors)}", file=sys.stderr)
        raise SystemExit(1)
    return app.parse_flags_with_usage(list(argv))
