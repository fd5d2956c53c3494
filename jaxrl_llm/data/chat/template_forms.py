"""The forms in which a chat template takes messages, and messages put into these forms.

Templates differ in what they take: a content as a text or as a list of parts, the arguments of a
call as a mapping or as JSON text, no content beside calls as null or as "". In another form some
refuse a message, and others lose it without a word: Qwen3's template writes nothing for a list of
parts. So each template is tried once with short dialogues, and rows are put into what it takes.
"""

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.chat.messages import as_mapping, function_of, joined_text, with_arguments

Message = Mapping[str, Any]
_Render = Callable[[Sequence[Message]], str]  # "" if the template refuses

ROLES = ("system", "user", "assistant", "tool")
_FIRST, _SECOND = "zqa ", "zqb"  # two texts; templates that trim parts lose the space
_ARGUMENTS = {"zqk": "zqv"}
# What a row tells trainers, not templates.
_NOT_SHOWN = ("train", "weight")

_known: "weakref.WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, ...], bool]]"
_known = weakref.WeakKeyDictionary()


def fitted_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The messages in the forms that the tokenizer's template takes.

    Contents whose parts are all texts are joined where the template takes no lists; arguments in
    JSON text become mappings, or mappings text where the template wants that.

    Raises:
      ValueError: If the arguments of a call are no mapping.
    """
    template = _Template(tokenizer, options)
    fitted = []
    for message in messages:
        message = {key: value for key, value in message.items() if key not in _NOT_SHOWN}
        content = message.get("content")
        if isinstance(content, list):
            text = joined_text(content)
            if text is not None and not template.takes_parts(str(message.get("role"))):
                message["content"] = text
        elif isinstance(content, str) and template.needs_parts(str(message.get("role"))):
            message["content"] = [{"type": "text", "text": content}]
        if calls := message.get("tool_calls"):
            message["tool_calls"] = _fitted_calls(calls, template.needs_text_arguments())
            if content is None:
                message["content"] = None if template.takes_null_content() else ""
        fitted.append(message)
    return fitted


def with_text_arguments(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of all calls as JSON text."""
    return [
        {**message, "tool_calls": _fitted_calls(message["tool_calls"], as_text=True)}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _fitted_calls(calls: Sequence[Mapping[str, Any]], as_text: bool) -> list[dict[str, Any]]:
    """Calls with their arguments as mappings, or as JSON text; a text of the row stays as it is."""
    return [with_arguments(call, _fitted_arguments(call, as_text)) for call in calls]


def _fitted_arguments(call: Mapping[str, Any], as_text: bool) -> Any:
    arguments = function_of(call).get("arguments")
    if not as_text:
        return as_mapping(arguments)
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return json.dumps(as_mapping(arguments), ensure_ascii=False)


class _Template:
    """Probes of the message forms that a template accepts; each rendering is cached."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]):
        self._tokenizer = tokenizer
        self._variables = {name: value for name, value in options.items() if name != "tools"}
        self._answers = _known.setdefault(tokenizer, {})
        self._key = (str(tokenizer.chat_template), repr(self._variables))

    def takes_parts(self, role: str) -> bool:
        """Whether a list of text parts is shown as its texts, one after the other."""
        return role in ROLES and self._ask("parts", role, self._try_parts)

    def needs_parts(self, role: str) -> bool:
        """Whether a content is shown as a list of parts only, not as a text."""
        return role in ROLES and self._ask("only parts", role, self._try_only_parts)

    def needs_text_arguments(self) -> bool:
        """Whether the arguments of a call must be JSON text."""
        return self._ask("arguments", "", self._try_text_arguments)

    def takes_null_content(self) -> bool:
        """Whether a content that is null beside calls is shown as nothing."""
        return self._ask("null", "", self._try_null)

    def _ask(self, question: str, role: str, answer: Callable[[str], bool]) -> bool:
        key = (*self._key, question, role)
        if key not in self._answers:
            self._answers[key] = answer(role)
        return self._answers[key]

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, **self._variables
                )
            )
        except Exception:  # Jinja's, or what the template raises: it does not take this form
            return ""

    def _try_parts(self, role: str) -> bool:
        parts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
        shown = self._render(self._dialogue(role, parts))
        whole = self._render(self._dialogue(role, _FIRST + _SECOND))
        if _FIRST + _SECOND not in whole:
            return self.needs_parts(role)
        # Some templates put a line end between parts; those that cut or trim them lose text.
        joined = (_FIRST + between + _SECOND for between in ("", "\n", "\n\n"))
        return any(shown == whole.replace(_FIRST + _SECOND, text) for text in joined)

    def _try_only_parts(self, role: str) -> bool:
        if _SECOND in self._render(self._dialogue(role, _SECOND)):
            return False
        shown = self._render(_with_parts(self._dialogue(role, _SECOND)))
        return _SECOND in shown and not _is_printed_by_python(shown, _SECOND)

    def _dialogue(self, role: str, content: Any) -> list[Message]:
        user: Message = {"role": "user", "content": "zqq"}
        message = {"role": role, "content": content}
        if role == "user":
            return [message]
        if role == "system":
            return [message, user]
        if role == "assistant":
            return [user, message]
        reply = {**message, "name": "zqf", "tool_call_id": "000000000"}
        return [user, _calling(_ARGUMENTS, self.needs_text_arguments()), reply]

    def _try_text_arguments(self, role: str) -> bool:
        user: Message = {"role": "user", "content": "zqq"}
        shown = self._render([user, _calling(_ARGUMENTS)])
        if "zqk" in shown and not _is_printed_by_python(shown, "zqk"):
            return False
        return json.dumps(_ARGUMENTS) in self._render([user, _calling(_ARGUMENTS, as_text=True)])

    def _try_null(self, role: str) -> bool:
        user: Message = {"role": "user", "content": "zqq"}
        calling = _calling(_ARGUMENTS, self.needs_text_arguments())
        shown = self._render([user, {**calling, "content": None}])
        return bool(shown) and shown == self._render([user, calling])


def _calling(arguments: Mapping[str, Any], as_text: bool = False) -> Message:
    written = json.dumps(arguments) if as_text else arguments
    function = {"name": "zqf", "arguments": written}
    call = {"type": "function", "id": "000000000", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_parts(messages: Sequence[Message]) -> list[Message]:
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


def _is_printed_by_python(shown: str, text: str) -> bool:
    """Whether a value was printed by Python instead of as JSON."""
    return f"'{text}" in shown
