"""Incremental detokenization, without partial characters or stop strings; OpenAI's replies."""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.data.token_names import TokenNames
from jaxrl_llm.rollout.engine.requests import Decode, PromptLogProbs, TopLogProbs, text_before
from jaxrl_llm.serving import prompt_replies
from jaxrl_llm.serving.prompt_replies import json_log_prob
from jaxrl_llm.serving.protocol import ApiError, GenerationRequest
from jaxrl_llm.serving.tool_call_stream import StreamedCall

Json = dict[str, Any]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_MISSING_CHARACTERS = 3  # decoded as U+FFFD until the fourth byte of a character arrives
_MAX_WINDOW = 32  # tokens decoded together while a text stays incomplete


class IncrementalDetokenizer:
    """Incremental detokenizer of one sample, up to its first stop string or its last stop token.

    The texts returned by `extend` concatenate to the same text, however the tokens are split.
    Decoding a whole sample at every token is quadratic, and decoding a token alone loses spaces
    and splits characters; so each token is decoded with a window of those before it.
    """

    def __init__(
        self,
        decode: Decode,
        stop_tokens: Sequence[int] = (),
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ):
        """`min_tokens` as in `SamplingParams`: stop strings among them stay in the text."""
        self._decode, self._stop_tokens, self._stop_strings = decode, stop_tokens, stops
        self._num_early_tokens, self._early_end = min_tokens, 0  # tokens left, characters of them
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
            if self._num_early_tokens:
                self._num_early_tokens -= 1
                self._early_end = self._num_characters
        if finish_reason:
            text += self._release(len(self._text))
            num_early = self._early_end - (self._num_characters - len(text))
            ending = text_before(text, self._stop_strings, max(0, num_early))
            behind = text[len(ending) :]
            self.stop_string = next(filter(behind.startswith, self._stop_strings), "")
            return ending
        # A sample ends with the token that completes a stop string, so `text` contains none here,
        # except for early ones.
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
    prompt_log_probs: tuple[PromptLogProbs, ...] = ()  # one, in the first delta, if asked for


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
        self._prompts = [request.tokens for request in generation.requests for _ in request.params]
        self._num_samples = len(generation.requests[0].params) if generation.requests else 0
        self._echoed: set[int] = set()  # samples whose reply has begun with the prompt
        self._include_usage, self._continuous_usage = include_usage, continuous_usage
        number = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._head = {"id": number, "created": int(time.time()), "model": model}

    def reply(self, samples: Sequence[SampleDelta]) -> Json:
        choices = [
            self._choice(i, piece, self.object_type)
            | self._prompt_token_ids(i)
            | self._prompt_log_probs(i, piece)
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
        has_contents = bool(piece.text or piece.reasoning or piece.calls or piece.finish_reason)
        generation = self._generation
        has_contents |= bool(generation.echoed_texts) and index not in self._echoed
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
        choice = {"index": index, **self._text(piece, kind), **log_probs_and_reason, **token_ids}
        return self._with_prompt(index, piece, choice) if self._generation.echoed_texts else choice

    def _with_prompt(self, index: int, piece: SampleDelta, choice: Json) -> Json:
        """A choice that begins with the prompt if it is the sample's first, or follows it."""
        prompt_text = self._generation.echoed_texts[index // self._num_samples]
        log_probs = choice["logprobs"]
        if log_probs is not None:
            offsets = [len(prompt_text) + offset for offset in log_probs["text_offset"]]
            log_probs = {**log_probs, "text_offset": offsets}
        is_sampled = bool(piece.tokens or piece.finish_reason)  # else the opening of a stream
        if is_sampled and index not in self._echoed:
            self._echoed.add(index)
            choice = {**choice, "text": prompt_text + choice["text"]}
            if log_probs is not None:
                prompt = self._echoed_log_probs(index, *piece.prompt_log_probs)
                log_probs = prompt_replies.joined_log_probs(prompt, log_probs)
        return {**choice, "logprobs": log_probs}

    def _echoed_log_probs(self, index: int, log_probs: PromptLogProbs) -> Json:
        tokens = self._prompts[index]
        text = IncrementalDetokenizer(self._names.decode)
        text.extend(tokens, "length")
        num_top = self._generation.sampling_params[index].num_top_log_probs
        return prompt_replies.echoed_log_probs(
            tokens, log_probs, num_top, text.offsets, self._token_text
        )

    def _prompt_log_probs(self, index: int, piece: SampleDelta) -> Json:
        """vLLM's `prompt_logprobs`, if asked for."""
        if (num_top := self._generation.num_prompt_log_probs) is None:
            return {}
        (log_probs,) = piece.prompt_log_probs
        tokens = self._prompts[index]
        return {
            "prompt_logprobs": prompt_replies.prompt_log_probs(
                tokens, log_probs, num_top, self._names.text
            )
        }

    def _token_text(self, token: int) -> str:
        return token_text(self._names, self._generation.names_token_ids, token)

    def _prompt_token_ids(self, index: int) -> Json:
        """The prompt of a sample, if asked for; the choice of a completion has it, as in vLLM."""
        if not self._generation.with_token_ids:
            return {}
        return {"prompt_token_ids": list(self._prompts[index])}

    def _usage(self, num_tokens: int) -> Json:
        """OpenAI's `usage` object; `num_tokens` are the completion tokens."""
        prompt = self._generation.num_prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": num_tokens}
        return {**counts, "total_tokens": prompt + num_tokens}

    def _text(self, piece: SampleDelta, kind: str) -> Json:
        return {"text": piece.text}

    def _log_probs(self, piece: SampleDelta) -> Json:
        text = self._token_text
        tops = [
            {text(t): json_log_prob(p) for t, p in reversed(top)} for top in piece.top_log_probs
        ]
        return {
            "tokens": [text(t) for t in piece.tokens],
            "token_logprobs": [json_log_prob(p) for p in piece.log_probs],
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
        log_probs = super()._prompt_log_probs(0, samples[0])
        return super().reply(samples) | self._shared_prompt_token_ids() | log_probs

    def _opening_chunks(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        rest = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [
            self._chunk({"index": i, **rest}) | self._shared_prompt_token_ids()
            for i in range(len(self._generation.sampling_params))
        ]

    def _prompt_token_ids(self, index: int) -> Json:
        return {}  # all choices of a chat have one prompt, which stands beside them

    def _prompt_log_probs(self, index: int, piece: SampleDelta) -> Json:
        return {}  # as above

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
        content = token_log_probs(self._names, self._generation.names_token_ids, piece)
        return {"content": content, "refusal": None}


def token_log_probs(names: TokenNames, names_token_ids: bool, piece: SampleDelta) -> list[Json]:
    """OpenAI's entries for the sampled tokens of a piece, each with its top log-probs."""

    def entry(token: int, log_prob: float) -> Json:
        text = token_text(names, names_token_ids, token)
        return {
            "token": text,
            "logprob": json_log_prob(log_prob),
            "bytes": list(names.bytes(token)),
        }

    tops = piece.top_log_probs or ((),) * len(piece.tokens)
    return [
        {**entry(t, p), "top_logprobs": [entry(*pair) for pair in top]}
        for t, p, top in zip(piece.tokens, piece.log_probs, tops, strict=True)
    ]


def token_text(names: TokenNames, names_token_ids: bool, token: int) -> str:
    """A token's name in log-probs: its text or, if the client asked for it, "token_id:17"."""
    return f"token_id:{token}" if names_token_ids else names.text(token)
