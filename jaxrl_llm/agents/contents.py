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
    "image": ...}` or `{"type": "image_url", ...}`, whose image may be the bytes of a file. Its
    `alt` is the text for models that read text alone. TypeError for what `tools.as_text` refuses.
    """
    parts = value if isinstance(value, list | tuple) else [value]
    if not any(map(_is_image, parts)):
        return shorten(tools.as_text(value))
    found: list[dict[str, Any]] = []
    for part in parts:
        if _is_image(part):
            found.append({"type": "image", "image": _uri(part)})
            if isinstance(part, Mapping) and isinstance(part.get("alt"), str):
                found[-1]["alt"] = shorten(tools.as_text(part["alt"]))
        else:
            is_text = isinstance(part, Mapping) and part.get("type") == "text"
            text = shorten(tools.as_text(part["text"] if is_text else part))
            found.append({"type": "text", "text": text})
    return found


def texts_of(content: Content, change: Callable[[str], str]) -> Content:
    """Returns a content with its texts changed, and those in place of images."""
    if isinstance(content, str):
        return change(content)
    return [
        {**part, **{key: change(part[key]) for key in ("text", "alt") if key in part}}
        for part in content
    ]


def without_images(content: Content) -> str | None:
    """Returns a content as text, with `alt` in place of images; None if one of them has none."""
    if isinstance(content, str):
        return content
    if any(part["type"] == "image" and "alt" not in part for part in content):
        return None
    return "\n".join(part["alt" if part["type"] == "image" else "text"] for part in content)


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
