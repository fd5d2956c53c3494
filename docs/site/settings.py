"""Settings and alerts as pages of Markdown, read from the code."""

import ast
import dataclasses
import inspect
import pathlib
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import yaml

from jaxrl_llm.config import AlertsConfig
from jaxrl_llm.config.bridge import JOBS
from jaxrl_llm.config.validation import Range, TextField, field_rules
from jaxrl_llm.metrics.alerts import ALERTS

MEANINGS: Mapping[str, str] = yaml.safe_load(
    (pathlib.Path(__file__).parent / "meanings.yaml").read_text()
)


class Setting(NamedTuple):
    """A key of a config and what its declaration says."""

    key: str
    allowed: str
    default: str
    meaning: str


def comments_of(cls: type) -> dict[str, str]:
    """Returns the comment of each field that a class declares: behind it, or above it."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(iter(source.splitlines(True)).__next__):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            comments[token.start[0]] = text.partition("  #")[0] if "fmt:" not in text else ""
    found = {}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        end = node.end_lineno or node.lineno
        behind = [comments[n] for n in range(node.lineno, end + 1) if comments.get(n)]
        above, line = [], node.lineno - 1
        while line in comments and lines[line - 1].lstrip().startswith("#"):
            above.insert(0, comments[line])
            line -= 1
        found[node.target.id] = " ".join([*above, *behind]).strip()
    return found


def meaning_of(cls: type, name: str) -> str:
    """Returns what a field means: as meanings.yaml says, or the comment of its declaration."""
    for base in cls.__mro__:
        if name in vars(base).get("__annotations__", {}):
            meaning = MEANINGS.get(f"{base.__name__}.{name}") or comments_of(base).get(name)
            if meaning:
                return meaning
    return ""


def allowed(hint: Any, rule: Range | TextField | None) -> str:
    """Returns what a field may be, in words."""
    if typing.get_origin(hint) is tuple:
        return f"a tuple; each: {allowed(typing.get_args(hint)[0], rule)}"
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{value!r}`" for value in typing.get_args(hint))
    if hint is bool:
        return "`True`, `False`"
    if isinstance(rule, Range):
        kind = "whole number" if hint is int else "number"
        return f"{kind}, {rule}"
    if typing.get_origin(hint) is Mapping:
        return "names with values"
    return rule.kind if rule else "a text"


def settings(cls: Any, path: str = "config", outer: Any = None) -> Iterator[Setting]:
    """Yields every key of a group and of the groups below it; entries of mappings are `NAME`."""
    rules = {name: rule for name, rule, _ in field_rules(cls)}
    for name, hint in typing.get_type_hints(cls).items():
        where = f"{path}.{name}"
        default = getattr(outer, name) if outer is not None else None
        entries = typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else None
        if dataclasses.is_dataclass(hint):
            yield from settings(hint, where, default)
        elif dataclasses.is_dataclass(entries):
            yield from settings(entries, f"{where}.NAME", entries())
        else:
            meaning = meaning_of(cls, name)
            yield Setting(where, allowed(hint, rules.get(name)), repr(default), meaning)


def page() -> str:
    """Returns the page of all settings, by job."""
    text = [PREFACE]
    seen: set[str] = set()
    for job, cls in JOBS.items():
        found = [s for s in settings(cls, outer=cls()) if s.key not in seen]
        seen |= {s.key for s in found}
        if job == "rl":
            text.append("\n## RL, and what all jobs share\n")
        else:
            text.append(f"\n## Only in `{job}`\n")
        text += ["| key | may be | default | meaning |", "|---|---|---|---|"]
        text += [
            row(s.key.removeprefix("config."), s.allowed, f"`{s.default}`", s.meaning)
            for s in found
        ]
    return "\n".join(text) + "\n"


PREFACE = """# Settings

Every key of a config, from its declaration in the code. On the command line a key is
`--config.KEY=VALUE`; in a YAML file groups are nested; in a Python config it is `config.KEY =
VALUE`. `NAME` is a name of yours. `--dry_run` prints the settings of a run as they are after
recipe and command line. A key that does not exist, a value out of range and settings that
contradict each other are all reported together, before work starts.
"""


ALERTS_PREFACE = """# Alerts

Readings that every step is checked for. An alert that fires is a warning in the log, is 1 in the
metric `alerts/NAME`, and goes to `alerts.webhook` or `alerts.function`. Its settings are
`alerts.NAME.limit`, `steps` (in a row) and `action` (`off`, `continue`, `skip`, `stop`).
[reliability.md](../reliability.md#alerts) says what the actions do.
"""


def alerts() -> str:
    """Returns the page of all alerts."""
    text = [
        ALERTS_PREFACE,
        "| alert | reading | metric | fires | limit | steps | action | what to do |",
        "|---|---|---|---|---|---|---|---|",
    ]
    default = AlertsConfig()
    for name, alert in ALERTS.items():
        rule = getattr(default, name)
        numbers = ", ".join(f"`{n}`" for n in alert.metric_names)
        when = alert.comparison, f"{rule.limit:g}", str(rule.steps), f"`{rule.action}`"
        text.append(row(name, alert.quantity, numbers, *when, alert.remedy))
    return "\n".join(text) + "\n"


def row(key: str, *cells: str) -> str:
    """Returns a row of a table."""
    return " | ".join([f"| `{key}`", *(cell.replace("|", "\\|") for cell in cells)]) + " |"
