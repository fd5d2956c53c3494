"""Tools of a server that speaks the Model Context Protocol (package `mcp`)."""

import contextlib
import shlex
from collections.abc import Callable
from typing import Any

import mcp
from mcp.client.stdio import StdioServerParameters

_TIMEOUT_S = 60.0


class Server:
    """The tools of one server; it is connected to anew for each episode."""

    def __init__(self, address: str):
        """`address` is that of a server (http://...), or the command that starts one."""
        target: Any = address
        if not address.startswith(("http://", "https://")):
            command, *arguments = shlex.split(address)
            target = StdioServerParameters(command=command, args=arguments)
        self._client = mcp.Client(target, read_timeout_seconds=_TIMEOUT_S)
        self._stack = contextlib.AsyncExitStack()
        self.tools: dict[str, Callable[..., Any]] = {}

    async def connect(self) -> None:
        """Connects and asks for the server's tools."""
        await self._stack.enter_async_context(self._client)
        self.tools = await tools_of(self._client)

    async def close(self) -> None:
        await self._stack.aclose()


async def tools_of(client: mcp.Client, prefix: str = "") -> dict[str, Callable[..., Any]]:
    """Returns the tools of a server by their names, which begin with `prefix` in the end."""
    found: dict[str, Callable[..., Any]] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        found |= {prefix + tool.name: _tool(client, tool, prefix) for tool in page.tools}
        cursor = page.next_cursor
        if not cursor:
            return found


def _tool(client: mcp.Client, described: Any, prefix: str) -> Callable[..., Any]:
    async def call(**arguments: Any) -> str:
        result = await client.call_tool(described.name, arguments)
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise RuntimeError(text)
        return text

    call.json_schema = {  # type: ignore[attr-defined]
        "type": "function",
        "function": {
            "name": prefix + described.name,
            "description": described.description or "",
            "parameters": described.input_schema,
        },
    }
    return call


def make(address: str) -> Server:
    """Returns the tools of a server; nothing is connected yet."""
    return Server(address)
