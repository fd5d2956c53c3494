"""What came of a request, in the two forms that OpenAI has for it, whole or in pieces."""

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rollout.requests import Progress, SamplingParams, TopLogProbs
from jaxrl_llm.serving.protocol import finite, usage
from jaxrl_llm.serving.transcript import Decode, TokenNames, Transcript


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one turn of the engine added to one sample, its text certain."""

    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    top_log_probs: tuple[TopLogProbs, ...]
    offsets: tuple[int, ...]  # where in the sample's text each token begins
    finish_reason: str  # "" while the sample is running

    def __add__(self, other: "Piece") -> "Piece":
        return Piece(
            self.text + other.text,
            self.tokens + other.tokens,
            self.log_probs + other.log_probs,
            self.top_log_probs + other.top_log_probs,
            self.offsets + other.offsets,
            other.finish_reason,
        )


NOTHING = Piece("", (), (), (), (), "")


class Samples:
    """The samples of one request as they grow."""

    def __init__(self, decode: Decode, params: Sequence[SamplingParams], stop: Sequence[str]):
        """
        Args:
          decode: Tokens to text.
          params: How each sample is drawn.
          stop: Stop strings of all of them.
        """
        self._transcripts = [Transcript(decode, p.stop_tokens, stop) for p in params]

    def piece(self, index: int, progress: Progress) -> Piece:
        """Returns the piece of sample `index` that the engine's progress gives."""
        transcript = self._transcripts[index]
        text = transcript.extend(progress.tokens, progress.finish_reason)
        return Piece(
            text,
            progress.tokens,
            progress.log_probs,
            progress.top_log_probs,
            tuple(transcript.offsets),
            progress.finish_reason,
        )


class _Format:
    """One kind of reply. `prefix`, `whole` and `part` are what OpenAI calls it."""

    prefix = ""
    whole = ""
    part = ""

    def __init__(self, model: str, names: TokenNames, with_log_probs: bool, num_top: int):
        self._names, self._with_log_probs, self._num_top = names, with_log_probs, num_top
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def reply(
        self, pieces: Sequence[Piece], prompt_tokens: int, completion_tokens: int
    ) -> dict[str, Any]:
        """Returns the reply with all samples."""
        choices = [self._choice(i, piece) for i, piece in enumerate(pieces)]
        counts = usage(prompt_tokens, completion_tokens)
        return {**self._head, "object": self.whole, "choices": choices, "usage": counts}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Returns the chunks before the first piece of a sample."""
        return []

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Returns the chunk of one piece."""
        return {**self._head, "object": self.part, "choices": [self._delta(index, piece)]}

    def closing(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        """Returns the chunk with the counts, after all pieces."""
        counts = usage(prompt_tokens, completion_tokens)
        return {**self._head, "object": self.part, "choices": [], "usage": counts}

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError


class CompletionFormat(_Format):
    """`/v1/completions`."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._log_probs(piece),
            "finish_reason": piece.finish_reason or None,
        }

    _delta = _choice

    def _log_probs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._with_log_probs:
            return None
        text = self._names.text
        tops = [{text(t): finite(p) for t, p in reversed(top)} for top in piece.top_log_probs]
        return {
            "tokens": [text(t) for t in piece.tokens],
            "token_logprobs": [finite(p) for p in piece.log_probs],
            "top_logprobs": tops if self._num_top else None,
            "text_offset": list(piece.offsets),
        }


class ChatFormat(_Format):
    """`/v1/chat/completions`."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._log_probs(piece),
            "finish_reason": piece.finish_reason or None,
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [{**self._head, "object": self.part, "choices": [choice]}]

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": piece.text} if piece.text or piece.tokens else {},
            "logprobs": self._log_probs(piece),
            "finish_reason": piece.finish_reason or None,
        }

    def _log_probs(self, piece: Piece) -> dict[str, Any] | None:
        if not self._with_log_probs:
            return None
        tops = piece.top_log_probs or ((),) * len(piece.tokens)
        content = [
            {**self._entry(t, p), "top_logprobs": [self._entry(*pair) for pair in top]}
            for t, p, top in zip(piece.tokens, piece.log_probs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        return {
            "token": self._names.text(token),
            "logprob": finite(log_prob),
            "bytes": list(self._names.bytes(token)),
        }
