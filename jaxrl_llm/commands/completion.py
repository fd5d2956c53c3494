"""Shell completion of commands, flags and config keys, by a script that runs no Python."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.commands.options import COMMANDS
from jaxrl_llm.config.bridge import JOBS
from jaxrl_llm.errors import ConfigError

SHELLS = ("bash", "zsh")

# `=` and `.` belong to words here, `:` would not. Values of flags complete as file names.
_SCRIPT = """\
_jaxrl_llm() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} line flags
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} completion help" -- "$word"))
        return
    fi
    # Bash cuts words at "=": the value of a flag is a word of its own.
    if [ "$word" = "=" ]; then word=""; before="="; fi
    if [ "$before" = "=" ]; then
        COMPREPLY=($(compgen -f -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) return ;;
    esac
    case "$word" in
    --config.*) flags="{keys}" ;;
    --*) ;;
    *) COMPREPLY=($(compgen -f -- "$word")); return ;;
    esac
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
    case "${{COMPREPLY[0]}}" in *= | *.) type compopt >/dev/null 2>&1 && compopt -o nospace ;; esac
}}
complete -o filenames -F _jaxrl_llm jaxrl_llm
"""


def completion_script(words: Sequence[str]) -> str:
    """The completion script of a shell; raises ConfigError for an unknown shell."""
    if list(words) not in [[shell] for shell in SHELLS]:
        usage = 'write eval "$(jaxrl_llm completion bash)", or zsh, in what your shell reads first'
        raise ConfigError(f"completion: {' '.join(words) or 'no shell'}: {usage}")
    keys = sorted({key for job in JOBS.values() for key in _keys(job)})
    completion = _SCRIPT.format(
        commands=" ".join(COMMANDS),
        cases="\n".join(f'    {name}) flags="{_flags(name)}" ;;' for name in COMMANDS),
        keys=" ".join(f"--config.{key}" for key in keys),
    )
    header = "autoload -U +X bashcompinit && bashcompinit\n" if words[0] == "zsh" else ""
    return header + completion


def _flags(name: str) -> str:
    hints = typing.get_type_hints(COMMANDS[name])
    suffixes = {
        field: "" if hints[field] is bool else "=" for field in hints if field in _field_names(name)
    }
    config_prefix = ["--config."] if "config" in hints else []
    return " ".join(
        [*(f"--{field}{end}" for field, end in suffixes.items()), *config_prefix, "--help"]
    )


def _field_names(name: str) -> set[str]:
    return {field.name for field in dataclasses.fields(COMMANDS[name])}


def _keys(group: Any, path: str = "") -> Iterator[str]:
    """Yields the dotted keys of a config, each with `=`, or with `.` if it is a mapping."""
    for name, hint in typing.get_type_hints(group).items():
        if name == "unread":
            continue
        if dataclasses.is_dataclass(hint):
            yield from _keys(hint, f"{path}{name}.")
        else:
            yield f"{path}{name}{'.' if typing.get_origin(hint) is Mapping else '='}"
