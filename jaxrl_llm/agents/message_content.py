"""Message content that tools and environments return: text, or parts with text and images."""

import base64
import io
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.agents import tools

MessageContent = str | list[dict[str, Any]]  # a list of parts only if there are images
UNREADABLE_IMAGE = "(an image that cannot be read)"


def message_content(value: Any, shorten: Callable[[str], str]) -> MessageContent:
    """The message content of a result, its texts truncated by `shorten`, its images as data URIs.

    An image is a Pillow image, or a part of a list as in OpenAI's chat API: `{"type": "image",
    "image": ...}` or `{"type": "image_url", ...}`, whose image may be the bytes of a file. Its
    `alt` is the text for text-only models. TypeError for values that `tools.result_text` rejects.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    if not any(map(_is_image, parts)):
        return shorten(tools.result_text(value))
    content_parts: list[dict[str, Any]] = []
    for part in parts:
        if _is_image(part):
            content_parts.append({"type": "image", "image": _data_uri(part)})
            if isinstance(part, Mapping) and isinstance(part.get("alt"), str):
                content_parts[-1]["alt"] = shorten(tools.result_text(part["alt"]))
        else:
            is_text = isinstance(part, Mapping) and part.get("type") == "text"
            text = shorten(tools.result_text(part["text"] if is_text else part))
            content_parts.append({"type": "text", "text": text})
    return content_parts


def map_texts(content: MessageContent, change: Callable[[str], str]) -> MessageContent:
    """The content with `change` applied to its texts and to the `alt` texts of its images."""
    if isinstance(content, str):
        return change(content)
    return [
        {**part, **{key: change(part[key]) for key in ("text", "alt") if key in part}}
        for part in content
    ]


def without_images(content: MessageContent) -> str | None:
    """The content as text, images replaced by their `alt`; None if an image has none."""
    if isinstance(content, str):
        return content
    if any(part["type"] == "image" and "alt" not in part for part in content):
        return None
    return "\n".join(part["alt" if part["type"] == "image" else "text"] for part in content)


def _is_image(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("type") in ("image", "image_url")
    return hasattr(value, "save") and hasattr(value, "getbands")  # a Pillow image


def _data_uri(image: Any) -> str:
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
