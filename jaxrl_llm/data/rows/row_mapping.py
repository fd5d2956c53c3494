"""Rows of published datasets as rows of this package, by the columns that a config names."""

import difflib
import functools
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config import DataConfig
from jaxrl_llm.config.datasets.presets import OPTIONAL, RowMapping, template_fields
from jaxrl_llm.data.chat.messages import checked_messages, messages_in_text, role_aliases
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.text import is_text

Row = dict[str, Any]

_PROMPT = ("prompt", "system", "answer", "data_source", "images", "tools", "chat_template_kwargs")
_EXAMPLE = ("prompt", "system", "messages", "completion", "images", "tools", "chat_template_kwargs")
_PAIR = ("prompt", "system", "chosen", "rejected", "images", "tools", "chat_template_kwargs")
_SCHEMA = {  # of verl's rows, no extra columns
    "data_source", "reward_model", "extra_info", "images", "tools", "chat_template_kwargs"
}  # fmt: skip


def prompt_columns(config: DataConfig, row: Row, where: str) -> Row:
    """The row in verl's schema, for `files.checked_row`, by the columns that the config names.

    Columns that `data.columns` does not set are read by their own names. Reward functions get
    `data.extra_columns`, or if that is empty all columns but those that the prompt is made of.
    Errors begin with `where`.

    Raises:
      DataError: If the row lacks a column, with the nearest name, or `data.answer_pattern` has no
        match in the answer.
    """
    mapping = config.row_mapping
    if mapping == RowMapping():
        return row
    values = _mapped_values(mapping, _PROMPT, row, where)
    prompt = _prompt(config, values, row, where)
    if prompt is None:
        raise _no_column(config.prompt_column, "the prompt (data.columns.prompt)", row, where)
    system = _system(config, values, where)
    values |= {"prompt": _with_system(config, prompt, system, f"{where}: prompt")}
    mapped = {name: each for name, each in row.items() if name in _SCHEMA}
    if "answer" in values:
        truth = _ground_truth(mapping.answer_pattern, values.pop("answer"), where)
        own = row.get("reward_model")
        others = own if isinstance(own, Mapping) else {}
        mapped["reward_model"] = {**others, "ground_truth": truth}
    if not row.get("data_source") and mapping.data_source:
        mapped["data_source"] = mapping.data_source
    if "prompt" in values and config.prompt_column != "prompt":
        values[config.prompt_column] = values.pop("prompt")
    mapped |= values
    extra = _extra_columns(config, row, where)
    displaced = {name: extra.pop(name) for name in {*extra} & {*mapped}}
    if displaced and isinstance(row.get("extra_info", {}), Mapping):
        mapped["extra_info"] = {**displaced, **row.get("extra_info", {})}
    return {**extra, **mapped}


def example_columns(config: DataConfig, row: Row, where: str) -> Row:
    """The row as `formats.sft_dialogue` reads it, by the columns that the config names.

    Raises:
      DataError: If the row lacks a column, with the nearest name.
    """
    mapping = config.row_mapping
    if mapping == RowMapping():
        return row
    values = _mapped_values(mapping, _EXAMPLE, row, where)
    mapped = {**row, **values}
    if "completion" in values:
        mapped.pop("messages", None)
    system = _system(config, values, where)
    if mapped.get("messages") is not None:
        column = "messages"
    elif mapped.get("completion") is not None:
        column = config.prompt_column
        mapped[column] = _prompt(config, values, row, where)
    else:
        column = "conversations"
        system = "" if row.get("system") else system
    if mapped.get(column) is not None:
        dialogue = _with_speakers(mapping, mapped[column], f"{where}: {column}")
        mapped[column] = _with_system(config, dialogue, system, f"{where}: {column}")
    return mapped


def pair_columns(config: DataConfig, row: Row, where: str) -> Row:
    """The row as `formats.preference_dialogues` reads it, by the columns that the config names.

    Raises:
      DataError: If the row lacks a column, with the nearest name.
    """
    mapping = config.row_mapping
    if mapping == RowMapping():
        return row
    values = _mapped_values(mapping, _PAIR, row, where)
    mapped = {**row, **values, config.prompt_column: _prompt(config, values, row, where)}
    system = _system(config, values, where)
    for name in ("chosen", "rejected"):
        value = _with_speakers(mapping, mapped.get(name), f"{where}: {name}")
        messages = messages_in_text(value, where) if isinstance(value, str) else None
        mapped[name] = messages or value
    # Dialogues repeat a prompt that is a text, and begin with the system message.
    whole = not any(isinstance(mapped[name], (str, type(None))) for name in ("chosen", "rejected"))
    prompt = mapped[config.prompt_column]
    if whole and (prompt is None or isinstance(prompt, str)):
        dialogues = ["chosen", "rejected"]
    else:
        dialogues = [] if prompt is None else [config.prompt_column]
    for name in dialogues:
        mapped[name] = _with_system(config, mapped[name], system, f"{where}: {name}")
    return mapped


