"""An MCP server whose tools give results of every kind; tests start it as a process."""

import os

import pydantic
from mcp.server import MCPServer
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

PNG = "iVBORw0KGgo="  # eight bytes
server = MCPServer("adder")


class Point(pydantic.BaseModel):
    x: int
    name: str


def text(words: str) -> TextContent:
    return TextContent(type="text", text=words)


def image() -> ImageContent:
    return ImageContent(type="image", data=PNG, mime_type="image/png")


@server.tool()
def plus(a: int, b: int) -> str:
    """Adds."""
    if a > 100:
        raise ValueError("too large")
    return str(a + b)


@server.tool()
def draw() -> list[ImageContent | TextContent]:
    """Draws."""
    return [text("a dot"), image()]


@server.tool()
def files() -> list[AudioContent | ResourceLink | EmbeddedResource]:
    """Lists."""
    audio = AudioContent(type="audio", data="AAAA", mime_type="audio/wav")
    link = ResourceLink(
        type="resource_link", name="log", uri="file:///log", mime_type="text/plain", size=9
    )
    bare = ResourceLink(type="resource_link", name="log", uri="file:///log")
    whole = TextResourceContents(uri="file:///a", text="all of it")
    some = BlobResourceContents(uri="file:///b", blob="AAAA")
    embedded = [EmbeddedResource(type="resource", resource=each) for each in (whole, some)]
    return [audio, link, bare, *embedded]


@server.tool()
def embedded_image() -> list[EmbeddedResource]:
    """Draws."""
    blob = BlobResourceContents(uri="file:///b.png", blob=PNG, mime_type="image/png")
    return [EmbeddedResource(type="resource", resource=blob)]


@server.tool()
def point() -> Point:
    """Gives structured content, and the same as text."""
    return Point(x=1, name="é")


@server.tool()
def points(count: int) -> list[Point]:
    """Gives one text per item."""
    return [Point(x=number, name="a") for number in range(count)]


@server.tool()
def words() -> list[str]:
    """Gives one text per item."""
    return ["1", "b"]


@server.tool()
def lines() -> list[list[str]]:
    """Gives texts that do not say which list they come from."""
    return [["a", "b"], ["c"]]


@server.tool()
def summary() -> CallToolResult:
    """Gives structured content that its text does not hold."""
    return CallToolResult(content=[text("Found 2.")], structured_content={"ids": [4, 7]})


@server.tool()
def fail(kind: str) -> CallToolResult:
    """Fails, with an image or without a word."""
    content = [text("no file x"), image()] if kind == "image" else []
    return CallToolResult(content=content, is_error=True)


@server.tool()
def nothing() -> CallToolResult:
    """Gives no content."""
    return CallToolResult(content=[])


@server.tool()
def end() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run()
