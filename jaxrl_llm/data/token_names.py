"""The bytes of single tokens, for log-probs and grammars; texts of whole replies need a decoder."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def detokenizer(
    tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = True
) -> Callable[[Sequence[int]], str]:
    """The function that decodes tokens into text, by default without special tokens."""
    skip = skip_special_tokens
    # Without clean-up of spaces, which would remove a space that was already returned.
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        # The wrapper around it is slow, and this runs once for every token served.
        return lambda tokens: str(backend.decode(list(tokens), skip_special_tokens=skip))
    return lambda tokens: str(
        tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    )


class TokenNames:
    """Names of tokens in replies with log-probs: their bytes, where the tokenizer has them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        pipeline: dict[str, Any] = json.loads(backend.to_str()) if backend else {}
        components = [pipeline.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")]
        description = json.dumps(components, ensure_ascii=False)
        # GPT-2's table: the byte of each character of a byte-level vocabulary.
        character_of_byte = bytes_to_unicode() if '"ByteLevel"' in description else {}
        self._byte_of_character = {character: byte for byte, character in character_of_byte.items()}
        self._spaces = "▁" in description
        self.decode = detokenizer(tokenizer, skip_special_tokens=False)
        self.bytes = functools.lru_cache(maxsize=2**16)(self._bytes)

    def _bytes(self, token: int) -> bytes:
        name: Any = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""  # an unused row of the embedding
        if token in self._special:
            return str(name).encode()
        if byte := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(byte[1], 16)])
        if self._byte_of_character and all(c in self._byte_of_character for c in name):
            return bytes(self._byte_of_character[c] for c in name)
        if self._spaces:
            return str(name).replace("▁", " ").encode()
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()

    def text(self, token: int) -> str:
        """A token as text; `bytes:\\xe5\\x90` if it is only a part of a character."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
