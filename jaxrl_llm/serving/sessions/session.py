"""One session: the requests of a black-box agent in one episode, seen from the HTTP server.

Handlers of the server submit requests in its event loop and tokenizer thread; the engine loop
delivers tokens from the main thread.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.agents.tools import special_tokens
from jaxrl_llm.data.token_names import detokenizer
from jaxrl_llm.data.tokenizer import Message
from jaxrl_llm.rollout.engine.requests import Progress, Request
from jaxrl_llm.rollout.session_host import SessionEvent, SessionRequest
from jaxrl_llm.serving.chat import call_message, chat_tokenizer, expected_calls
from jaxrl_llm.serving.driver import RejectReason, RequestRejected, SampleEvent, Ticket
from jaxrl_llm.serving.protocol import ChatPrompt, ServedModel
from jaxrl_llm.serving.replies import IncrementalDetokenizer
from jaxrl_llm.serving.sessions.dialogue_tree import DialogueTree
from jaxrl_llm.serving.tool_call_stream import ToolCallStream


class ReplyParser:
    """Parses whole replies of a model as the server's streams do."""

    def __init__(self, served: ServedModel):
        self._served = served
        self._decode = detokenizer(served.tokenizer, skip_special_tokens=False)
        self._special = special_tokens(served.tokenizer)
        self._special_ids = {*served.tokenizer.all_special_ids}
        self._special_ids |= {*served.tokenizer.added_tokens_decoder}

    def parse(
        self, chat: ChatPrompt, tokens: Sequence[int], stopped: bool, stop_strings: Sequence[str]
    ) -> tuple[Message, str]:
        """The reply to a dialogue as a message for the chat template, and its text as sampled."""
        ends = tokens[-1:] if stopped and tokens[-1] in self._special_ids else ()
        text = self._decode(tokens[: len(tokens) - len(ends)])
        transcript = IncrementalDetokenizer(self._decode, ends, stop_strings)
        reply_text = transcript.extend(tokens, "stop" if stopped else "length")
        tools = chat.options.get("tools") or ()
        expected = expected_calls(self._served, tools, chat.text, chat.call_start)
        if expected is None:
            if self._special is not None:
                reply_text = self._special.sub("", reply_text)
            return {"role": "assistant", "content": reply_text}, text
        stream = ToolCallStream(expected, self._special)
        delta = stream.extend(reply_text, True, stopped=stopped)
        message: dict[str, Any] = {"role": "assistant", "content": delta.text}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["tool_calls"] = [call_message(call) for call in delta.calls]
        return message, text


@dataclasses.dataclass
class _PendingReply:
    """A sample that is not finished."""

    prompt: tuple[int, ...]
    stop_strings: tuple[str, ...]
    tokens: list[int] = dataclasses.field(default_factory=list)


