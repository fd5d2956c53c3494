"""The reply of OpenAI's Responses API, complete or as a stream of events."""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_llm.agents.tool_call_scanner import THINKING
from jaxrl_llm.data.token_names import TokenNames
from jaxrl_llm.serving.protocol import ApiError, GenerationRequest
from jaxrl_llm.serving.replies import Json, SampleDelta, token_log_probs
from jaxrl_llm.serving.responses_api.body import ResponseRequest
from jaxrl_llm.serving.responses_api.items import with_parts
from jaxrl_llm.serving.responses_api.store import ResponseStore, StoredResponse
from jaxrl_llm.serving.tool_call_stream import StreamedCall

Event = tuple[str, Json]  # its type, its contents

# The last of them is harmony's.
_END_OF_THINKING = tuple(mark.encode() for mark in (*THINKING.values(), "<|end|>"))
_CLOSED, _CUT = "completed", "incomplete"


class _GrowingItem:
    """An output item whose only part grows: the thinking, or the message of a reply."""

    def __init__(self, kind: str, output_index: int):
        self._kind = kind
        self.item_id = new_id("rs" if kind == "reasoning" else "msg")
        self.output_index = output_index
        self.place: Json = {"item_id": self.item_id, "output_index": output_index}
        self.place["content_index"] = 0
        self.texts: list[str] = []
        self.log_probs: list[Json] = []

    @property
    def part(self) -> Json:
        text = "".join(self.texts)
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": list(self.log_probs),
        }

    def as_json(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self.part]
        fields: Json = {"summary": []} if self._kind == "reasoning" else {"role": "assistant"}
        head = {"id": self.item_id, "type": self._kind}
        return {**head, "status": status, **fields, "content": content}

    def opening_events(self) -> Iterator[Event]:
        added = {"output_index": self.output_index, "item": self.as_json("in_progress")}
        yield "response.output_item.added", added
        yield "response.content_part.added", {**self.place, "part": self.part}

    def growth_events(self, text: str, log_probs: Sequence[Json]) -> Iterator[Event]:
        if not (text or log_probs):
            return
        self.texts.append(text)
        self.log_probs += log_probs
        if self._kind == "reasoning":
            yield "response.reasoning_text.delta", {**self.place, "delta": text}
        else:
            delta = {"delta": text, "logprobs": list(log_probs)}
            yield "response.output_text.delta", {**self.place, **delta}

    def closing_events(self, status: str) -> Iterator[Event]:
        part = self.part
        log_probs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        done = {**self.place, "text": part["text"], **log_probs}
        yield f"response.{part['type']}.done", done
        yield "response.content_part.done", {**self.place, "part": part}
        item = self.as_json(status)
        yield "response.output_item.done", {"output_index": self.output_index, "item": item}