def _mapped_values(
    mapping: RowMapping, targets: tuple[str, ...], row: Row, where: str
) -> dict[str, Any]:
    """The values of the columns that `data.columns` sets, without those that the row may lack."""
    values = {}
    for target in targets:
        if source := mapping.columns.get(target):
            value = _column(row, source, f"data.columns.{target}", where)
            if value is not None:
                values[target] = value
    return values


def _column(row: Row, source: str, setting: str, where: str) -> Any:
    """The value of a column; None only if it is optional, and null or missing."""
    name = source.removesuffix(OPTIONAL)
    if row.get(name) is None and not source.endswith(OPTIONAL):
        if name not in row:
            raise _no_column(name, setting, row, where)
        remedy = f"leave the row out, or let it be missing with {setting}={name + OPTIONAL!r}"
        raise DataError(f"{where}: the column {name!r} ({setting}) is null; {remedy}")
    return row.get(name)


def _no_column(name: str, setting: str, row: Row, where: str) -> DataError:
    near = difflib.get_close_matches(name, row, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    columns = ", ".join(sorted(row)) or "none"
    return DataError(f"{where}: no column {name!r} for {setting}; {hint}The row has: {columns}")


def _prompt(config: DataConfig, values: Mapping[str, Any], row: Row, where: str) -> Any:
    """The prompt: the filled template, the column that is set for it, or the row's own one."""
    mapping = config.row_mapping
    if not mapping.prompt_template:
        prompt = values.get("prompt", row.get(config.prompt_column))
        return _with_speakers(mapping, prompt, f"{where}: {config.prompt_column}")
    texts = []
    for text, source in _template(mapping.prompt_template):
        texts.append(text)
        if source:
            value = _column(row, source, "data.prompt_template", where)
            if isinstance(value, (bool, float, int)) or value is None:
                value = "" if value is None else str(value)
            if not is_text(value):
                rule = f"must be a text or a number for data.prompt_template, got {value!r:.60}"
                raise DataError(f"{where}: the column {source!r} {rule}")
            texts.append(value)
    return "".join(texts).strip()


@functools.cache
def _template(template: str) -> list[tuple[str, str]]:
    return template_fields(template)


def _system(config: DataConfig, values: dict[str, Any], where: str) -> str:
    """The system prompt of a row, taken out of `values`; "" if it has none."""
    system = values.pop("system", "")
    if not is_text(system):
        raise DataError(f"{where}: data.columns.system must be a text, got {system!r:.60}")
    return system if system.strip() else config.row_mapping.system_prompt


def _with_system(config: DataConfig, dialogue: Any, system: str, where: str) -> Any:
    """The dialogue behind a system message, unless it begins with one or there is none."""
    if not system:
        return dialogue
    messages = checked_messages(dialogue, where, roles=role_aliases(config.role_aliases))
    is_first = messages[0]["role"] == "system"
    return messages if is_first else [{"role": "system", "content": system}, *messages]


def _with_speakers(mapping: RowMapping, value: Any, where: str) -> Any:
    """The messages of a transcript; any other value, or without speakers, the value."""
    if not mapping.transcript_roles or not isinstance(value, str):
        return value
    roles = role_aliases(mapping.transcript_roles)
    before, *turns = _speakers(mapping.transcript_roles).split(value)
    if before.strip() or not turns:
        raise DataError(
            f"{where} must begin with one of {', '.join(f'{name}:' for name in roles)}"
            f" (data.transcript_roles), got {value!r:.60}"
        )
    speakers, texts = turns[::2], turns[1::2]
    return [
        {"role": roles[speaker], "content": text.strip()}
        for speaker, text in zip(speakers, texts, strict=True)
    ]


@functools.cache
def _speakers(pairs: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(re.escape(name) for name in role_aliases(pairs))
    return re.compile(rf"(?:\A\s*|\n\n)({names}):")


def _ground_truth(pattern: str, answer: Any, where: str) -> Any:
    """The answer, or with a pattern the group of its last match in it."""
    if not pattern:
        return answer
    setting = f"data.answer_pattern {pattern!r:.60}"
    if not is_text(answer):
        raise DataError(f"{where}: the answer must be a text for {setting}, got {answer!r:.60}")
    matches = re.findall(pattern, answer)
    if not (matches and matches[-1].strip()):
        raise DataError(f"{where}: the answer has no match of {setting}, got ...{answer[-60:]!r}")
    return matches[-1].strip()


def _extra_columns(config: DataConfig, row: Row, where: str) -> Row:
    """The columns for reward functions that are no part of verl's schema."""
    mapping = config.row_mapping
    if names := mapping.extra_columns:
        return {name: _column(row, name, "data.extra_columns", where) for name in names}
    sources = {to: name.removesuffix(OPTIONAL) for to, name in mapping.columns.items()}
    used = {sources[to] for to in _PROMPT if to in sources and to != "answer"}
    is_prompt_read = not (mapping.prompt_template or "prompt" in mapping.columns)
    used |= {config.prompt_column} if is_prompt_read else set()
    return {name: value for name, value in row.items() if name not in used | _SCHEMA}
