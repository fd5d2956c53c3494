"""Lists the environments and tasks of other packages: which are installed, and what they offer."""

import contextlib
import dataclasses
import difflib
import importlib.metadata
import io
import json
from collections.abc import Callable, Sequence

from jaxrl_llm.commands.options import EnvsOptions
from jaxrl_llm.errors import ConfigError, check_package


@dataclasses.dataclass(frozen=True)
class World:
    """A kind of environment or task."""

    use: str  # the setting that selects it
    extra: str = ""  # of this project, with its package; "": no package is needed
    distribution: str = ""  # its package, as it is installed
    module: str = ""
    # The names that the package offers; None: they are addresses, or packages of their own.
    names: Callable[[], Sequence[str]] | None = None

    @property
    def version(self) -> str:
        """The version of its package; "" if it is not installed, or none is needed."""
        try:
            return importlib.metadata.version(self.distribution) if self.distribution else ""
        except importlib.metadata.PackageNotFoundError:
            return ""


def _generators() -> list[str]:
    from jaxrl_llm.data.reasoning_gym_task import generator_names

    return generator_names()


def _games() -> list[str]:
    from jaxrl_llm.agents.adapters.textarena import game_names

    return game_names()


def _gymnasium_ids() -> list[str]:
    import gymnasium

    return sorted(gymnasium.registry)


WORLDS = {
    "gymnasium": World(
        'environment="gymnasium"', "gymnasium", "gymnasium", "gymnasium", _gymnasium_ids
    ),
    "harness": World('agent.harness="agent.py:function"'),
    "mcp": World('environment="mcp"', "mcp", "mcp", "mcp"),
    "nemo_gym": World('agent.harness="jaxrl_llm.agents.adapters.nemo_gym:solve"'),
    "openenv": World('environment="openenv"'),
    "reasoning_gym": World(
        'data.task="reasoning_gym"', "reasoning_gym", "reasoning-gym", "reasoning_gym", _generators
    ),
    "textarena": World('environment="textarena"', "textarena", "textarena", "textarena", _games),
    "verifiers": World('environment="verifiers"', "verifiers", "verifiers", "verifiers.v1"),
}


def main(options: EnvsOptions) -> None:
    """Lists all kinds, or what one of them offers; ConfigError if it is unknown or missing."""
    if options.names:
        _list_names(options.names, options.json)
        return
    rows = [
        {"name": name, "use": world.use, "version": world.version, "extra": world.extra}
        for name, world in WORLDS.items()
    ]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    widths = [max(len(row[key]) for row in rows) for key in ("name", "use")]
    for row in rows:
        state = "needs no package"
        if row["extra"]:
            remedy = f"not installed: pip install 'jaxrl_llm[{row['extra']}]'"
            state = f"installed: {row['version']}" if row["version"] else remedy
        print(f"{row['name']:<{widths[0]}}  {row['use']:<{widths[1]}}  {state}")
    print(
        "\njaxrl_llm envs --names=NAME lists what a package offers; docs/worlds.md says how it is"
        " used."
    )


def _list_names(name: str, as_json: bool) -> None:
    world = WORLDS.get(name)
    if world is None:
        similar = difflib.get_close_matches(name, WORLDS, n=2, cutoff=0.5) or list(WORLDS)
        raise ConfigError(f"{name!r} is no kind of environment; near: {', '.join(similar)}")
    if world.module:
        check_package(world.module, extra=world.extra, where=f"jaxrl_llm envs --names={name}")
    if world.names is None:
        raise ConfigError(f"{name} has no list of names; docs/worlds.md says what it takes")
    with contextlib.redirect_stdout(io.StringIO()):  # packages print when they are imported
        names = list(world.names())
    print(json.dumps(names, indent=1) if as_json else "\n".join(names))