class Session:
    """The requests of one episode, and the dialogues that they are part of."""

    def __init__(
        self,
        episode: int,
        served: ServedModel,
        parser: ReplyParser,
        max_requests: int,
        push: Callable[[SessionEvent], None],
        call_soon: Callable[..., object],
    ):
        """
        Args:
          push: Passes an event to the engine loop.
          call_soon: Schedules a call in the server's event loop, from any thread.
        """
        self.episode, self._push, self._call_soon = episode, push, call_soon
        self._max_requests = max_requests
        self._lock = threading.Lock()
        self._tree = DialogueTree(served.tokenizer, chat_tokenizer(served.tokenizer), parser.parse)
        self._tickets: dict[int, tuple[Ticket, int]] = {}  # by request; its first sample
        self._pending: dict[tuple[int, int], _PendingReply] = {}  # by request and sample
        self._unread: list[tuple[_PendingReply, bool]] = []  # finished, not yet in the tree
        self.is_closed = False
        self.num_requests = self.num_replies = 0
        self.errors: Counter[str] = Counter()

    def prompt_tokens(self, chat: ChatPrompt) -> tuple[int, ...]:
        """The tokens of a dialogue, those of its sampled replies as they were sampled."""
        with self._lock:
            self._read_replies()
            return self._tree.prompt_tokens(chat)

    def submit(
        self, requests: Sequence[Request], listener: Callable[[SampleEvent], None], role: int = 0
    ) -> Ticket:
        """Passes a role's requests to the engine loop; raises `RequestRejected` beyond a limit."""
        ticket = Ticket(tuple(requests), listener, sum(len(each.params) for each in requests))
        with self._lock:
            if self.is_closed:
                raise RequestRejected("not_serving", "the session has ended")
            if self.num_requests + len(requests) > self._max_requests:
                self.errors["too_many_requests"] += 1
                message = f"the session has sent {self.num_requests} requests"
                rule = f"agent.max_requests is {self._max_requests}"
                raise RequestRejected("unfit", f"{message}, and {rule}; end it")
            if any(request.image_inputs is not None for request in requests):
                self.errors["refused"] += 1
                raise RequestRejected("unfit", "sessions of a training run take texts alone")
            adjusted = {name for each in requests for name in each.params[0].adjustments}
            if adjusted:
                self.errors["refused"] += 1
                message = f"the run samples from its policy, without {', '.join(sorted(adjusted))}"
                raise RequestRejected("unfit", f"{message}; leave it out")
            first_sample = 0
            for request in requests:
                number, params = self.num_requests, request.params[0]
                self.num_requests += 1
                ticket.request_ids += (number,)
                self._tickets[number] = ticket, first_sample
                first_sample += len(request.params)
                for sample in range(len(request.params)):
                    reply = _PendingReply(request.tokens, params.stop_strings)
                    self._pending[number, sample] = reply
                session_request = SessionRequest(
                    number,
                    request.tokens,
                    len(request.params),
                    params.max_tokens,
                    params.stop_tokens,
                    params.stop_strings,
                    params.num_top_log_probs,
                    request.num_prompt_top,
                    request.grammar.text if request.grammar else "",
                    role,
                )
                self._push(SessionEvent(self.episode, request=session_request))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Gives up the unfinished requests of a ticket."""
        with self._lock:
            if not ticket.num_unfinished or self.is_closed:
                return
            self.errors["cancelled"] += 1
            ticket.num_unfinished = 0
            for number in ticket.request_ids:
                if self._tickets.pop(number, None):
                    self._push(SessionEvent(self.episode, cancelled=number))

    def deliver(self, number: int, progress: Progress) -> None:
        """Passes tokens of a request on to the client."""
        with self._lock:
            key = number, progress.sample
            reply = self._pending[key]
            reply.tokens += progress.tokens
            if progress.finish_reason:
                self.num_replies += 1
                self._unread.append((self._pending.pop(key), progress.finish_reason == "stop"))
            if number not in self._tickets:
                return
            ticket, first_sample = self._tickets[number]
            ticket.num_unfinished -= bool(progress.finish_reason)
        self._call_soon(ticket.listener, (first_sample + progress.sample, progress))

    def refuse(self, number: int, kind: str, reason: RejectReason, message: str) -> None:
        """Answers a request with an error, counted as `kind`."""
        with self._lock:
            self.errors[kind] += 1
            ticket, _ = self._tickets.pop(number, (None, 0))
        if ticket is not None and ticket.num_unfinished:
            ticket.num_unfinished = 0
            self._call_soon(ticket.listener, RequestRejected(reason, message))

    def close(self) -> None:
        """Ends the session: open requests get an error, later ones are rejected."""
        with self._lock:
            self.is_closed = True
            tickets = {id(ticket): ticket for ticket, _ in self._tickets.values()}
            self._tickets = {}
        for ticket in tickets.values():
            if ticket.num_unfinished:
                rejection = RequestRejected("not_serving", "the session has ended")
                self._call_soon(ticket.listener, rejection)

    def dialogue(self) -> list[Message]:
        """The messages from the first sampled reply of a chat to the latest; empty without any."""
        with self._lock:
            self._read_replies()
            return self._tree.last_dialogue()

    @property
    def num_unmatched(self) -> int:
        """Replies that came back changed."""
        return self._tree.num_unmatched

    @property
    def num_rewritten(self) -> int:
        """Prompts in which the template wrote earlier replies otherwise."""
        return self._tree.num_rewritten

    def _read_replies(self) -> None:
        unread, self._unread = self._unread, []
        for reply, stopped in unread:
            self._tree.record_reply(reply.prompt, reply.tokens, stopped, reply.stop_strings)
