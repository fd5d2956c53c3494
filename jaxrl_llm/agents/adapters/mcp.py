"""Tools of a server that speaks the Model Context Protocol (package `mcp`)."""

import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable
from typing import Any

import mcp
from mcp.client.stdio import StdioServerParameters

from jaxrl_llm.agents import contents
from jaxrl_llm.text import json_value

_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 90.0  # the pool waits 120 s for all tools to be described


class Server:
    """The tools of one server; it is connected to anew for each episode."""

    def __init__(self, address: str):
        """`address` is that of a server (http://...), or the command that starts one.

        ValueError if it is neither.
        """
        self._address = address
        target: Any = address
        if not address.startswith(("http://", "https://")):
            try:
                if not (words := shlex.split(address)):
                    raise ValueError("it has no word")
            except ValueError as error:
                raise ValueError(
                    f"the MCP server {address!r} is no address and no command: {error}; give"
                    " http://... or a command whose quotation marks are closed"
                ) from error
            target = StdioServerParameters(command=words[0], args=words[1:])
        self._client = mcp.Client(target, read_timeout_seconds=_TIMEOUT_S)
        self._stack = contextlib.AsyncExitStack()
        self.tools: dict[str, Callable[..., Any]] = {}

    async def connect(self) -> None:
        """Connects and asks for the server's tools.

        Raises:
          ConnectionError: Names the server and the cause.
        """
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._stack.enter_async_context(self._client)
                self.tools = await tools_of(self._client)
        except Exception as error:
            cause = _cause(error)
            is_timeout = isinstance(cause, TimeoutError) and not str(cause)
            about = f"nothing within {_CONNECT_TIMEOUT_S:g} s" if is_timeout else cause
            raise ConnectionError(
                f"the MCP server {self._address!r} does not answer: {type(cause).__name__}:"
                f" {about}; start it, or correct the address or command"
            ) from error

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


def result_value(result: Any) -> str | list[dict[str, Any]]:
    """A tool's result (`CallToolResult`) as a text, or as parts if it has images.

    Texts and texts of embedded resources are whole. Links and files that are no texts are named
    with their address, type and size, and so are images where the model reads text alone.
    Structured content follows as JSON unless the texts hold it already.
    """
    parts = [_part(block) for block in result.content]
    structured = result.structured_content
    if structured is not None and not _is_told(structured, result.content):
        parts.append(_text_part(json.dumps(structured, ensure_ascii=False)))
    if any(part["type"] == "image" for part in parts):
        return parts
    return contents.without_images(parts) or ""


def _is_told(structured: dict[str, Any], blocks: list[Any]) -> bool:
    """Whether the blocks hold structured content, which servers give once more as text.

    What is no object stands under the key `result`, and a list may have one block per item.
    """
    values = [structured]
    if structured.keys() == {"result"}:
        values.append(structured["result"])
    readings = [_readings(block) for block in blocks]
    if any(value in reading for value in values for reading in readings):
        return True
    items = values[-1]
    return (
        isinstance(items, list)
        and bool(items)
        and len(items) == len(readings)
        and all(item in reading for item, reading in zip(items, readings, strict=True))
    )


def _readings(block: Any) -> list[Any]:
    """What a block of a result may stand for: itself, its text, or the value of its JSON."""
    readings = [block.model_dump(mode="json", by_alias=True, exclude_none=True)]
    if block.type == "text":
        readings.append(block.text)
        with contextlib.suppress(ValueError):
            readings.append(json_value(block.text))
    return readings


def _part(block: Any) -> dict[str, Any]:
    match block.type:
        case "text":
            return _text_part(block.text)
        case "image":
            return _image_part(block.data, block.mime_type)
        case "audio":
            return _text_part(f"(audio, {_file_size(block.data, block.mime_type)})")
        case "resource_link":
            size = f"{block.size} bytes" if block.size is not None else ""
            about = ", ".join(filter(None, (block.description, block.mime_type, size)))
            name = f"link: {block.title or block.name}, {block.uri}"
            return _text_part(f"({name}; {about})" if about else f"({name})")
        case "resource":
            resource = block.resource
            if (text := getattr(resource, "text", None)) is not None:
                return _text_part(text)
            kind = resource.mime_type or "of unknown type"
            if kind.startswith("image/"):
                return _image_part(resource.blob, kind)
            return _text_part(f"(file {resource.uri}, {_file_size(resource.blob, kind)})")
    return _text_part(f"(content of type {block.type!r}, which cannot be read)")


def _image_part(base64_text: str, kind: str) -> dict[str, Any]:
    return {
        "type": "image",
        "image": f"data:{kind};base64,{base64_text}",
        "alt": f"(image, {_file_size(base64_text, kind)})",
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _file_size(base64_text: str, kind: str) -> str:
    num_bytes = len(base64_text) * 3 // 4 - base64_text[-2:].count("=")
    return f"{kind}, {num_bytes} bytes"


def _cause(error: BaseException) -> BaseException:
    """The first error inside groups, which tasks that ran together raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _tool(client: mcp.Client, described: Any, prefix: str) -> Callable[..., Any]:
    async def call(**arguments: Any) -> Any:
        try:
            result = await client.call_tool(described.name, arguments)
        except mcp.MCPError as error:  # the connection is closed, or the server refuses
            raise RuntimeError(f"the tool's MCP server: {error}") from error
        value = result_value(result)
        if result.is_error:
            text = contents.without_images(value)
            raise RuntimeError(text or "the tool failed, and its server does not say why")
        return value

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
