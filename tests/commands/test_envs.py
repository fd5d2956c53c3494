"""The list of environments of other packages."""

import json

import commands

from jaxrl_llm.commands import envs
from jaxrl_llm.config.agent import ADAPTERS


def test_all_kinds_are_listed_with_version_or_extra(capsys, monkeypatch):
    code, out, _ = commands.call(capsys, "envs")
    assert code == 0 and all(name in out for name in envs.WORLDS)
    assert {*ADAPTERS} <= {*envs.WORLDS}
    code, out, _ = commands.call(capsys, "envs", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["openenv"] == {
        "name": "openenv", "use": 'environment="openenv"', "version": "", "extra": ""
    }  # fmt: skip
    assert rows["gymnasium"]["version"][0].isdigit()
    missing = envs.World("x", "textarena", "no-such-distribution", "no_such_module")
    monkeypatch.setattr(envs, "WORLDS", {"textarena": missing})
    assert "not installed: pip install 'jaxrl_llm[textarena]'" in commands.call(capsys, "envs")[1]
    code, _, error = commands.call(capsys, "envs", "--names=textarena")
    assert code and "pip install 'jaxrl_llm[textarena]'" in error


def test_what_a_package_offers(capsys):
    code, out, _ = commands.call(capsys, "envs", "--names=gymnasium", "--json")
    assert code == 0 and "FrozenLake-v1" in json.loads(out)
    code, _, error = commands.call(capsys, "envs", "--names=gymnasum")
    assert code and "'gymnasum' is no kind of environment; near: gymnasium" in error
    code, _, error = commands.call(capsys, "envs", "--names=mcp")
    assert code and "mcp has no list of names" in error
