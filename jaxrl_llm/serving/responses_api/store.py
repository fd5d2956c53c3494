"""Stored responses, for `previous_response_id` and retrieval: in memory, bounded, newest first."""

import collections
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import fastapi

from jaxrl_llm.serving.protocol import ApiError
from jaxrl_llm.serving.replies import Json
from jaxrl_llm.serving.responses_api.fields import PATH

_ENTRY_BYTES = 2**10  # of Python's objects around an entry


@dataclasses.dataclass(frozen=True)
class StoredResponse:
    """A response and the items of its turn, as JSON; `previous` has the turns before it."""

    number: str  # "resp_..."
    response: bytes
    input_items: bytes  # a list
    output_ids: tuple[str, ...]
    previous: "StoredResponse | None"

    @functools.cached_property
    def num_bytes(self) -> int:
        """Memory of this turn and those before it."""
        own_bytes = len(self.response) + len(self.input_items) + _ENTRY_BYTES
        return own_bytes + (self.previous.num_bytes if self.previous else 0)

    def turns(self) -> list["StoredResponse"]:
        """All turns of the dialogue, oldest first."""
        turns: list[StoredResponse] = []
        turn: StoredResponse | None = self
        while turn:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]

    def items(self) -> list[Json]:
        """Input and output items of the dialogue, oldest first."""
        return [
            item
            for turn in self.turns()
            for item in (*json.loads(turn.input_items), *json.loads(turn.response)["output"])
        ]


class ResponseStore:
    """Keeps the responses used last, up to `max_bytes`; used by one thread, the event loop's.

    A response keeps the turns before it. It is charged for them too, so the memory in use is at
    most `max_bytes`, also if an earlier turn has been dropped or deleted.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._entries: collections.OrderedDict[str, StoredResponse] = collections.OrderedDict()
        self._owners: dict[str, str] = {}  # id of an output item -> id of its response

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, number: str) -> bool:
        return number in self._entries

    def fits(self, entry: StoredResponse) -> bool:
        """Whether the store can hold the response, with the turns before it."""
        return entry.num_bytes <= self._max_bytes

    def add(self, entry: StoredResponse) -> None:
        """Stores a response that fits; the ones not used for longest are dropped."""
        self._entries[entry.number] = entry
        self._owners |= dict.fromkeys(entry.output_ids, entry.number)
        self.num_bytes += entry.num_bytes
        while self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def get(self, number: str) -> StoredResponse | None:
        """The response, which thereby becomes the one used last; None if it is not stored."""
        if number not in self._entries:
            return None
        self._entries.move_to_end(number)
        return self._entries[number]

    def output_item(self, item_id: str) -> Json | None:
        """The output item of a stored response; None if none has it."""
        entry = self.get(self._owners.get(item_id, ""))
        output = json.loads(entry.response)["output"] if entry else []
        return next((item for item in output if item["id"] == item_id), None)

    def remove(self, number: str) -> None:
        entry = self._entries.pop(number)
        self.num_bytes -= entry.num_bytes
        for item_id in entry.output_ids:
            del self._owners[item_id]


def storage_routes(store: ResponseStore) -> fastapi.APIRouter:
    """The routes that read and delete stored responses."""
    router = fastapi.APIRouter()

    def stored_response(number: str) -> StoredResponse:
        if (entry := store.get(number)) is None:
            message = f"response {number[:100]!r} is not stored here"
            raise ApiError(404, f"{message}; it was deleted, dropped for newer ones, or never kept")
        return entry

    @router.get(PATH + "/{number}")
    async def retrieve(number: str, stream: bool = False) -> Any:
        if stream:
            message = "stream: only a response in the background streams again"
            raise ApiError(400, f"{message}; leave it out", param="stream")
        return fastapi.Response(stored_response(number).response, media_type="application/json")

    @router.delete(PATH + "/{number}")
    async def delete(number: str) -> Json:
        store.remove(stored_response(number).number)
        return {"id": number, "object": "response", "deleted": True}

    @router.get(PATH + "/{number}/input_items")
    async def input_items(
        number: str, order: str = "desc", after: str = "", limit: int = 20
    ) -> Json:
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order={order[:20]!r} is not 'asc' or 'desc'", param="order")
        if not 1 <= limit <= 100:
            raise ApiError(400, f"limit={limit} is not within 1 to 100", param="limit")
        entry = stored_response(number)
        turns = entry.previous.items() if entry.previous else []
        return _page([*turns, *json.loads(entry.input_items)], order, after, limit)

    @router.post(PATH + "/{number}/cancel")
    async def cancel(number: str) -> Json:
        stored_response(number)
        raise ApiError(400, "only a response in the background can be cancelled; this one is done")

    return router


def _page(items: Sequence[Json], order: str, after: str, limit: int) -> Json:
    """OpenAI's page of a list: up to `limit` items behind the one with the id `after`."""
    ordered = list(items if order == "asc" else reversed(items))
    ids = [item["id"] for item in ordered]
    if after and after not in ids:
        raise ApiError(400, f"after={after[:100]!r} is no item of this response", param="after")
    start = ids.index(after) + 1 if after else 0
    page = ordered[start : start + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    has_more = start + limit < len(ordered)
    return {"object": "list", "data": page, "has_more": has_more, "first_id": None,
            "last_id": None, **ends}  # fmt: skip
