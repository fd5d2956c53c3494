"""The columns of rows with answers: examples, and pairs of them, as dialogues."""

import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.files import checked_messages, without_nulls
from jaxrl_llm.data.masks import Dialogue, Messages

_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def example_of(row: Mapping[str, Any], where: str, prompt_column: str = "prompt") -> Dialogue:
    """Returns the dialogue of `messages`, or of a prompt and its `completion`."""
    if row.get("messages") is not None:
        messages = checked_messages(row["messages"], f"{where}: messages")
        return Dialogue(messages, 0, template_options(row, where), where)
    if row.get(prompt_column) is not None and row.get("completion") is not None:
        return _continued(row, where, prompt_column, "completion")
    raise _unknown(row, where, f"messages, or {prompt_column} and completion")


def pair_of(
    row: Mapping[str, Any], where: str, prompt_column: str = "prompt"
) -> tuple[Dialogue, Dialogue]:
    """Returns the dialogues of `chosen` and `rejected`.

    Both continue the prompt. Without one, or if they are lists of messages and the prompt a text
    (which they then begin with), the prompt is what they begin with alike.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen is None or rejected is None:
        raise _unknown(row, where, f"chosen and rejected, and {prompt_column}")
    lists = not isinstance(chosen, str) and not isinstance(rejected, str)
    if row.get(prompt_column) is None or (lists and isinstance(row[prompt_column], str)):
        prompt, chosen, rejected = _split(row, where)
        row = {**row, prompt_column: prompt, "chosen": chosen, "rejected": rejected}
    found = [_continued(row, where, prompt_column, name) for name in ("chosen", "rejected")]
    return found[0], found[1]


def template_options(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns what a row tells the chat template: its tools and its `chat_template_kwargs`."""
    options = _decoded(row, "chat_template_kwargs", Mapping, "a mapping", where) or {}
    if wrong := sorted(_RESERVED & set(options)):
        raise DataError(
            f"{where}: chat_template_kwargs must hold variables of the template, not {wrong[0]!r};"
            " leave it out"
        )
    tools = _decoded(row, "tools", list, "a list of JSON schemas", where)
    for number, tool in enumerate(tools or (), start=1):
        if not isinstance(tool, Mapping):
            rule = f"must be a list of JSON schemas, tool {number} is {type(tool).__name__}"
            raise DataError(f"{where}: tools {rule}")
    return {**options, "tools": tools} if tools else dict(options)


def _decoded(row: Mapping[str, Any], column: str, kind: Any, rule: str, where: str) -> Any:
    value = without_nulls(row.get(column))
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            message = f"{column} must be {rule}, or one written as JSON: {error}"
            raise DataError(f"{where}: {message}") from error
    if value is not None and not isinstance(value, kind):
        raise DataError(f"{where}: {column} must be {rule}, got {type(value).__name__}")
    return value


def _continued(row: Mapping[str, Any], where: str, prompt_column: str, column: str) -> Dialogue:
    prompt, answer = row[prompt_column], row[column]
    before = checked_messages(prompt, f"{where}: {prompt_column}")
    after = checked_messages(answer, f"{where}: {column}", role="assistant")
    text = (prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) else None
    options = template_options(row, where)
    return Dialogue([*before, *after], len(before), options, where, text)


def _split(row: Mapping[str, Any], where: str) -> tuple[Messages, Messages, Messages]:
    """Returns the messages that chosen and rejected begin with alike, and the rest of each."""
    both = []
    for name in ("chosen", "rejected"):
        if isinstance(row[name], str):
            rule = "is a text, so that where its prompt ends is not known; add the column prompt"
            raise DataError(f"{where}: {name} {rule}, or write lists of messages")
        both.append(checked_messages(row[name], f"{where}: {name}"))
    pairs = zip(*both, strict=False)
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    if not 0 < count < min(map(len, both)):
        raise DataError(
            f"{where}: chosen and rejected begin with {count} equal messages of {len(both[0])} and"
            f" {len(both[1])}; both must begin with the prompt and end with other answers"
        )
    return both[0][:count], both[0][count:], both[1][count:]


def _unknown(row: Mapping[str, Any], where: str, needed: str) -> DataError:
    names = sorted(name for name, value in row.items() if value is not None)
    hints: Sequence[tuple[set[str], str]] = (
        ({"chosen", "rejected"}, "these rows are for job='dpo' or 'reward_model'"),
        ({"messages"}, "these rows are for job='sft'"),
        ({"prompt", "completion"}, "these rows are for job='sft'"),
        ({"prompt"}, "prompts without answers are for job='rl'"),
        ({"conversations"}, "write them as messages of role and content"),
    )
    hint = next((hint for some, hint in hints if some <= set(names)), "rename the columns")
    return DataError(f"{where}: this job needs the columns {needed}, got {names}; {hint}")
