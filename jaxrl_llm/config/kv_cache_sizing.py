"""KV-cache sizing: the number of decode slots, and the pages of the cache for them.

The engine and the planner share these rules.
"""

from collections.abc import Callable
from typing import NamedTuple

# Page sizes of the KV cache. Large pages are read faster, small pages waste less at the end of a
# sequence; a TPU reads 128 numbers at a time.
_PAGE_TOKENS = {"cpu": 32, "tpu": 128}


class SequenceLengths(NamedTuple):
    """Maximum lengths, in tokens, of the sequences that are decoded together."""

    response: int
    prompt: int = 0
    samples: int = 1  # per prompt; they share its full pages

    @property
    def sequence(self) -> int:
        return self.prompt + self.response

    def cache_tokens(self, page: int, num_slots: int, num_shards: int) -> tuple[int, int]:
        """Tokens of cache for full slots: in shared pages, and in pages owned by one sequence.

        A prompt is stored once, or once on each shard of the slots.
        """
        prompts = max(-(-num_slots // self.samples), min(num_shards, num_slots))
        shared, rest = divmod(self.prompt, page)
        return prompts * shared * page, num_slots * page * -(-(rest + self.response) // page)


def choose_slots(
    num_sequences: int,
    lengths: SequenceLengths,
    platform: str,
    num_devices: int,
    num_shards: int,
    free_bytes: float,
    cache_bytes: Callable[[int, int], float],
    logits_bytes: Callable[[int], float],
    num_slots: int = 0,
) -> tuple[int, int]:
    """Chooses the number of decode slots and the capacity of the KV cache in tokens.

    Slots: `num_slots` if set, else the sequences of a step, at most 64 on a CPU and 256 elsewhere
    (more do not decode faster). The number is halved until the cache and logits take at most a
    quarter of the memory that is free when the engine is built, with half of the longest response
    in each slot: the average over decoding if all responses are longest. Capacity: enough for all
    slots to hold the longest sequence at once, or what that memory holds. The devices of a CPU
    count as 4 GiB together.

    Args:
      num_shards: Number of devices that slots are split over, where they can be split.
      cache_bytes: Bytes a device of (tokens of all sequences, number of sequences); 0 tokens: what
        does not grow with them.
      logits_bytes: Bytes a device of the logits of this number of sequences.
    """
    if platform == "cpu":
        free_bytes = (4 << 30) / num_devices
    budget, page = 0.25 * free_bytes, page_tokens(platform)
    if num_slots:
        return num_slots, sum(lengths.cache_tokens(page, num_slots, num_shards))
    slots = min(num_sequences, 64 if platform == "cpu" else 256)

    def memory_needed(slots: int) -> float:
        shared, own = lengths.cache_tokens(page, slots, num_shards)
        return cache_bytes(shared + own // 2, slots) + logits_bytes(slots)

    while slots > 1 and memory_needed(slots) > budget:
        slots = -(-slots // 2)
    full_tokens = sum(lengths.cache_tokens(page, slots, num_shards))
    fixed = cache_bytes(0, slots)  # rings and states, whatever the number of tokens
    bytes_per_token = (cache_bytes(full_tokens, slots) - fixed) / full_tokens
    affordable = max(budget - logits_bytes(slots) - fixed, 0.0)
    if affordable >= full_tokens * bytes_per_token:
        return slots, max(full_tokens, lengths.sequence)
    capacity = affordable / bytes_per_token
    return slots, max(int(capacity), lengths.sequence)


def page_tokens(platform: str) -> int:
    """Page size of the KV cache in tokens."""
    return _PAGE_TOKENS.get(platform, 64)


def ring_pages(window_tokens: int, page: int, max_tokens: int) -> int:
    """Pages of a ring that holds the latest `window_tokens` tokens of a sequence.

    One more than these tokens fill, as they may begin and end within a page. 0, which is no ring,
    without a window, and where a ring is longer than half of a sequence of `max_tokens`: it would
    save less than samples save that share the pages of a prompt.

    >>> ring_pages(1024, 128, 32768)
    9
    """
    pages = -(-window_tokens // page) + 1
    return pages if window_tokens and 2 * pages * page <= max_tokens else 0


def cache_pages(
    num_tokens: int, platform: str, max_tokens: int, num_slots: int, num_shards: int
) -> tuple[int, int]:
    """Number of pages of a KV cache, and the page size in tokens.

    The cache holds about `num_tokens`; 0: enough for a sequence of `max_tokens` in every slot. More
    is never allocated. Each shard of the slots can hold at least one such sequence; otherwise it
    could never finish.
    """
    page = page_tokens(platform)
    per_slot = -(-max_tokens // page)
    max_pages = per_slot * num_slots // num_shards
    requested = -(-num_tokens // (page * num_shards)) or max_pages
    return num_shards * max(per_slot, min(requested, max_pages)), page
