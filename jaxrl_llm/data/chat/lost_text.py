"""Detection of text that a chat template would drop from a row, before anything is trained.

A template writes nothing for what it does not know: a role, a list of parts, tools, a second call.
Whether a text is shown cannot be seen in the rendering alone (the answer "2" is in every date), so
the row is rendered once more with marks at both ends of each text, all at the same time. A text
whose mark is missing there is lost, and the row is refused.

Templates drop some text on purpose: the thinking of earlier turns (Qwen3, GLM-4.5), or what gpt-oss
says beside a call once the answer has followed. So a text of the assistant need only be shown where
its turn is the last one. Thinking in prompts, which bears no loss, need not be shown at all.
"""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.chat.messages import (
    SHAREGPT_ROLES,
    as_mapping,
    function_of,
    is_trained,
    joined_text,
    with_arguments,
)
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.data.tokenizer import Message, render_chat

ROLES = frozenset({"system", "user", "assistant", "tool"})
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of messages, beside the content

# What other roles mostly mean, for messages.
_USUAL = {**SHAREGPT_ROLES, "developer": "system", "function": "tool", "ipython": "tool"}
_WORD = re.compile(r"['\"](\w+)['\"]")  # within a template
_OPENING_TAG, _CLOSING_TAG = re.compile(r"<[^<>\s]*>\s*"), re.compile(r"\s*</[^<>\s]*>$")
_THINK, _END_OF_THINK = "<think>", "</think>"
_TEMPLATE_REMEDY = "or set model.chat_template to a template that shows it"


class _Text(NamedTuple):
    """A text of a row, with the marks that stand at its ends."""

    message: int  # its number from 0; -1: not of a message
    kind: str  # "text", "thinking", "call" or "tool"
    text: str
    marks: tuple[str, ...]


def check_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    roles: Collection[str] = (),
) -> None:
    """Raises DataError if the template leaves out something of a prompt.

    `roles` are known beside the usual ones and those that the template names.
    """
    _check_roles(tokenizer, messages, roles)
    _check(tokenizer, messages, options, len(messages), add_generation_prompt=True)


def check_dialogue(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    first: int,
    roles: Collection[str] = (),
) -> None:
    """Raises DataError if the template leaves out something of a dialogue; `roles` as above.

    The assistant's messages from number `first` on bear loss: their thinking must be shown, too.
    """
    _check_roles(tokenizer, messages, roles)
    _check(tokenizer, messages, options, first, add_generation_prompt=False)


def check_no_template(options: Mapping[str, Any]) -> None:
    """Raises DataError if a row has tools and no chat template would show them."""
    if options.get("tools"):
        raise DataError(
            "tools are shown by a chat template only; set data.chat_template=True, or leave the"
            " column out"
        )


def _check(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    first: int,
    add_generation_prompt: bool,
) -> None:
    texts: list[_Text] = []
    numbers = itertools.count()
    marked = [
        _marked_message(message, i, i >= first, texts, numbers)
        for i, message in enumerate(messages)
    ]
    tools = options.get("tools") or ()
    if tools:
        marked_tools = [_marked_tool(tool, texts, numbers) for tool in tools]
        options_with_marks = {**options, "tools": marked_tools}
    else:
        options_with_marks = dict(options)
    if not texts:
        return
    try:
        shown = _rendering(tokenizer, marked, options_with_marks, add_generation_prompt)
    except DataError:
        # The row itself may be refused, with a message that is about its own texts.
        _rendering(tokenizer, messages, options, add_generation_prompt)
        return  # a mark was refused: nothing is known
    alone: dict[int, str] = {}  # what is shown where a message is the last one
    for text in texts:
        if all(mark in shown for mark in text.marks):
            continue
        number = text.message
        if number >= 0 and messages[number].get("role") == "assistant":
            if number not in alone:
                beginning = marked[: number + 1]
                alone[number] = _rendering_or_nothing(tokenizer, beginning, options_with_marks)
            if all(mark in alone[number] for mark in text.marks):
                continue
        if text.kind == "tool" and _is_named(text.text, messages):
            continue
        raise DataError(_refusal(text, messages))


def _rendering(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    add_generation_prompt: bool,
) -> str:
    kwargs = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    return str(render_chat(tokenizer, messages, options, **kwargs))


def _rendering_or_nothing(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Mapping[str, Any]
) -> str:
    try:
        return _rendering(tokenizer, messages, options, add_generation_prompt=False)
    except DataError:
        return ""


def _check_roles(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], roles: Collection[str]
) -> None:
    """Refuses roles that the template does not name: it may print them, but no model knows them."""
    known = {*ROLES, *roles}
    unknown = [i for i, message in enumerate(messages) if message["role"] not in known]
    if not unknown:
        return
    named = {*_WORD.findall(str(tokenizer.chat_template))}
    for number in unknown:
        role = messages[number]["role"]
        if role not in named:
            alias = f"{role:.60}:{_USUAL.get(role, 'user')}"
            raise DataError(
                f"message {number + 1} has the role {role!r:.60}, which the chat template does not"
                " know; write system, user, assistant or tool, or say in data.role_aliases which"
                f" of them it is: ({alias!r},)"
            )


