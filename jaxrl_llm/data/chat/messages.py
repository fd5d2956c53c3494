"""Messages of rows: every layout that is known becomes one list, checked value by value.

What a chat template makes of them is the business of `template_forms` and `lost_text`.
"""

import itertools
import json
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.text import MAX_DEPTH, is_text

Roles = Mapping[str, str]  # a row's name of a role -> the role that the chat template knows

NO_ALIASES: Roles = types.MappingProxyType({})

# The roles of ShareGPT's layout, whose messages have the keys `from` and `value`.
SHAREGPT_ROLES: Roles = types.MappingProxyType(
    dict.fromkeys(("human", "user"), "user")
    | dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "function_call"), "assistant")
    | dict.fromkeys(("observation", "tool", "function_response"), "tool")
    | {"system": "system"}
)
PART_TYPES = ("text", "image", "image_url")
# How a text begins and ends that may be a list of messages, as JSON or as Python prints it.
_BEGINNING = re.compile(r"\s*\[\s*\{\s*([\"'](?:role|from)[\"']\s*:)?")
_END = re.compile(r"\}\s*\]\s*")


def role_aliases(pairs: Sequence[str]) -> Roles:
    """The mapping that `data.role_aliases` writes as `name:role`.

    >>> role_aliases(("human:user",))
    {'human': 'user'}
    """
    return dict(pair.split(":", 1) for pair in pairs)


