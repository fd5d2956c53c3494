"""Tokens to text as they come: never half a character, never part of a stop string."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxrl_llm.rollout.stopping import Decode, text_before

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_MAX_MISSING_CHARACTERS = 3  # shown broken until the fourth byte of a character comes
_MAX_WINDOW = 32  # tokens that are decoded together, of text that never becomes whole
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Returns what turns tokens into text, without special tokens."""
    # Spaces are not tidied: that would take a space back that an earlier token gave.
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # The wrapper around it is slow, and this runs once for every token served.
        return lambda tokens: str(backend.decode(list(tokens), skip_special_tokens=True))
    return lambda tokens: str(
        tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


class Transcript:
    """The text of one sample as it grows: up to the first stop string, or its last stop token.

    What `extend` returns adds up to the same text, whatever pieces the tokens come in.
    """

    def __init__(
        self, decode: Decode, stop_tokens: Sequence[int] = (), stop_strings: Sequence[str] = ()
    ):
        self._decode, self._stop_tokens, self._stop_strings = decode, stop_tokens, stop_strings
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
        text = self._held
        self.offsets = []
        for i, token in enumerate(tokens):
            self.offsets.append(self._num_characters)
            is_last = finish_reason == "stop" and i == len(tokens) - 1
            if not (is_last and token in self._stop_tokens):
                text += self._push(token)
        if finish_reason:
            return text_before(text + self._tell(len(self._text)), self._stop_strings)
        # A sample ends with the token that completes a stop string, so there is none in `text`.
        end = len(text) - _length_of_a_beginning(text, self._stop_strings)
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


def _length_of_a_beginning(text: str, stop_strings: Sequence[str]) -> int:
    """Returns how long an end of `text` is the beginning of a stop string.

    >>> _length_of_a_beginning("to be, o", ("or not", "be,"))
    1
    """
    longest = max((len(stop) - 1 for stop in stop_strings), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if text.endswith(tuple(stop[:size] for stop in stop_strings if len(stop) >= size)):
            return size
    return 0


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
        """Returns the bytes that a token stands for."""
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
