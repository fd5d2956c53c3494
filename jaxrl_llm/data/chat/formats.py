"""Column layouts of SFT rows and preference pairs, read as dialogues."""

import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.chat.loss_masks import Dialogue, Messages
from jaxrl_llm.data.chat.messages import NO_ALIASES, Roles, checked_messages, messages_in_text
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.text import text_fault

_LABELS: Mapping[Any, bool] = {
    **dict.fromkeys((True, "true", "1"), True),
    **dict.fromkeys((False, "false", "0"), False),
}
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def sft_dialogue(
    row: Mapping[str, Any], where: str, prompt_column: str = "prompt", roles: Roles = NO_ALIASES
) -> Dialogue:
    """Reads an SFT row: `messages`, a prompt with `completion`, or ShareGPT's layout.

    `roles` are aliases of roles. ShareGPT's layout is the column `conversations` with an optional
    column `system`.
    """
    if row.get("messages") is not None:
        messages = checked_messages(row["messages"], f"{where}: messages", roles=roles)
        return Dialogue(messages, 0, template_options(row, where), where)
    if row.get(prompt_column) is not None and row.get("completion") is not None:
        return _prompt_and_answer(row, where, prompt_column, "completion", roles)
    if row.get("conversations"):
        messages = checked_messages(row["conversations"], f"{where}: conversations", roles=roles)
        if row.get("system"):
            messages = [*checked_messages(row["system"], f"{where}: system", "system"), *messages]
        return Dialogue(messages, 0, template_options(row, where), where)
    raise _unknown_columns(row, where, f"messages, or {prompt_column} and completion")


def desirable_label(row: Mapping[str, Any], where: str, column: str = "label") -> bool:
    """Whether the answer of a row with a label is desirable: true or false, 1 or 0, or such texts.

    Raises:
      DataError: If the row has no such label, or is a pair.
    """
    label = row.get(column)
    if label is None:
        hint = f"add the column {column!r}, true or false, or name it by data.columns.label"
        if {"chosen", "rejected"} <= row.keys():
            hint = (
                "these rows are pairs: set dpo.loss to one of pairs, such as 'sigmoid', or write"
                f" each answer as a row of prompt, completion and {column}"
            )
        names = sorted(name for name, value in row.items() if value is not None)
        raise DataError(f"{where}: this loss needs a label for each answer, got {names}; {hint}")
    value = label.strip().lower() if isinstance(label, str) else label
    if not isinstance(value, bool | int | float | str) or value not in _LABELS:
        rule = "must be true or false (or 1 or 0)"
        raise DataError(f"{where}: {column} {rule}, got {label!r:.60}; correct it")
    return _LABELS[value]


def preference_dialogues(
    row: Mapping[str, Any], where: str, prompt_column: str = "prompt", roles: Roles = NO_ALIASES
) -> tuple[Dialogue, Dialogue]:
    """Reads a preference row as the dialogues of `chosen` and `rejected`.

    Both continue the prompt. Without a prompt, or if they are lists of messages and the prompt is a
    text (with which they then begin), their common prefix is the prompt. `roles` are aliases.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        raise _unknown_columns(row, where, f"chosen and rejected, and {prompt_column}")
    texts = ("chosen", "rejected", prompt_column)
    decoded = {name: _decoded_messages(row.get(name), f"{where}: {name}") for name in texts}
    row = {**row, **decoded}
    lists = not isinstance(row["chosen"], str) and not isinstance(row["rejected"], str)
    if row.get(prompt_column) is None or (lists and isinstance(row[prompt_column], str)):
        prompt, chosen, rejected = _common_prefix(row, where, roles)
        row = {**row, prompt_column: prompt, "chosen": chosen, "rejected": rejected}
    both = [
        _prompt_and_answer(row, where, prompt_column, name, roles)
        for name in ("chosen", "rejected")
    ]
    return both[0], both[1]


def template_options(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Template variables of a row: its tools and its `chat_template_kwargs`."""
    options = _decoded_column(row, "chat_template_kwargs", Mapping, "a mapping", where) or {}
    if wrong := sorted(_RESERVED & set(options)):
        raise DataError(
            f"{where}: chat_template_kwargs must hold variables of the template, not {wrong[0]!r};"
            " leave it out"
        )
    tools = _decoded_column(row, "tools", list, "a list of JSON schemas", where)
    for number, tool in enumerate(tools or (), start=1):
        if not isinstance(tool, Mapping):
            rule = f"must be a list of JSON schemas, tool {number} is {type(tool).__name__}"
            raise DataError(f"{where}: tools {rule}")
    return {**options, "tools": tools} if tools else dict(options)


