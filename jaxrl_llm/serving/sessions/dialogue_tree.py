"""The dialogues of a session, and the token ids of the replies in them.

Clients send text. A reply of the policy that comes back in a later request is recognized by what
was returned to the client, and the prompt of that request is built from the ids that were sampled
and the tokens that the chat template adds after them (`agents/template_delta.py`). So a reply is
never tokenized again, whatever the client did to its white space, its JSON or its thinking.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.agents import template_delta
from jaxrl_llm.data.tokenizer import Message
from jaxrl_llm.serving.protocol import ChatPrompt

Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SampledReply:
    """A reply that the policy has sampled."""

    tokens: Tokens  # of the prompt and the reply
    message: Message  # as the client got it, in the form for the chat template
    text: str  # as sampled, with special tokens


@dataclasses.dataclass(eq=False)
class _Node:
    """A message of a dialogue, and the messages that followed it in any request."""

    message: Message
    parent: "_Node | None" = None
    reply: SampledReply | None = None  # the policy's, sampled at this place
    children: list["_Node"] = dataclasses.field(default_factory=list)

    def path(self) -> list["_Node"]:
        """The nodes from the first message to this one."""
        nodes, node = list[_Node](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class DialogueTree:
    """All dialogues of a session. Dialogues with other tools or template variables are apart."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tokenize: Callable[[ChatPrompt], Tokens],
        parse: Callable[[ChatPrompt, Sequence[int], bool, Sequence[str]], tuple[Message, str]],
    ):
        """
        Args:
          tokenize: The tokens of a prompt in which no reply is known.
          parse: (prompt, reply tokens, stopped, stop strings) -> the reply as a message for the
            chat template, and its text with special tokens.
        """
        self._tokenizer, self._tokenize, self._parse = tokenizer, tokenize, parse
        self._roots: dict[str, _Node] = {}  # by tools and other template variables
        # Prompts that may be answered: their nodes, and how they were asked.
        self._prompts: dict[Tokens, tuple[_Node, ChatPrompt]] = {}
        self._last_node: _Node | None = None
        self.num_unmatched = 0  # replies that came back changed
        self.num_rewritten = 0  # prompts whose earlier replies the template writes otherwise

    def prompt_tokens(self, chat: ChatPrompt) -> Tokens:
        """The tokens of a prompt, with the sampled ids of all replies that are recognized.

        Raises:
          DataError: If the chat template rejects the dialogue.
        """
        root = self._roots.setdefault(_canonical(chat.options), _Node({}))
        node = root
        for message in chat.messages:
            node = self._child(node, message)
        tokens = self._tokens_after_replies(node, chat)
        if tokens is None:
            tokens = self._tokenize(chat)
        self._prompts[tokens] = node, chat
        return tokens

    def record_reply(
        self, prompt: Tokens, tokens: Sequence[int], stopped: bool, stop_strings: Sequence[str]
    ) -> None:
        """Records a reply; one to a prompt of another endpoint than a chat's is ignored."""
        if prompt not in self._prompts:
            return
        node, chat = self._prompts[prompt]
        message, text = self._parse(chat, tokens, stopped, stop_strings)
        child = _Node(message, node, SampledReply((*prompt, *tokens), message, text))
        node.children.append(child)
        self._last_node = child

    def last_dialogue(self) -> list[Message]:
        """The messages from the first sampled reply to the latest one; empty without any."""
        path = [] if self._last_node is None else self._last_node.path()
        is_later = itertools.dropwhile(lambda node: node.reply is None, path)
        return [node.message for node in is_later]

    def _child(self, node: _Node, message: Message) -> _Node:
        """The node of a message that follows those of `node`; the latest reply that matches it."""
        replies = [child for child in node.children if child.reply is not None]
        if message["role"] == "assistant":
            for child in reversed(replies):
                if is_same_reply(child.message, message):
                    return child
        key = _canonical(message)
        literal = (child for child in node.children if child.reply is None)
        for child in literal:
            if _canonical(child.message) == key:
                return child
        if message["role"] == "assistant" and replies:
            self.num_unmatched += 1
        child = _Node(message, node)
        node.children.append(child)
        return child

    def _tokens_after_replies(self, node: _Node, chat: ChatPrompt) -> Tokens | None:
        """The ids up to the last sampled reply, and those of the template after it.

        None if no message is a sampled reply, or the template writes earlier turns otherwise now.
        """
        path = node.path()
        place = max((i for i, each in enumerate(path) if each.reply is not None), default=-1)
        if place < 0 or not chat.uses_template:
            return None
        reply = path[place].reply
        assert reply is not None
        messages = [each.message for each in path]
        following = messages[place + 1 :]
        if not following:  # the client asks to continue the reply itself
            return None
        delta = template_delta.delta_after_turn(
            self._tokenizer,
            messages_before=messages[:place],
            assistant_message=reply.message,
            following_messages=following,
            options=chat.options,
            last_token=reply.tokens[-1],
            sampled_text=reply.text,
        )
        if delta.rewrites:
            self.num_rewritten += 1
            return None
        tokens = (*reply.tokens, *delta.tokens)
        if chat.call_start:
            encoded = self._tokenizer(chat.call_start, add_special_tokens=False)["input_ids"]
            tokens = (*tokens, *encoded)
        return tokens


def is_same_reply(sampled: Message, returned: Message) -> bool:
    """Whether a message that a client sends is a reply it got, in the forms clients give it.

    White space is ignored; arguments of calls are compared as values, so that the order of keys and
    the way numbers are written do not count; thinking may be missing, or stand in the text; the
    text may be missing beside calls.

    >>> call = lambda **arguments: [{"function": {"name": "add", "arguments": arguments}}]
    >>> sampled = {"content": "Let me see.", "tool_calls": call(a=1, b=2)}
    >>> is_same_reply(sampled, {"content": "", "tool_calls": call(b=2, a=1.0)})
    True
    >>> is_same_reply(sampled, {"content": "Let me see.", "tool_calls": call(a=1, b=3)})
    False
    """
    if _calls(sampled) != _calls(returned):
        return False
    text, thinking = _squeezed(sampled.get("content")), _squeezed(sampled.get("reasoning_content"))
    returned_text = _squeezed(returned.get("content"))
    returned_thinking = _squeezed(returned.get("reasoning_content"))
    if returned_thinking and returned_thinking != thinking:
        return False
    forms = {text, thinking + text, f"<think>{thinking}</think>{text}"}
    return returned_text in forms or bool(not returned_text and sampled.get("tool_calls"))


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in functions]


def _squeezed(content: Any) -> str:
    """A text without white space; the texts of parts are joined."""
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    return "".join((content or "").split())


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)
