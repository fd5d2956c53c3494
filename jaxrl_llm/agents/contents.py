"""What tools and environments say: texts, and images among them."""

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.agents import tools

Content = str | list[dict[str, Any]]  # parts only if there is an image
UNREADABLE = "(an image that cannot be read)"


def content(value: Any, shorten: Callable[[str], str]) -> Content:
    """Returns what the model is told of a result, its texts shortened, its images as data URIs.

    An image is one of Pillow's, or a part of a list as OpenAI's chats have it: `{"type": "image",
    "image": ...}` or `{"type": "image_url", ...}`, whose image may be the bytes of a file.
    TypeError for what `tools.as_text` refuses.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    if not any(map(_is_image, parts)):
        return shorten(tools.as_text(value))
    found: list[dict[str, Any]] = []
    for part in parts:
        if _is_image(part):
            found.append({"type": "image", "image": _uri(part)})
        else:
            is_text = isinstance(part, Mapping) and part.get("type") == "text"
            text = shorten(tools.as_text(part["text"] if is_text else part))
            found.append({"type": "text", "text": text})
    return found


def texts_of(content: Content, change: Callable[[str], str]) -> Content:
    """Returns a content with its texts changed."""
    if isinstance(content, str):
        return change(content)
    return [
        {**part, "text": change(part["text"])} if part["type"] == "text" else part
        for part in content
    ]


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("type") in ("image", "image_url")
    return hasattr(value, "save") and hasattr(value, "getbands")  # Pillow's


def _uri(image: Any) -> str:
    if isinstance(image, Mapping):
        image = next((image[key] for key in ("image", "image_url", "url") if image.get(key)), "")
        image = image.get("url", "") if isinstance(image, Mapping) else image
    if hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, "PNG")
        image = file.getvalue()
    if isinstance(image, bytes):
        return "data:image/png;base64," + base64.b64encode(image).decode()
    return str(image)
