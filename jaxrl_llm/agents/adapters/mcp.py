"""Tools of a Model Context Protocol (MCP) server (package `mcp`)."""

import asyncio
import contextlib
import json
import shlex
from collections.abc import Callable
from typing import Any

import mcp
from mcp.client.stdio import StdioServerParameters

from jaxrl_llm.agents import message_content
from jaxrl_llm.text import json_value

_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 90.0  # the pool waits 120 s for all tools to be described


class MCPTools:
    """The tools of one MCP server, with a new connection for each episode."""

    def __init__(self, address: str):
        """`address` is the URL of a server (http://...), or the command that starts one.

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
                    f"the MCP server {address!r} is neither an address nor a command: {error}; give"
                    " http://... or a command whose quotation marks are closed"
                ) from error
            target = StdioServerParameters(command=words[0], args=words[1:])
        self._client = mcp.Client(target, read_timeout_seconds=_TIMEOUT_S)
        self._stack = contextlib.AsyncExitStack()
        self.tools: dict[str, Callable[..., Any]] = {}

    async def connect(self) -> None:
        """Connects and lists the server's tools.

        Raises:
          ConnectionError: Names the server and the cause.
        """
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._stack.enter_async_context(self._client)
                self.tools = await list_tools(self._client)
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


async def list_tools(client: mcp.Client, prefix: str = "") -> dict[str, Callable[..., Any]]:
    """The tools of a server by name, each name with `prefix` before it."""
    tools: dict[str, Callable[..., Any]] = {}
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools |= {prefix + tool.name: _tool(client, tool, prefix) for tool in page.tools}
        cursor = page.next_cursor
        if not cursor:
            return tools


def result_value(result: Any) -> str | list[dict[str, Any]]:
    """A tool's result (`CallToolResult`) as a text, or as parts if it has images.

    Texts and texts of embedded resources are kept whole. Links and binary files are described by
    address, type and size, and so are images for text-only models. Structured content follows as
    JSON unless the texts contain it already.
    """
    parts = [_part(block) for block in result.content]
    structured = result.structured_content
    if structured is not None and not _is_in_blocks(structured, result.content):
        parts.append(_text_part(json.dumps(structured, ensure_ascii=False)))
    if any(part["type"] == "image" for part in parts):
        return parts
    return message_content.without_images(parts) or ""


def _is_in_blocks(structured: dict[str, Any], blocks: list[Any]) -> bool:
    """Whether the blocks repeat the structured content as text, as servers do.

    Values other than objects stand under the key `result`; a list may have one block per item.
    """
    values = [structured]
    if structured.keys() == {"result"}:
        values.append(structured["result"])
    values_by_block = [_block_values(block) for block in blocks]
    if any(value in block_values for value in values for block_values in values_by_block):
        return True
    items = values[-1]
    return (
        isinstance(items, list)
        and bool(items)
        and len(items) == len(values_by_block)
        and all(
            item in block_values for item, block_values in zip(items, values_by_block, strict=True)
        )
    )


def _block_values(block: Any) -> list[Any]:
    """The possible values of a block: the block itself, its text, or the value of its JSON."""
    values = [block.model_dump(mode="json", by_alias=True, exclude_none=True)]
    if block.type == "text":
        values.append(block.text)
        with contextlib.suppress(ValueError):
            values.append(json_value(block.text))
    return values


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
            mime_type = resource.mime_type or "of unknown type"
            if mime_type.startswith("image/"):
                return _image_part(resource.blob, mime_type)
            return _text_part(f"(file {resource.uri}, {_file_size(resource.blob, mime_type)})")
    return _text_part(f"(content of type {block.type!r}, which cannot be read)")


def _image_part(base64_text: str, mime_type: str) -> dict[str, Any]:
    return {
        "type": "image",
        "image": f"data:{mime_type};base64,{base64_text}",
        "alt": f"(image, {_file_size(base64_text, mime_type)})",
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _file_size(base64_text: str, mime_type: str) -> str:
    num_bytes = len(base64_text) * 3 // 4 - base64_text[-2:].count("=")
    return f"{mime_type}, {num_bytes} bytes"


def _cause(error: BaseException) -> BaseException:
    """The first error inside exception groups, which concurrent tasks raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _tool(client: mcp.Client, description: Any, prefix: str) -> Callable[..., Any]:
    async def call(**arguments: Any) -> Any:
        try:
            result = await client.call_tool(description.name, arguments)
        except mcp.MCPError as error:  # the connection is closed, or the server refuses
            raise RuntimeError(f"the tool's MCP server: {error}") from error
        value = result_value(result)
        if result.is_error:
            text = message_content.without_images(value)
            raise RuntimeError(text or "the tool failed without an error message from its server")
        return value

    call.json_schema = {  # type: ignore[attr-defined]
        "type": "function",
        "function": {
            "name": prefix + description.name,
            "description": description.description or "",
            "parameters": description.input_schema,
        },
    }
    return call


def make(address: str) -> MCPTools:
    """Creates the tools of a server; `connect` opens the connection."""
    return MCPTools(address)
