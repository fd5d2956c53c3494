"""Images of rows and chats: read, checked, counted in tokens, and preprocessed to patches.

A picture keeps the encoded file and is decoded when its pixels are needed, because the pixels of a
whole dataset would not fit in memory. No image is downloaded.
"""

import base64
import dataclasses
import hashlib
import io
import pathlib
import re
import reprlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrl_llm.data.errors import DataError
from jaxrl_llm.storage import model_folder
from jaxrl_llm.types import PromptImage

IMAGES_COLUMN = "images"  # the column of verl's rows
IMAGE_PLACEHOLDER = "<image>"  # placeholder in the texts of a row with that column
MAX_PIXELS = 1 << 26  # limit of a decoded image; a small file may hold very many
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,(.*)", re.DOTALL)
_KEYS = (
    "image",
    "image_url",
    "url",
    "path",
    "bytes",
)  # keys of a content part or of an entry of the column

Message = Mapping[str, Any]


class ImagePreprocessor:
    """Image preprocessing of a vision-language model family."""

    def __init__(self, processor: Any, image_token: int):
        """`processor` is one of transformers' image processors of the Qwen2-VL family."""
        self._processor, self.image_token = processor, image_token
        self._patch, self._merge = processor.patch_size, processor.merge_size

    @classmethod
    def from_folder(cls, folder: str, image_token: int) -> "ImagePreprocessor":
        """Loads the preprocessor_config.json of a model folder; raises DataError if it cannot."""
        from transformers import AutoImageProcessor

        try:
            # Never the torchvision backend: its pixels differ.
            processor = AutoImageProcessor.from_pretrained(
                str(model_folder.local_folder(folder)),
                local_files_only=True,
                trust_remote_code=False,
                backend="pil",
            )
        except Exception as error:  # the library raises many kinds
            raise DataError(
                f"{folder}: its images cannot be prepared, {type(error).__name__}: {error}; it"
                " needs the preprocessor_config.json of the model"
            ) from error
        return cls(processor, image_token)

    @classmethod
    def from_sizes(
        cls, patch: int, merge: int, frames: int, image_token: int
    ) -> "ImagePreprocessor":
        """Preprocessing for a random model: images keep their size, up to 1,024 tokens."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        side = (patch * merge) ** 2
        sizes: Any = {"shortest_edge": side, "longest_edge": 1024 * side}
        make_processor: Any = Qwen2VLImageProcessorPil
        return cls(
            make_processor(
                patch_size=patch, merge_size=merge, temporal_patch_size=frames, size=sizes
            ),
            image_token,
        )

    def save(self, folder: str) -> None:
        """Writes preprocessor_config.json into a model folder."""
        self._processor.save_pretrained(folder)

    def read(self, source: Any, where: str, files: bool = True) -> PromptImage:
        """Reads and checks an image: bytes, a data URI, a path, or a mapping with one of these.

        Without `files` paths are refused. Unreadable images are a DataError that begins with
        `where`.
        """
        from PIL import Image
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        contents = _image_bytes(source, where, files)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(io.BytesIO(contents)) as image:  # its header
                    width, height = image.size
                    if width * height > MAX_PIXELS:
                        raise ValueError(f"{width} x {height} pixels, more than {MAX_PIXELS}")
                    image.load()  # decode fully: a truncated file must be reported now
            sizes = self._processor.size
            limits = sizes["shortest_edge"], sizes["longest_edge"]
            high, wide = smart_resize(height, width, self._patch * self._merge, *limits)
        except Exception as error:  # Pillow raises many kinds
            raise DataError(
                f"{where}: the image cannot be read, {type(error).__name__}: {error}; replace it or"
                " leave it out"
            ) from error
        digest = hashlib.sha256(contents).hexdigest()
        side = self._patch * self._merge
        return PromptImage(contents, digest, (high // side, wide // side))

    def patches(
        self, picture: PromptImage
    ) -> tuple[tuple[int, int], Float[np.ndarray, "patches dims"]]:
        """Number of patches along (height, width), and the pixels of each patch."""
        from PIL import Image

        with Image.open(io.BytesIO(picture.contents)) as image:
            features = self._processor([image], return_tensors="np")
        _, high, wide = features["image_grid_thw"][0].tolist()
        return (high, wide), np.asarray(features["pixel_values"], np.float32)

    def expand_placeholders(
        self, tokens: Sequence[int], images: Sequence[PromptImage], where: str
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Repeat counts that expand image placeholders, and the images with their positions.

        The template renders one placeholder token per image; it is repeated once for each image
        embedding. A number of placeholders other than of images is a DataError.
        """
        marks = sum(token == self.image_token for token in tokens)
        if marks != len(images):
            raise DataError(
                f"{where}: the template renders {marks} image placeholders for"
                f" {len(images)} images; write one {IMAGE_PLACEHOLDER} for each, and no"
                " other image token"
            )
        placed_images, position, counts = [], 0, []
        remaining = iter(images)
        for token in tokens:
            count = 1
            if token == self.image_token:
                image = next(remaining)
                placed_images.append(dataclasses.replace(image, start=position))
                count = image.num_tokens
            counts.append(count)
            position += count
        return counts, tuple(placed_images)