def checked_messages(
    value: Any, where: str, role: str = "user", roles: Roles = NO_ALIASES
) -> list[dict[str, Any]]:
    """The messages of a column; a text is one message of `role`, or a list of messages in JSON.

    Messages with `from` and `value` are ShareGPT's. Keys of a message or a call that are null are
    left out, values within arguments stay. An assistant's message that is not to be trained
    (`"weight": 0`, `"train": false`) keeps `"train": False`.

    Args:
      where: What errors begin with: file, row and column.
      roles: Names of roles that mean another one.
    """
    rule = "must be a list of {role, content} messages or one text"
    if value is None:
        raise DataError(f"{where} is missing; it {rule}")
    if isinstance(value, str):
        value = messages_in_text(value, where) or [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise DataError(f"{where} {rule}, got {type(value).__name__}")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise DataError(f"{where} {rule}, message {number} is {type(message).__name__}")
        messages.append(_checked_message(message, where, number, roles))
    if not any(message.get("tool_calls") or _says(message["content"]) for message in messages):
        raise DataError(f"{where} is empty; write one, or leave the row out")
    return messages


def messages_in_text(text: str, where: str) -> list[Mapping[str, Any]] | None:
    """The list of messages that a text holds as JSON; None if it is an ordinary text.

    Raises:
      DataError: If it is a list of messages in another notation, such as Python's.
    """
    beginning = _BEGINNING.match(text)
    if not beginning or not _END.fullmatch(text, text.rfind("}")):
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not beginning[1]:
            return None
        raise DataError(
            f"{where} looks like a list of messages, but is not valid JSON: {error}; write"
            " it with json.dumps, or as a list"
        ) from error
    return values if all(map(_is_message, values)) else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    is_openai = "role" in value and ("content" in value or "tool_calls" in value)
    return is_openai or ("from" in value and "value" in value)


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a row lets an assistant's message bear loss."""
    train, weight = message.get("train"), message.get("weight")
    return (train is None or bool(train)) and (weight is None or weight != 0)


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with name and arguments of a call; some rows write it without `function`."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """A call with other arguments."""
    changed = {**function_of(call), "arguments": arguments}
    return {**call, "function": changed} if function_of(call) is not call else changed


def as_mapping(arguments: Any) -> Mapping[str, Any]:
    """Arguments of a call as a mapping; they may be the JSON text of one, as OpenAI has them.

    Raises:
      ValueError: If they are no mapping.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except RecursionError as error:
            raise ValueError(f"brackets are nested deeper than {MAX_DEPTH}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"a JSON object is needed, got {type(arguments).__name__}")
    return arguments


def joined_text(parts: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of a content whose parts are all texts; None if one is not."""
    if any(part.get("type") != "text" for part in parts):
        return None
    return "".join(part["text"] for part in parts)


def _checked_message(
    message: Mapping[str, Any], where: str, number: int, roles: Roles
) -> dict[str, Any]:
    named = f"{where}: message {number}"
    # Keys that are null are keys that other messages have (parquet, clients' own dumps).
    message = {key: each for key, each in message.items() if each is not None}
    if "from" in message and not {"role", "content"} & {*message}:
        message = _from_sharegpt(message, named)
    if isinstance(message.get("role"), str):
        message["role"] = roles.get(message["role"], message["role"])
    if "tool_calls" in message:
        calls = message.pop("tool_calls")
        if calls := _checked_calls(calls, named):
            message["tool_calls"] = calls
    if isinstance(call := message.get("function_call"), Mapping):  # OpenAI's before tools
        (message["function_call"],) = _checked_calls([call], named)
    parts = message.get("content")
    if isinstance(parts, tuple):
        parts = message["content"] = list(parts)
    if isinstance(parts, list):
        message["content"] = _checked_parts(parts, named)
    for key in ("role", "content"):
        if key == "content" and isinstance(parts, list):
            continue
        has_calls = bool(message.get("tool_calls")) and key == "content" and key not in message
        if not is_text(message.get(key)) and not has_calls:
            rule = "must be a list of {role, content} messages or one text"
            raise DataError(
                f"{where} {rule}, {key} of message {number} must be a text,"
                f" got {message.get(key)!r:.60}"
            )
    if problem := next(_unclean(message), ""):
        raise DataError(f"{named}: {problem}")
    return _with_training(message, named)


def _from_sharegpt(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message of role and content for one of `from` and `value`."""
    name, value = message["from"], message.get("value")
    if name not in SHAREGPT_ROLES:
        known = ", ".join(SHAREGPT_ROLES)
        raise DataError(f"{where}: `from` is {name!r:.60}; known in this layout: {known}")
    others = {key: each for key, each in message.items() if key not in ("from", "value")}
    changed = {**others, "role": SHAREGPT_ROLES[name]}
    if name != "function_call":
        return {**changed, "content": value}
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        rule = "the value of a function_call must be the JSON of {name, arguments}"
        raise DataError(f"{where}: {rule}: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {**changed, "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    rule = "tool_calls must be a list of {type, function: {name, arguments}}"
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: {rule}, or the JSON of one: {error}") from error
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise DataError(f"{where}: {rule}, got {type(calls).__name__}")
    checked = []
    for number, call in enumerate(calls, start=1):
        if not isinstance(call, Mapping):
            raise DataError(f"{where}: {rule}, call {number} is {type(call).__name__}")
        call = {key: each for key, each in call.items() if each is not None}
        if isinstance(call.get("function"), Mapping):
            function = call["function"].items()
            call["function"] = {key: each for key, each in function if each is not None}
        name = function_of(call).get("name")
        if not is_text(name) or not name:
            raise DataError(f"{where}: call {number} needs the name of its function, got {name!r}")
        arguments = function_of(call).get("arguments", {})
        try:
            if problem := next(_unclean(as_mapping(arguments)), ""):
                raise ValueError(problem)
        except ValueError as error:
            raise DataError(
                f"{where}: the arguments of call {number} ({name:.60}) must be an object, or the"
                f" JSON text of one: {error}"
            ) from error
        checked.append(with_arguments(call, arguments))
    return checked


def _checked_parts(parts: Sequence[Any], where: str) -> list[dict[str, Any]]:
    checked = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in PART_TYPES:
            raise DataError(
                f"{where}: a part of the content has type {kind!r:.60}; only 'text', 'image' and"
                " 'image_url' are known"
            )
        if kind == "text" and not is_text(part.get("text")):
            raise DataError(f"{where}: a part of type 'text' needs a text")
        checked.append({key: each for key, each in part.items() if each is not None})
    return checked


def _with_training(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with `"train": False` if it bears no loss, and without `train` otherwise."""
    if not {"weight", "train"} & {*message}:
        return message
    weight, train = message.pop("weight", 1), message.pop("train", True)
    if message["role"] != "assistant":  # only the assistant's bear loss
        return message
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(f"{where}: weight must be 0 or 1 (bears loss), got {weight!r:.60}")
    if not isinstance(train, bool):
        raise DataError(f"{where}: train must be true or false, got {train!r:.60}")
    return message if weight and train else {**message, "train": False}


def _unclean(value: Any, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yields why a value within a message is refused."""
    if isinstance(value, str) and not is_text(value):
        yield f"a lone surrogate in {value!r:.60}; write the whole character, or remove it"
    if not isinstance(value, (Mapping, list, tuple)):
        return
    if not depth:
        yield f"brackets are nested deeper than {MAX_DEPTH}; write what they hold as a text"
        return
    items = itertools.chain(value, value.values()) if isinstance(value, Mapping) else value
    for each in items:
        yield from _unclean(each, depth - 1)


def _says(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(part["type"] != "text" or part["text"].strip() for part in content)
