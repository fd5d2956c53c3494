"""What a client gets: text, never half a character or part of a stop string; OpenAI's replies."""

import functools
import json
import math
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxrl_llm.rollout.requests import Decode, TopLogProbs, text_before
from jaxrl_llm.serving.protocol import Wanted
from jaxrl_llm.serving.tool_call_stream import StreamedCall

Json = dict[str, Any]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_MISSING_CHARACTERS = 3  # shown broken until the fourth byte of a character comes
_MAX_WINDOW = 32  # tokens that are decoded together, of text that never becomes whole
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True) -> Decode:
    """Returns what turns tokens into text, without special tokens unless they are wanted."""
    skip = skip_special_tokens
    # Spaces are not tidied: that would take a space back that an earlier token gave.
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # The wrapper around it is slow, and this runs once for every token served.
        return lambda tokens: str(backend.decode(list(tokens), skip_special_tokens=skip))
    return lambda tokens: str(
        tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


class Transcript:
    """The text of one sample as it grows: up to the first stop string, or its last stop token.

    What `extend` returns adds up to the same text, whatever pieces the tokens come in.
    """

    def __init__(self, decode: Decode, stop_tokens: Sequence[int] = (), stops: Sequence[str] = ()):
        self._decode, self._stop_tokens, self._stop_strings = decode, stop_tokens, stops
        # The last tokens; the first of them were returned and are the context of the others.
        self._window: list[int] = []
        self._num_context = 0
        self._text = ""  # of the window
        self._num_told = 0  # characters of it that were returned
        self._held = ""  # text that may turn out to begin a stop string
        self._num_characters = 0
        self.offsets: list[int] = []  # where the text of each token of the last `extend` begins

    def extend(self, tokens: Sequence[int], finish_reason: str) -> str:
        """Returns the text that is certain now; `finish_reason` is "" while more may come."""
        text, self.offsets = self._held, []
        for i, token in enumerate(tokens):
            self.offsets.append(self._num_characters)
            is_last = finish_reason == "stop" and i == len(tokens) - 1
            if not (is_last and token in self._stop_tokens):
                text += self._push(token)
        if finish_reason:
            return text_before(text + self._tell(len(self._text)), self._stop_strings)
        # A sample ends with the token that completes a stop string, so there is none in `text`.
        beginnings = (stop[:size] for stop in self._stop_strings for size in range(1, len(stop)))
        held = max((len(part) for part in beginnings if text.endswith(part)), default=0)
        end = len(text) - held
        self._held = text[end:]
        return text[:end]

    def _push(self, token: int) -> str:
        text = self._decode([*self._window, token])
        is_whole = not text.endswith(_BROKEN)
        if is_whole and text == self._text:
            # A special token. It must not become the context either: the first word of a text
            # may be written without its space.
            return ""
        self._window.append(token)
        self._text = text
        # The last character may lack bytes. Until they come, some decoders show all bytes before
        # it as broken too.
        sure = len(text) if is_whole else len(text.rstrip(_BROKEN))
        added = self._tell(max(sure, len(text) - _MAX_MISSING_CHARACTERS - self._num_context))
        if is_whole:
            self._keep(len(self._window) - self._num_context)
            self._num_context = len(self._window)
        elif len(self._window) > _MAX_WINDOW:
            self._keep(_MAX_WINDOW * 3 // 4)
            self._num_context = 0
        return added

    def _tell(self, end: int) -> str:
        added = self._text[self._num_told : end]
        self._num_told = max(self._num_told, end)
        self._num_characters += len(added)
        return added

    def _keep(self, count: int) -> None:
        """Forgets all of the window but the last `count` tokens."""
        num_untold = len(self._text) - self._num_told
        self._window = self._window[-count:]
        self._text = self._decode(self._window)
        self._num_told = max(0, len(self._text) - num_untold)


class TokenNames:
    """What a token is called in a reply with log-probs: its bytes, where the tokenizer has them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        pipeline: dict[str, Any] = json.loads(backend.to_str()) if backend else {}
        parts = [pipeline.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
        steps = json.dumps(parts, ensure_ascii=False)
        # GPT-2's table: the byte of each character of a byte-level vocabulary.
        shown = bytes_to_unicode() if '"ByteLevel"' in steps else {}
        self._byte_of = {character: byte for byte, character in shown.items()}
        self._spaces = "▁" in steps
        self.bytes = functools.lru_cache(maxsize=2**16)(self._bytes)

    def _bytes(self, token: int) -> bytes:
        name: Any = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""  # a row of the embedding that no token uses
        if token in self._special:
            return str(name).encode()
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if self._byte_of and all(c in self._byte_of for c in name):
            return bytes(self._byte_of[c] for c in name)
        if self._spaces:
            return str(name).replace("▁", " ").encode()
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()

    def text(self, token: int) -> str:
        """Returns a token as text: `bytes:\\xe5\\x90` where it is part of a character only."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Piece(NamedTuple):
    """What one step of the engine added to one sample, its text certain."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    offsets: tuple[int, ...] = ()  # where in the sample's text each token begins
    finish_reason: str = ""  # "" while the sample is running
    calls: tuple[StreamedCall, ...] = ()  # of tools


class CompletionFormat:
    """The reply to one request at `/v1/completions`: whole, or a chunk for each piece.

    Before the pieces `openings` are sent; after them, if it is wanted, `closing` with the counts.
    """

    prefix, whole, part = "cmpl", "text_completion", "text_completion"  # OpenAI's names

    def __init__(self, model: str, names: TokenNames, wanted: Wanted):
        self._names, self._wanted = names, wanted
        number = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": number, "created": int(time.time()), "model": model}

    def reply(self, samples: Sequence[Piece]) -> Json:
        choices = [self._choice(i, piece, self.whole) for i, piece in enumerate(samples)]
        usage = self.usage(sum(len(piece.tokens) for piece in samples))
        return {**self._head, "object": self.whole, "choices": choices, "usage": usage}

    def openings(self) -> list[Json]:
        return []

    def chunk(self, index: int, piece: Piece) -> Json:
        return self._chunk(self._choice(index, piece, self.part))

    def closing(self, num_tokens: int) -> Json:
        return {**self._chunk(), "usage": self.usage(num_tokens)}

    def _chunk(self, *choices: Json) -> Json:
        return {**self._head, "object": self.part, "choices": list(choices)}

    def _choice(self, index: int, piece: Piece, kind: str) -> Json:
        log_probs = self._log_probs(piece) if self._wanted.with_log_probs else None
        end = {"logprobs": log_probs, "finish_reason": piece.finish_reason or None}
        return {"index": index, **self._text(piece, kind), **end}

    def usage(self, num_tokens: int) -> Json:
        """The counts of tokens, `num_tokens` of them sampled, in OpenAI's form."""
        prompt = self._wanted.num_prompt_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": num_tokens}
        return {**counts, "total_tokens": prompt + num_tokens}

    def _text(self, piece: Piece, kind: str) -> Json:
        return {"text": piece.text}

    def _log_probs(self, piece: Piece) -> Json:
        text = self._names.text
        tops = [{text(t): _finite(p) for t, p in reversed(top)} for top in piece.top_log_probs]
        return {
            "tokens": [text(t) for t in piece.tokens],
            "token_logprobs": [_finite(p) for p in piece.log_probs],
            "top_logprobs": tops if self._wanted.params[0].num_top_log_probs else None,
            "text_offset": list(piece.offsets),
        }


class ChatFormat(CompletionFormat):
    """The same at `/v1/chat/completions`."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def openings(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        rest = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk({"index": i, **rest}) for i in range(len(self._wanted.params))]

    def _text(self, piece: Piece, kind: str) -> Json:
        if kind == self.part:
            delta: Json = {"content": piece.text} if piece.text or piece.tokens else {}
            if piece.calls:
                delta["tool_calls"] = [{"index": c.number, **c.as_json()} for c in piece.calls]
            return {"delta": delta}
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [call.as_json() for call in piece.calls]
        return {"message": message}

    def _log_probs(self, piece: Piece) -> Json:
        def entry(token: int, log_prob: float) -> Json:
            raw = list(self._names.bytes(token))
            return {"token": self._names.text(token), "logprob": _finite(log_prob), "bytes": raw}

        tops = piece.top_log_probs or ((),) * len(piece.tokens)
        content = [
            {**entry(t, p), "top_logprobs": [entry(*pair) for pair in top]}
            for t, p, top in zip(piece.tokens, piece.log_probs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}


def _finite(log_prob: float) -> float:
    """Returns a log-prob as JSON can hold it: minus infinity is -9999, as OpenAI has it."""
    return log_prob if math.isfinite(log_prob) else -9999.0
