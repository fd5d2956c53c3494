"""Stop strings: found by the host in the text of what was sampled."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

# Text that begins within a sequence may differ in its first characters from the same tokens'
# text in place: a character cut in two (at most 4 tokens), a space that is dropped.
_MARGIN_TOKENS = 4


def num_tokens_to_stop(
    tokens: Sequence[int], num_seen: int, stop_strings: Sequence[str], decode: Decode
) -> int:
    """Returns the tokens up to the first after `num_seen` that completes a stop string, or 0."""
    # A token without text aside, n bytes of text are at most n tokens.
    longest = max(len(stop.encode()) for stop in stop_strings)
    start = max(0, num_seen - longest - _MARGIN_TOKENS)

    def completes(end: int) -> bool:
        text = decode(tokens[start:end])
        return any(stop in text for stop in stop_strings)

    if not completes(len(tokens)):
        return 0
    return next(end for end in range(num_seen + 1, len(tokens) + 1) if completes(end))


def text_before(text: str, stop_strings: Sequence[str]) -> str:
    """Returns `text` up to the first stop string in it, all of it if there is none.

    >>> text_before("yes. Q: what", ("Q:", "."))
    'yes'
    """
    found = [at for stop in stop_strings if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else text
