"""What a client gets, in the two forms that OpenAI has for it, whole or in pieces."""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rollout.requests import TopLogProbs
from jaxrl_llm.serving.transcript import TokenNames
from jaxrl_llm.serving.wanted import Wanted

Json = dict[str, Any]


class Piece(NamedTuple):
    """What one step of the engine added to one sample, its text certain."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    offsets: tuple[int, ...] = ()  # where in the sample's text each token begins
    finish_reason: str = ""  # "" while the sample is running


class CompletionFormat:
    """The reply to one request at `/v1/completions`; the first line has OpenAI's names for it."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, names: TokenNames, wanted: Wanted):
        self._names, self._wanted = names, wanted
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def reply(self, samples: Sequence[Piece]) -> Json:
        """Returns the reply with all samples."""
        choices = [
            self._choice(i, piece, self._whole_text(piece)) for i, piece in enumerate(samples)
        ]
        usage = self._usage(sum(len(piece.tokens) for piece in samples))
        return {**self._head, "object": self.whole, "choices": choices, "usage": usage}

    def openings(self) -> list[Json]:
        """Returns the chunks before the first piece."""
        return []

    def chunk(self, index: int, piece: Piece) -> Json:
        """Returns the chunk of one piece."""
        return self._chunk(self._choice(index, piece, self._part_text(piece)))

    def closing(self, num_tokens: int) -> Json:
        """Returns the chunk with the counts, after all pieces."""
        return {**self._chunk(), "usage": self._usage(num_tokens)}

    def _chunk(self, *choices: Json) -> Json:
        return {**self._head, "object": self.part, "choices": list(choices)}

    def _choice(self, index: int, piece: Piece, text: Json) -> Json:
        log_probs = self._log_probs(piece) if self._wanted.with_log_probs else None
        end = {"logprobs": log_probs, "finish_reason": piece.finish_reason or None}
        return {"index": index, **text, **end}

    def _usage(self, num_tokens: int) -> Json:
        num_prompt_tokens = self._wanted.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }

    def _whole_text(self, piece: Piece) -> Json:
        return {"text": piece.text}

    _part_text = _whole_text

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

    def _whole_text(self, piece: Piece) -> Json:
        return {"message": {"role": "assistant", "content": piece.text, "refusal": None}}

    def _part_text(self, piece: Piece) -> Json:
        return {"delta": {"content": piece.text} if piece.text or piece.tokens else {}}

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