def expand_tokens(
    image_processor: ImagePreprocessor | None,
    tokens: Sequence[int],
    images: Sequence[PromptImage],
    where: str,
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Tokens with expanded image placeholders, and the images with their positions."""
    if image_processor is None:
        return tuple(tokens), ()
    counts, placed = image_processor.expand_placeholders(tokens, images, where)
    return tuple(np.repeat(np.asarray(tokens, int), counts).tolist()), placed


def refuse_to_cut(
    images: Sequence[PromptImage], num_tokens: int, most: int, setting: str, where: str
) -> None:
    """Raises DataError if a row with images is too long: truncation would cut an image."""
    if images and num_tokens > most:
        raise DataError(
            f"{where}: {num_tokens} tokens, {sum(p.num_tokens for p in images)} of them of images,"
            f" more than {setting}={most}; images are not cut, raise it or choose"
            " data.long_rows='drop'"
        )


def refuse_pairs(row: Mapping[str, Any], messages: Sequence[Message], where: str) -> None:
    """Raises DataError if a pair of answers has images."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    if any(part["type"] != "text" for part in parts) or row.get(IMAGES_COLUMN) is not None:
        raise DataError(f"{where}: preference pairs with images are not supported; remove the row")


def with_images(
    row: Mapping[str, Any],
    image_processor: ImagePreprocessor | None,
    where: str,
    files: bool = True,
) -> dict[str, Any]:
    """Reads the images of a row into its `prompt_images` and makes them parts of its messages.

    Without an `image_processor` a row with images is a DataError. Without `files` image
    paths are refused.
    """
    contents = [message.get("content") for message in row["prompt"]]
    column = row.get(IMAGES_COLUMN)
    if column is None and not any(isinstance(content, list) for content in contents):
        return dict(row)
    if column is not None and not isinstance(column, Sequence):
        raise DataError(f"{where}: {IMAGES_COLUMN} must be a list, got {type(column).__name__}")
    messages, sources = split_parts(row["prompt"], column, where)
    images = []
    for number, source in enumerate(sources, 1):
        if image_processor is None:
            raise DataError(
                f"{where}: it has images, but this model is text-only; use a vision-language model"
                " (model.path of Qwen2.5-VL, Qwen3-VL or Qwen3.5, with its"
                " preprocessor_config.json), or remove the row"
            )
        images.append(image_processor.read(source, f"{where}, image {number}", files))
    return {**row, "prompt": messages, "prompt_images": images}


def split_parts(
    messages: Sequence[Message], column: Sequence[Any] | None, where: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Splits messages into parts, images as `{"type": "image"}`, and the images in order.

    Images come from content parts, or from the column of the row: each `<image>` in a text and each
    image part without an image of its own takes the next one.
    """
    images: list[Any] = []
    column_images = list(column or [])
    marks = 0

    def take_next() -> None:
        nonlocal marks
        marks += 1
        if column_images:
            images.append(column_images.pop(0))

    def parts_of(content: Any) -> Iterator[dict[str, Any]]:
        if isinstance(content, str):
            for number, text in enumerate(content.split(IMAGE_PLACEHOLDER)):
                if number:
                    take_next()
                    yield {"type": "image"}
                if text:
                    yield {"type": "text", "text": text}
            return
        for part in content:
            if part["type"] == "text":
                yield {"type": "text", "text": part["text"]}
            else:
                if sources := [key for key in _KEYS if part.get(key) is not None]:
                    source = part[sources[0]]
                    # Of bytes, JSON can hold only their base64, which is no path.
                    images.append({"bytes": source} if sources[0] == "bytes" else source)
                else:
                    take_next()
                yield {"type": "image"}

    split_messages = []
    for message in messages:
        content = message.get("content")
        has_marks = column is not None and isinstance(content, str) and IMAGE_PLACEHOLDER in content
        if has_marks or isinstance(content, list):
            message = {**message, "content": list(parts_of(content))}
        split_messages.append(dict(message))
    if marks != len(column or ()):
        raise DataError(
            f"{where}: {marks} marks {IMAGE_PLACEHOLDER} for {len(column or ())} images;"
            " write one for each"
        )
    return split_messages, images


def _image_bytes(source: Any, where: str, files: bool) -> bytes:
    if isinstance(source, Mapping):
        candidates = [source[key] for key in (*_KEYS[::-1],) if source.get(key) is not None]
        if not candidates:
            rule = "needs bytes, a path or a data URI"
            raise DataError(f"{where}: an image {rule}, got {reprlib.repr(dict(source))}")
        if candidates[0] is source.get("bytes") and isinstance(candidates[0], str):
            return _base64_bytes(candidates[0], f"{where}: the bytes of an image are")
        source = candidates[0]
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and (match := _DATA_URI.fullmatch(source.strip())):
        return _base64_bytes(match[1], f"{where}: the data URI of an image is")
    if not isinstance(source, str):
        rule = "must be bytes, a path or a data URI"
        raise DataError(f"{where}: an image {rule}, got {type(source).__name__}")
    if "://" in source.removeprefix("file://") or source.startswith("data:") or not files:
        raise DataError(
            f"{where}: image {source:.60}: nothing is downloaded; give the image itself as"
            " data:image/png;base64,..."
        )
    try:
        return pathlib.Path(source.removeprefix("file://")).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        remedy = "give the path of a file, or data:image/png;base64,..."
        raise DataError(
            f"{where}: the image cannot be read: {reason}: {_shortened_text(source)}; {remedy}"
        ) from error


def _base64_bytes(text: str, what: str) -> bytes:
    """The bytes of a base64 text, which JSON has instead; `what` begins the error."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:  # binascii's, or characters that are no ASCII
        raise DataError(
            f"{what} no base64: {error}, got {_shortened_text(text)}; encode the file as"
            " base64, or give its path"
        ) from error


def _shortened_text(text: str) -> str:
    """The beginning of a text that may be a whole image, for messages."""
    return repr(text) if len(text) <= 100 else f"{text[:60]!r}... of {len(text)} characters"
