"""How many sequences are decoded at the same time, and the pages of the KV cache for them.

Engine and planner both follow it.
"""

from collections.abc import Callable
from typing import NamedTuple

# Of a page of the KV cache. Larger ones are read faster, smaller ones waste less behind the end of
# a sequence; a TPU reads 128 numbers at one time.
_PAGE_TOKENS = {"cpu": 32, "tpu": 128}


class Lengths(NamedTuple):
    """Tokens of the longest sequences that are decoded at the same time."""

    response: int
    prompt: int = 0
    samples: int = 1  # of a prompt; they share its full pages

    @property
    def sequence(self) -> int:
        return self.prompt + self.response

    def held(self, page: int, num_slots: int, num_shards: int) -> tuple[int, int]:
        """Returns the tokens in pages that are shared, and in those of one sequence each.

        Prompts are there once, or on each shard of the slots.
        """
        prompts = max(-(-num_slots // self.samples), min(num_shards, num_slots))
        shared, rest = divmod(self.prompt, page)
        return prompts * shared * page, num_slots * page * -(-(rest + self.response) // page)


def chosen_room(
    num_sequences: int,
    lengths: Lengths,
    platform: str,
    num_devices: int,
    num_shards: int,
    free_bytes: float,
    cache_bytes: Callable[[int, int], float],
    logits_bytes: Callable[[int], float],
    num_slots: int = 0,
) -> tuple[int, int]:
    """Returns how many sequences are decoded at the same time, and how many tokens they may have.

    `num_slots`, or the sequences of a step, at most 64 on a CPU and 256 elsewhere (more do not
    decode faster). That number is halved until they need a quarter of the memory that is free on a
    device when the engine is made, if each has half of the longest response: so many it has on
    average, from its first token to its last, if all are longest. Tokens for all of them to be
    longest at one time, or as many as that memory holds. The devices of a CPU count as 4 GiB
    together.

    Args:
      num_shards: Devices that slots are split over, if they can be.
      cache_bytes: Of (tokens of all sequences, sequences) on a device.
      logits_bytes: Of so many sequences.
    """
    if platform == "cpu":
        free_bytes = (4 << 30) / num_devices
    room, page = 0.25 * free_bytes, page_tokens(platform)
    if num_slots:
        return num_slots, sum(lengths.held(page, num_slots, num_shards))
    slots = min(num_sequences, 64 if platform == "cpu" else 256)

    def needed(slots: int) -> float:
        shared, own = lengths.held(page, slots, num_shards)
        return cache_bytes(shared + own // 2, slots) + logits_bytes(slots)

    while slots > 1 and needed(slots) > room:
        slots = -(-slots // 2)
    most = sum(lengths.held(page, slots, num_shards))
    of_token = cache_bytes(most, slots) / most
    held = min(most, max(room - logits_bytes(slots), 0.0) / of_token)
    return slots, max(int(held), lengths.sequence)


def page_tokens(platform: str) -> int:
    """Returns the tokens of a page of the cache."""
    return _PAGE_TOKENS.get(platform, 64)


def cache_pages(
    num_tokens: int, platform: str, max_tokens: int, num_slots: int, num_shards: int
) -> tuple[int, int]:
    """Returns the number of a cache's pages, and the tokens of each.

    The cache holds about `num_tokens`; 0: so many that every slot may hold a sequence of
    `max_tokens`, and never more. Each shard of the slots holds one of them at least, which could
    not end otherwise.
    """
    page = page_tokens(platform)
    per_slot = -(-max_tokens // page)
    most = per_slot * num_slots // num_shards
    wanted = -(-num_tokens // (page * num_shards)) or most
    return num_shards * max(per_slot, min(wanted, most)), page
