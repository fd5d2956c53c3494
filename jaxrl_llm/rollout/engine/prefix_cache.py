"""Prefix cache: pages of the KV cache found again by the tokens that they hold.

A full page is known by a hash of its tokens and of the page before it, so that one hash stands for
all tokens up to the end of its page (automatic prefix caching of vLLM). Pages that no sample holds
stay until others need them, the least recently used first. The last page of a sample that ended is
not full; one other sample may continue it.
"""

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.models.image_inputs import ImageInputs

_HASH_BYTES = 16


def page_hashes(
    tokens: Sequence[int],
    page_tokens: int,
    parent: bytes,
    images: ImageInputs | None = None,
    start: int = 0,
) -> list[bytes]:
    """Hashes of the full pages of `tokens`, each over its tokens and the hash before it.

    Args:
      parent: Hash of the page before the first; or the name of what else keys and values depend
        on, such as an adapter.
      images: Image inputs of the whole sequence or a prefix, one row, on the host. Features and
        positions of image tokens are part of the hash of their page, and so of all pages after it.
      start: Position of the first token, a multiple of `page_tokens`.
    """
    ids = np.asarray(tokens, np.int32)
    hashes: list[bytes] = []
    for begin in range(0, len(ids) - page_tokens + 1, page_tokens):
        digest = hashlib.blake2b(parent, digest_size=_HASH_BYTES)
        digest.update(ids[begin : begin + page_tokens].tobytes())
        if images is not None:
            page = slice(start + begin, start + begin + page_tokens)
            vectors = np.asarray(images.feature_index)[0, page]
            columns = np.flatnonzero(vectors >= 0)
            # Positions of text follow from those of the images before it.
            for part in (columns, np.asarray(images.positions)[0, page][columns]):
                digest.update(part.astype(np.int32).tobytes())
            digest.update(np.asarray(images.features)[vectors[columns]].tobytes())
        parent = digest.digest()
        hashes.append(parent)
    return hashes


class PrefixCache:
    """The pages that can be found by their hash, and those of them that no sample holds."""

    def __init__(self, num_shards: int):
        # Each by shard: a page belongs to one.
        self._pages: list[dict[bytes, int]] = [{} for _ in range(num_shards)]
        # Last pages that are not full, by the hash of the page before and their tokens.
        self._tails: list[dict[bytes, dict[tuple[int, ...], int]]] = [{} for _ in range(num_shards)]
        self._unused: list[collections.OrderedDict[int, None]] = [
            collections.OrderedDict() for _ in range(num_shards)
        ]
        self._hashes: dict[int, tuple[int, bytes]] = {}  # page -> (shard, its hash)
        self._tail_keys: dict[int, tuple[int, bytes, tuple[int, ...]]] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._hashes or page in self._tail_keys

    def num_unused(self, shard: int) -> int:
        """Number of cached pages of a shard that no sample holds."""
        return len(self._unused[shard])

    def prefix(self, shard: int, hashes: Sequence[bytes]) -> list[int]:
        """The cached pages of the longest prefix of a sequence, from the hashes of its pages."""
        cached, pages = self._pages[shard], []
        for each in hashes:
            if (page := cached.get(each)) is None:
                break
            pages.append(page)
        return pages

    def tail(self, shard: int, parent: bytes, tokens: Sequence[int]) -> tuple[int | None, int]:
        """(page, its number of tokens) of the longest unfilled page that `tokens` begin with.

        (None, 0) if there is none. `parent` is the hash of the page before.
        """
        tails, rest = self._tails[shard].get(parent, {}), tuple(tokens)
        lengths = sorted({len(tail) for tail in tails if len(tail) <= len(rest)}, reverse=True)
        for length in lengths:
            if (page := tails.get(rest[:length])) is not None:
                return page, length
        return None, 0

    def add(self, shard: int, page: int, page_hash: bytes) -> bool:
        """Registers a full page; false if another page of the shard has this hash."""
        if page_hash in self._pages[shard]:
            return False
        self._pages[shard][page_hash] = page
        self._hashes[page] = shard, page_hash
        return True

    def add_tail(self, shard: int, page: int, parent: bytes, tokens: tuple[int, ...]) -> None:
        """Registers a page that begins with `tokens`, its others unused, unless there is one."""
        tails = self._tails[shard].setdefault(parent, {})
        if tokens not in tails:
            tails[tokens] = page
            self._tail_keys[page] = shard, parent, tokens

    def remove(self, page: int) -> None:
        """Forgets a page; no effect on others."""
        if page in self._hashes:
            shard, page_hash = self._hashes.pop(page)
            del self._pages[shard][page_hash]
            self._unused[shard].pop(page, None)
        if page in self._tail_keys:
            shard, parent, tokens = self._tail_keys.pop(page)
            tails = self._tails[shard][parent]
            del tails[tokens]
            if not tails:
                del self._tails[shard][parent]
            self._unused[shard].pop(page, None)

    def mark_unused(self, shard: int, page: int) -> None:
        """Makes a cached page the most recently used of those that no sample holds."""
        self._unused[shard][page] = None

    def mark_used(self, shard: int, page: int) -> None:
        """Excludes a page from eviction: a sample holds it."""
        self._unused[shard].pop(page, None)

    def evict(self, shard: int) -> int:
        """Forgets and returns the page that has been unused for the longest time."""
        page = next(iter(self._unused[shard]))
        self.remove(page)
        return page

    def clear(self) -> list[int]:
        """Forgets all pages; returns those that no sample holds."""
        unused = [page for pages in self._unused for page in pages]
        for tables in (self._pages, self._tails, self._unused):
            for table in tables:
                table.clear()
        self._hashes.clear()
        self._tail_keys.clear()
        return unused