class ResponsesFormat:
    """The reply to a request at `/v1/responses`; stores it when it is complete.

    Thinking, text and each tool call are output items, in the order in which they begin. Text
    behind a call continues the message before it, as in a chat.
    """

    def __init__(
        self,
        names: TokenNames,
        store: ResponseStore,
        request: ResponseRequest,
        generation: GenerationRequest,
    ):
        self._names, self._store = names, store
        self._request, self._generation = request, generation
        self._number, self._created_s = new_id("resp"), int(time.time())
        self._num_events = 0
        self._output: list[Json] = []  # as they are when closed
        self._open: dict[str, _GrowingItem] = {}  # by kind; "reasoning" and "message"
        self._tokens: list[int] = []
        self._thinks = False
        self._early_log_probs: list[Json] = []  # of tokens before the message
        self._final: Json = {}  # the response, once it is complete

    def reply(self, samples: Sequence[SampleDelta]) -> Json:
        (sample,) = samples
        for _ in self._events_of(sample, len(sample.tokens)):
            pass
        return self._final

    def opening_events(self) -> Iterator[bytes]:
        """Yields the events with which a stream begins."""
        for kind in ("created", "in_progress"):
            yield self._encoded(f"response.{kind}", {"response": self._response("in_progress")})

    def events(self, index: int, piece: SampleDelta, num_tokens: int) -> Iterator[bytes]:
        """Yields the events of a piece; `num_tokens` were generated with it."""
        for kind, contents in self._events_of(piece, num_tokens):
            yield self._encoded(kind, contents)

    def closing_events(self, num_tokens: int) -> Iterator[bytes]:
        """Yields the events with which a stream ends."""
        kind = f"response.{self._final['status']}"
        yield self._encoded(kind, {"response": self._final})

    def error_event(self, error: ApiError) -> bytes:
        """The event with which a stream ends that has failed."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._response("failed", error={"code": code, "message": str(error)})
        return self._encoded("response.failed", {"response": failed})

    def _events_of(self, piece: SampleDelta, num_tokens: int) -> Iterator[Event]:
        self._tokens += piece.tokens
        log_probs: list[Json] = []
        if self._generation.with_log_probs:
            named_ids = self._generation.names_token_ids
            log_probs = self._early_log_probs + token_log_probs(self._names, named_ids, piece)
            self._early_log_probs = []
        reason = piece.finish_reason
        status = _CUT if reason == "length" else _CLOSED
        if piece.reasoning:
            self._thinks = True
            yield from self._begin_item("reasoning")
            yield from self._open["reasoning"].growth_events(piece.reasoning, ())
        says_nothing = not (self._open or piece.calls or any(map(_is_call, self._output)))
        if piece.text or "message" in self._open or (reason and says_nothing):
            yield from self._end_item("reasoning", _CLOSED)
            yield from self._begin_item("message")
            yield from self._open["message"].growth_events(piece.text, log_probs)
        else:
            self._early_log_probs = log_probs
        for call in piece.calls:
            yield from self._end_item("reasoning", _CLOSED)
            yield from self._call_events(call)
        if reason:
            for kind in tuple(self._open):
                yield from self._end_item(kind, status)
            self._complete(status, num_tokens)

    def _begin_item(self, kind: str) -> Iterator[Event]:
        """Opens an item unless it is open."""
        if kind not in self._open:
            self._open[kind] = item = _GrowingItem(kind, len(self._output))
            self._output.append(item.as_json("in_progress"))
            yield from item.opening_events()

    def _end_item(self, kind: str, status: str) -> Iterator[Event]:
        """Closes an item if it is open."""
        if kind in self._open:
            item = self._open.pop(kind)
            self._output[item.output_index] = item.as_json(status)
            yield from item.closing_events(status)

    def _call_events(self, call: StreamedCall) -> Iterator[Event]:
        index, item_id = len(self._output), new_id("fc")
        head = {"id": item_id, "type": "function_call", "call_id": call.call_id, "name": call.name}
        item = {**head, "status": _CLOSED, "arguments": call.arguments}
        self._output.append(item)
        place = {"item_id": item_id, "output_index": index}
        begun = {**head, "status": "in_progress", "arguments": ""}
        yield "response.output_item.added", {"output_index": index, "item": begun}
        delta = {**place, "delta": call.arguments}
        yield "response.function_call_arguments.delta", delta
        done = {**place, "name": call.name, "arguments": call.arguments}
        yield "response.function_call_arguments.done", done
        yield "response.output_item.done", {"output_index": index, "item": item}

    def _complete(self, status: str, num_tokens: int) -> None:
        """Makes the final response, and stores it unless the client does not want that."""
        request = self._request
        response = self._response(status, usage=self._usage(num_tokens))
        if self._generation.with_token_ids:
            response["prompt_token_ids"] = list(self._generation.requests[0].tokens)
            response["token_ids"] = list(self._tokens)
        if response["store"]:
            items = [
                {"id": new_id("item"), **item.model_dump(exclude_none=True)}
                for item in map(with_parts, request.items)
            ]
            stored = StoredResponse(
                self._number,
                _json_bytes(response),
                _json_bytes(items),
                tuple(item["id"] for item in self._output),
                request.previous,
            )
            # A dialogue larger than the whole store is not kept, and the reply says so.
            response["store"] = self._store.fits(stored)
            if response["store"]:
                self._store.add(stored)
        self._final = response

    def _usage(self, num_tokens: int) -> Json:
        prompt = self._generation.num_prompt_tokens
        num_thinking = self._num_thinking_tokens() if self._thinks else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_thinking},
            "total_tokens": prompt + num_tokens,
        }

    def _num_thinking_tokens(self) -> int:
        """Tokens up to the first mark that ends thinking; all tokens if there is none."""
        tail = b""
        for number, token in enumerate(self._tokens, start=1):
            tail = (tail + self._names.bytes(token))[-64:]
            if any(mark in tail for mark in _END_OF_THINKING):
                return number
        return len(self._tokens)

    def _response(self, status: str, usage: Json | None = None, error: Json | None = None) -> Json:
        body, params = self._request.body, self._generation.sampling_params[0]
        reason = {"reason": "max_output_tokens"} if status == _CUT else None
        text = body.text
        choice = body.tool_choice or "auto"
        return {
            "id": self._number,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": int(time.time()) if status == _CLOSED else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": params.temperature,
            "text": {
                "format": (text and text.format) or {"type": "text"},
                "verbosity": text and text.verbosity,
            },
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"strict": False, **tool.model_dump()} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
        }

    def _encoded(self, kind: str, contents: Json) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **contents}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _json_bytes(event) + b"\n\n"


def new_id(prefix: str) -> str:
    """An id as OpenAI's: what it names, and a random number."""
    return f"{prefix}_{uuid.uuid4().hex}"


def _is_call(item: Json) -> bool:
    return bool(item["type"] == "function_call")


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