def _decoded_column(row: Mapping[str, Any], column: str, kind: Any, rule: str, where: str) -> Any:
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            message = f"{column} must be {rule}, or one written as JSON: {error}"
            raise DataError(f"{where}: {message}") from error
        if fault := text_fault(value):
            raise DataError(f"{where}: {'.'.join([column, *fault[0]])} {fault[1]}; correct it")
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{where}: {column} must be {rule}, got {type(value).__name__}")
    return value


def _decoded_messages(value: Any, where: str) -> Any:
    """Decodes messages stored as JSON text; any other value is returned unchanged."""
    return (isinstance(value, str) and messages_in_text(value, where)) or value


def _prompt_and_answer(
    row: Mapping[str, Any], where: str, prompt_column: str, column: str, roles: Roles
) -> Dialogue:
    prompt = _decoded_messages(row[prompt_column], f"{where}: {prompt_column}")
    answer = _decoded_messages(row[column], f"{where}: {column}")
    before = checked_messages(prompt, f"{where}: {prompt_column}", roles=roles)
    after = checked_messages(answer, f"{where}: {column}", "assistant", roles)
    text = (prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) else None
    options = template_options(row, where)
    return Dialogue([*before, *after], len(before), options, where, text)


def _common_prefix(
    row: Mapping[str, Any], where: str, roles: Roles
) -> tuple[Messages, Messages, Messages]:
    """Splits two dialogues into their common prefix and the rest of each."""
    dialogues = []
    for name in ("chosen", "rejected"):
        if isinstance(row[name], str):
            rule = "is a text, so that where its prompt ends is not known; add the column prompt"
            raise DataError(f"{where}: {name} {rule}, or write lists of messages")
        dialogues.append(checked_messages(row[name], f"{where}: {name}", roles=roles))
    pairs = zip(*dialogues, strict=False)
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if dialogues[0] == dialogues[1] and count > 1 and dialogues[0][-1]["role"] == "assistant":
        count -= 1  # equal answers are left out later, whatever their layout
    if not 0 < count < min(map(len, dialogues)):
        raise DataError(
            f"{where}: chosen and rejected begin with {count} equal messages of"
            f" {len(dialogues[0])} and {len(dialogues[1])}; both must begin with the prompt"
            " and end with other answers"
        )
    return dialogues[0][:count], dialogues[0][count:], dialogues[1][count:]


def _unknown_columns(row: Mapping[str, Any], where: str, needed: str) -> DataError:
    names = sorted(name for name, value in row.items() if value is not None)
    hints: Sequence[tuple[set[str], str]] = (
        ({"chosen", "rejected"}, "these rows are for job='dpo' or 'reward_model'"),
        ({"completion", "label"}, "these rows are for a dpo.loss on single answers, as 'kto'"),
        ({"messages"}, "these rows are for job='sft'"),
        ({"prompt", "completion"}, "these rows are for job='sft'"),
        ({"prompt"}, "prompts without answers are for job='rl'"),
        ({"conversations"}, "write them as messages of role and content"),
    )
    hint = next((hint for some, hint in hints if some <= set(names)), "rename the columns")
    return DataError(f"{where}: this job needs the columns {needed}, got {names}; {hint}")
