"""Incremental detokenization, without partial characters or stop strings; OpenAI's replies."""

import json
import math
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data.token_names import TokenNames
from jaxrl_llm.rollout.engine.requests import Decode, TopLogProbs, text_before
from jaxrl_llm.serving.protocol import ApiError, GenerationRequest
from jaxrl_llm.serving.tool_call_stream import StreamedCall

Json = dict[str, Any]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_MISSING_CHARACTERS = 3  # decoded as U+FFFD until the fourth byte of a character arrives
_MAX_WINDOW = 32  # tokens decoded together while a text stays incomplete


def detokenizer(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> Decode:
    """The function that decodes tokens into text, by default without special tokens."""
    skip = skip_special_tokens
    # Without clean-up of spaces, which would remove a space that was already returned.
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # The wrapper around it is slow, and this runs once for every token served.
        return lambda tokens: str(backend.decode(list(tokens), skip_special_tokens=skip))
    return lambda tokens: str(
        tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


class IncrementalDetokenizer:
    """Incremental detokenizer of one sample, up to its first stop string or its last stop token.

    The texts returned by `extend` concatenate to the same text, however the tokens are split.
    Decoding a whole sample at every token is quadratic, and decoding a token alone loses spaces
    and splits characters; so each token is decoded with a window of those before it.
    """

    def __init__(self, decode: Decode, stop_tokens: Sequence[int] = (), stops: Sequence[str] = ()):
        self._decode, self._stop_tokens, self._stop_strings = decode, stop_tokens, stops
        # The latest tokens; the first `_num_context` of them are context, already returned as text.
        self._window: list[int] = []
        self._num_context = 0
        self._text = ""  # the decoded window
        self._num_returned = 0  # characters of `_text` that were returned
        self._withheld = ""  # text that may be the beginning of a stop string
        self._num_characters = 0
        self.stop_string = ""  # the first one in the text, once the sample has ended
        self.offsets: list[int] = []  # where the text of each token of the last `extend` begins

    def extend(self, tokens: Sequence[int], finish_reason: str) -> str:
        """The text that is final now; `finish_reason` is "" while more tokens may come."""
        text, self.offsets = self._withheld, []
        for i, token in enumerate(tokens):
            self.offsets.append(self._num_characters)
            is_last = finish_reason == "stop" and i == len(tokens) - 1
            if not (is_last and token in self._stop_tokens):
                text += self._push(token)
        if finish_reason:
            text += self._release(len(self._text))
            ending = text_before(text, self._stop_strings)
            behind = text[len(ending) :]
            self.stop_string = next(filter(behind.startswith, self._stop_strings), "")
            return ending
        # A sample ends with the token that completes a stop string, so `text` contains none here.
        beginnings = (stop[:size] for stop in self._stop_strings for size in range(1, len(stop)))
        num_withheld = max((len(part) for part in beginnings if text.endswith(part)), default=0)
        end = len(text) - num_withheld
        self._withheld = text[end:]
        return text[:end]

    def _push(self, token: int) -> str:
        text = self._decode([*self._window, token])
        is_complete = not text.endswith(_BROKEN)
        if is_complete and text == self._text:
            # A special token. It must not become the context either: some decoders drop the space
            # before the first word of a text.
            return ""
        self._window.append(token)
        self._text = text
        # The last character may lack bytes. Until they arrive, some decoders replace all bytes
        # before it, too.
        end = len(text) if is_complete else len(text.rstrip(_BROKEN))
        added = self._release(max(end, len(text) - _MAX_MISSING_CHARACTERS - self._num_context))
        if is_complete:
            self._trim_window(len(self._window) - self._num_context)
            self._num_context = len(self._window)
        elif len(self._window) > _MAX_WINDOW:
            self._trim_window(_MAX_WINDOW * 3 // 4)
            self._num_context = 0
        return added

    def _release(self, end: int) -> str:
        added = self._text[self._num_returned : end]
        self._num_returned = max(self._num_returned, end)
        self._num_characters += len(added)
        return added

    def _trim_window(self, count: int) -> None:
        """Drops all but the last `count` tokens of the window."""
        num_pending = len(self._text) - self._num_returned
        self._window = self._window[-count:]
        self._text = self._decode(self._window)
        self._num_returned = max(0, len(self._text) - num_pending)


class SampleDelta(NamedTuple):
    """The part of a sample that one engine step added; its text is final."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    offsets: tuple[int, ...] = ()  # of each token in the text of the sample
    finish_reason: str = ""  # "" while the sample is running
    calls: tuple[StreamedCall, ...] = ()  # tool calls completed in this step
    reasoning: str = ""
    stop_string: str = ""  # the one that ended the sample, if one did


class ReplyFormat(Protocol):
    """How a protocol writes a reply: whole, or as the server-sent events of a stream."""

    def reply(self, samples: Sequence[SampleDelta]) -> Json: ...

    def opening_events(self) -> Iterator[bytes]: ...

    def events(self, index: int, piece: SampleDelta, num_tokens: int) -> Iterator[bytes]: ...

    def closing_events(self, num_tokens: int) -> Iterator[bytes]: ...

    def error_event(self, error: ApiError) -> bytes: ...


class CompletionFormat:
    """The reply to a request at `/v1/completions`, complete or as a stream of events.

    Token usage comes in a last event of its own or, cumulative, in every event.
    """

    id_prefix, object_type, chunk_object_type = (
        "cmpl",
        "text_completion",
        "text_completion",
    )  # OpenAI's names

    def __init__(
        self,
        model: str,
        names: TokenNames,
        generation: GenerationRequest,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ):
        self._names, self._generation = names, generation
        self._include_usage, self._continuous_usage = include_usage, continuous_usage
        number = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._head = {"id": number, "created": int(time.time()), "model": model}

    def reply(self, samples: Sequence[SampleDelta]) -> Json:
        choices = [
            self._choice(i, piece, self.object_type) | self._prompt_token_ids(i)
            for i, piece in enumerate(samples)
        ]
        usage = self._usage(sum(len(piece.tokens) for piece in samples))
        return {**self._head, "object": self.object_type, "choices": choices, "usage": usage}

    def opening_events(self) -> Iterator[bytes]:
        """Yields the events with which a stream begins."""
        for chunk in self._opening_chunks():
            yield self._event(chunk, 0)

    def events(self, index: int, piece: SampleDelta, num_tokens: int) -> Iterator[bytes]:
        """Yields the events of a piece; `num_tokens` were generated with it."""
        has_contents = piece.text or piece.reasoning or piece.calls or piece.finish_reason
        generation = self._generation
        # Without them, an event is worth sending only for its tokens.
        if has_contents or generation.with_log_probs or generation.with_token_ids:
            chunk = self._chunk(self._choice(index, piece, self.chunk_object_type))
            yield self._event(chunk, num_tokens)

    def closing_events(self, num_tokens: int) -> Iterator[bytes]:
        """Yields the events with which a stream ends."""
        if self._include_usage:
            yield self._event({**self._chunk(), "usage": self._usage(num_tokens)}, num_tokens)
        yield b"data: [DONE]\n\n"

    def error_event(self, error: ApiError) -> bytes:
        """The event with which a stream ends that has failed."""
        return f"data: {json.dumps(error.body)}\n\n".encode()

    def _event(self, chunk: Json, num_tokens: int) -> bytes:
        if self._include_usage:
            usage = self._usage(num_tokens) if self._continuous_usage else None
            chunk = {"usage": usage, **chunk}
        data = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        return f"data: {data}\n\n".encode()

    def _opening_chunks(self) -> list[Json]:
        if not self._generation.with_token_ids:
            return []
        return [
            self._chunk(
                self._choice(i, SampleDelta(), self.chunk_object_type) | self._prompt_token_ids(i)
            )
            for i in range(len(self._generation.sampling_params))
        ]

    def _chunk(self, *choices: Json) -> Json:
        return {**self._head, "object": self.chunk_object_type, "choices": list(choices)}

    def _choice(self, index: int, piece: SampleDelta, kind: str) -> Json:
        log_probs = self._log_probs(piece) if self._generation.with_log_probs else None
        log_probs_and_reason = {"logprobs": log_probs, "finish_reason": piece.finish_reason or None}
        token_ids = {"token_ids": list(piece.tokens)} if self._generation.with_token_ids else {}
        return {"index": index, **self._text(piece, kind), **log_probs_and_reason, **token_ids}

    def _token_text(self, token: int) -> str:
        return f"token_id:{token}" if self._generation.names_token_ids else self._names.text(token)

    def _prompt_token_ids(self, index: int) -> Json:
        """The prompt of a sample, if asked for; the choice of a completion has it, as in vLLM."""
        if not self._generation.with_token_ids:
            return {}
        owners = [request for request in self._generation.requests for _ in request.params]
        return {"prompt_token_ids": list(owners[index].tokens)}

    def _usage(self, num_tokens: int) -> Json:
        """OpenAI's `usage` object; `num_tokens` are the completion tokens."""
        prompt = self._generation.num_prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": num_tokens}
        return {**counts, "total_tokens": prompt + num_tokens}

    def _text(self, piece: SampleDelta, kind: str) -> Json:
        return {"text": piece.text}

    def _log_probs(self, piece: SampleDelta) -> Json:
        text = self._token_text
        tops = [{text(t): _finite(p) for t, p in reversed(top)} for top in piece.top_log_probs]
        return {
            "tokens": [text(t) for t in piece.tokens],
            "token_logprobs": [_finite(p) for p in piece.log_probs],
            "top_logprobs": tops if self._generation.sampling_params[0].num_top_log_probs else None,
            "text_offset": list(piece.offsets),
        }


class ChatFormat(CompletionFormat):
    """The reply to a request at `/v1/chat/completions`."""

    id_prefix, object_type, chunk_object_type = (
        "chatcmpl",
        "chat.completion",
        "chat.completion.chunk",
    )

    def reply(self, samples: Sequence[SampleDelta]) -> Json:
        return super().reply(samples) | self._shared_prompt_token_ids()

    def _opening_chunks(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        rest = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [
            self._chunk({"index": i, **rest}) | self._shared_prompt_token_ids()
            for i in range(len(self._generation.sampling_params))
        ]

    def _prompt_token_ids(self, index: int) -> Json:
        return {}  # all choices of a chat have one prompt, which stands beside them

    def _shared_prompt_token_ids(self) -> Json:
        return super()._prompt_token_ids(0)

    def _text(self, piece: SampleDelta, kind: str) -> Json:
        if kind == self.chunk_object_type:
            has_content = piece.text or (piece.tokens and not piece.reasoning)
            delta: Json = {"content": piece.text} if has_content else {}
            if piece.reasoning:
                delta["reasoning_content"] = piece.reasoning
            if piece.calls:
                delta["tool_calls"] = [{"index": c.number, **c.as_json()} for c in piece.calls]
            return {"delta": delta}
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [call.as_json() for call in piece.calls]
        return {"message": message}

    def _log_probs(self, piece: SampleDelta) -> Json:
        def entry(token: int, log_prob: float) -> Json:
            raw = list(self._names.bytes(token))
            return {"token": self._token_text(token), "logprob": _finite(log_prob), "bytes": raw}

        tops = piece.top_log_probs or ((),) * len(piece.tokens)
        content = [
            {**entry(t, p), "top_logprobs": [entry(*pair) for pair in top]}
            for t, p, top in zip(piece.tokens, piece.log_probs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}


def _finite(log_prob: float) -> float:
    """A log-prob that JSON can represent: minus infinity becomes -9999, as in OpenAI's API."""
    return log_prob if math.isfinite(log_prob) else -9999.0