def _marked_message(
    message: Message, number: int, bears_loss: bool, texts: list[_Text], numbers: Iterator[int]
) -> Message:
    """The message with marks; the texts that have them are added to `texts`."""
    is_assistant = message.get("role") == "assistant"
    with_thinking = is_assistant and bears_loss and is_trained(message)

    def marked(text: str, kind: str = "text") -> str:
        if not text.strip():
            return text
        begin, end = _bounds(text)
        marks = f"zqa{(i := next(numbers))}q", f"zqe{i}q"
        texts.append(_Text(number, kind, text, marks))
        return text[:begin] + marks[0] + text[begin:end] + marks[1] + text[end:]

    changed = dict(message)
    content = message.get("content")
    if is_assistant and isinstance(content, list):
        text = joined_text(content)
        content = content if text is None else text  # thinking may be in any part
    if isinstance(content, str):
        thinking, answer = _split_thinking(content) if is_assistant else ("", content)
        if thinking and with_thinking:
            before, tag, thought = thinking.removesuffix(_END_OF_THINK).rpartition(_THINK)
            thinking = marked(before) + tag + marked(thought, "thinking") + _END_OF_THINK
        changed["content"] = thinking + marked(answer)
    elif isinstance(content, list):
        changed["content"] = [
            {**part, "text": marked(part["text"])} if part.get("type") == "text" else part
            for part in content
        ]
    if with_thinking:
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str):
                changed[key] = marked(message[key], "thinking")
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_marked_call(call, number, texts, numbers) for call in calls]
    if isinstance(call := message.get("function_call"), Mapping):  # OpenAI's before tools
        changed["function_call"] = _marked_call(call, number, texts, numbers)
    return changed


def _marked_call(
    call: Mapping[str, Any], number: int, texts: list[_Text], numbers: Iterator[int]
) -> dict[str, Any]:
    """The call with a mark in its name and one more argument."""
    marks = f"zqf{(i := next(numbers))}q", f"zqg{i}q"
    name = str(function_of(call).get("name"))
    texts.append(_Text(number, "call", name, marks))
    arguments = as_mapping(function_of(call).get("arguments"))
    changed = with_arguments(call, {**arguments, marks[1]: "0"})
    if function_of(changed) is changed:
        return {**changed, "name": name + marks[0]}
    return {**changed, "function": {**changed["function"], "name": name + marks[0]}}


def _marked_tool(tool: Any, texts: list[_Text], numbers: Iterator[int]) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    function = function if isinstance(function, Mapping) else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return tool
    mark = f"zqt{next(numbers)}q"
    texts.append(_Text(-1, "tool", function["name"], (mark,)))
    changed = {**function, "name": function["name"] + mark}
    return changed if function is tool else {**tool, "function": changed}


def _split_thinking(content: str) -> tuple[str, str]:
    """An assistant's content up to the end of its thinking, and from there on."""
    before, tag, after = content.rpartition(_END_OF_THINK)
    return (before + tag, after) if tag else ("", content)


def _bounds(text: str) -> tuple[int, int]:
    """Where the marks of a text stand: within its white space, and within tags around it.

    Templates look at both: they trim, and know a tool's reply by its `<tool_response>`.
    """
    begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
    opening, closing = _OPENING_TAG.match(text, begin), _CLOSING_TAG.search(text[:end])
    if opening and closing and opening.end() < closing.start():
        return opening.end(), closing.start()
    return begin, end


def _is_named(tool: str, messages: Sequence[Message]) -> bool:
    """Whether a tool that the template does not show is described in a message by its name."""
    word = re.compile(rf"(?<!\w){re.escape(tool)}(?!\w)")
    contents = (message.get("content") for message in messages)
    return any(isinstance(content, str) and word.search(content) for content in contents)


def _refusal(text: _Text, messages: Sequence[Message]) -> str:
    if text.kind == "tool":
        return (
            f"the chat template does not show the tool {text.text!r:.60}; describe it by its name"
            f" in a message, leave tools out, {_TEMPLATE_REMEDY}"
        )
    message = messages[text.message]
    role = str(message.get("role"))
    lost = {
        "text": f"its text {text.text.strip()!r:.60}",
        "thinking": f"its thinking {text.text.strip()!r:.60}",
        "call": f"its call of {text.text!r:.60}",
    }[text.kind]
    remedy = {
        "text": "write it in a message of the user",
        "thinking": "leave it out",
        "call": "write one call in a message, without a text beside it",
    }[text.kind]
    if text.kind == "text" and role == "assistant":
        remedy = "write it in a message of its own"
    return (
        f"message {text.message + 1} (role {role!r:.60}): the chat template does not show {lost};"
        f" {remedy}, {_TEMPLATE_REMEDY}"
    )
