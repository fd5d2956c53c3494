"""Images of rows and chats: read, checked, and counted in tokens; their pixels by the processor.

A picture keeps the file as it came. Its pixels are made when they are needed: for a whole data set
they would fill the memory. Nothing is downloaded.
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
from jaxrl_llm.types import Picture

COLUMN = "images"  # of verl's rows
MARK = "<image>"  # in a text of a row with that column
MOST_PIXELS = 1 << 26  # of an image as it came; a small file may hold very many
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,(.*)", re.DOTALL)
_KEYS = ("image", "image_url", "url", "path", "bytes")  # of a part, or of an entry of the column

Message = Mapping[str, Any]


class Pictures:
    """What a family's processor makes of images."""

    def __init__(self, processor: Any, image_token: int):
        """`processor` is one of transformers' image processors of the Qwen2-VL family."""
        self._processor, self.image_token = processor, image_token
        self._patch, self._merge = processor.patch_size, processor.merge_size

    @classmethod
    def of_folder(cls, folder: str, image_token: int) -> "Pictures":
        """Returns what the preprocessor_config.json of a model folder says; else a DataError."""
        from transformers import AutoImageProcessor

        try:
            # Never that of torchvision, whose pixels differ.
            found = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except Exception as error:  # the library raises many kinds
            raise DataError(
                f"{folder}: its images cannot be prepared, {type(error).__name__}: {error}; it"
                " needs the preprocessor_config.json of the model"
            ) from error
        return cls(found, image_token)

    @classmethod
    def of_sizes(cls, patch: int, merge: int, frames: int, image_token: int) -> "Pictures":
        """Returns those of a random model: an image keeps its size, up to a thousand tokens."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        side = (patch * merge) ** 2
        sizes: Any = {"shortest_edge": side, "longest_edge": 1024 * side}
        made: Any = Qwen2VLImageProcessorPil
        return cls(
            made(patch_size=patch, merge_size=merge, temporal_patch_size=frames, size=sizes),
            image_token,
        )

    def save(self, folder: str) -> None:
        """Writes the preprocessor_config.json of a model folder."""
        self._processor.save_pretrained(folder)

    def read(self, source: Any, where: str, files: bool = True) -> Picture:
        """Returns an image, checked: bytes, a data URI, the path of a file, or a mapping of those.

        Without `files` no file is read. What cannot be read is a DataError that begins with
        `where`.
        """
        from PIL import Image
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        contents = _contents(source, where, files)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(io.BytesIO(contents)) as image:  # its header
                    width, height = image.size
                    if width * height > MOST_PIXELS:
                        raise ValueError(f"{width} x {height} pixels, more than {MOST_PIXELS}")
                    image.load()  # all of it: a file that is cut short must be told now
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
        return Picture(contents, digest, (high // side, wide // side))

    def patches(
        self, picture: Picture
    ) -> tuple[tuple[int, int], Float[np.ndarray, "patches dims"]]:
        """Returns the patches of an image along height and width, and their pixels."""
        from PIL import Image

        with Image.open(io.BytesIO(picture.contents)) as image:
            found = self._processor([image], return_tensors="np")
        _, high, wide = found["image_grid_thw"][0].tolist()
        return (high, wide), np.asarray(found["pixel_values"], np.float32)

    def placed(
        self, tokens: Sequence[int], pictures: Sequence[Picture], where: str
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """Returns for each token how often it stands there, and the pictures with their places.

        The template writes one token for an image; as many stand there as the image has vectors.
        Another number of them than of images is a DataError.
        """
        marks = sum(token == self.image_token for token in tokens)
        if marks != len(pictures):
            raise DataError(
                f"{where}: {marks} places of images in the text of the template for"
                f" {len(pictures)} images; write one {MARK} for each, and no token of images"
            )
        found, at, counts = [], 0, []
        left = iter(pictures)
        for token in tokens:
            count = 1
            if token == self.image_token:
                picture = next(left)
                found.append(dataclasses.replace(picture, start=at))
                count = picture.num_tokens
            counts.append(count)
            at += count
        return counts, tuple(found)


def expanded(
    pictures: Pictures | None, tokens: Sequence[int], found: Sequence[Picture], where: str
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Returns tokens with all of each image, and the images with their places; see `placed`."""
    if pictures is None:
        return tuple(tokens), ()
    counts, placed = pictures.placed(tokens, found, where)
    return tuple(np.repeat(np.asarray(tokens, int), counts).tolist()), placed


def refuse_to_cut(
    images: Sequence[Picture], num_tokens: int, most: int, setting: str, where: str
) -> None:
    """Raises DataError if a row with images is longer than allowed: it would be cut."""
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
    if any(part["type"] != "text" for part in parts) or row.get(COLUMN) is not None:
        raise DataError(f"{where}: pairs with images are not learned from; leave the row out")


def of_row(
    row: Mapping[str, Any], pictures: Pictures | None, where: str, files: bool = True
) -> dict[str, Any]:
    """Returns a row whose images are parts of its messages in `prompt`, and `pictures` of it.

    Without `pictures`, which prepares them, a row with images is a DataError. Without `files` no
    file is read for it.
    """
    contents = [message.get("content") for message in row["prompt"]]
    column = row.get(COLUMN)
    if column is None and not any(isinstance(content, list) for content in contents):
        return dict(row)
    if column is not None and not isinstance(column, Sequence):
        raise DataError(f"{where}: {COLUMN} must be a list, got {type(column).__name__}")
    messages, sources = taken_apart(row["prompt"], column, where)
    found = []
    for number, source in enumerate(sources, 1):
        if pictures is None:
            raise DataError(
                f"{where}: it has images, but this model reads text alone; use a model of text and"
                " images (model.path of Qwen2.5-VL), or leave the row out"
            )
        found.append(pictures.read(source, f"{where}, image {number}", files))
    return {**row, "prompt": messages, "pictures": found}


def taken_apart(
    messages: Sequence[Message], column: Sequence[Any] | None, where: str
) -> tuple[list[dict[str, Any]], list[Any]]:
    """Returns messages whose images are parts `{"type": "image"}`, and the images in their order.

    Images stand in the parts of a content, or in the column of the row, for which each `<image>` in
    a text and each part without an image of its own takes the next.
    """
    found: list[Any] = []
    left = list(column or [])
    marks = 0

    def next_one() -> None:
        nonlocal marks
        marks += 1
        if left:
            found.append(left.pop(0))

    def parts_of(content: Any) -> Iterator[dict[str, Any]]:
        if isinstance(content, str):
            for number, text in enumerate(content.split(MARK)):
                if number:
                    next_one()
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
                    found.append({"bytes": source} if sources[0] == "bytes" else source)
                else:
                    next_one()
                yield {"type": "image"}

    made = []
    for message in messages:
        content = message.get("content")
        has_marks = column is not None and isinstance(content, str) and MARK in content
        if has_marks or isinstance(content, list):
            message = {**message, "content": list(parts_of(content))}
        made.append(dict(message))
    if marks != len(column or ()):
        raise DataError(
            f"{where}: {marks} marks {MARK} for {len(column or ())} images; write one for each"
        )
    return made, found


def _contents(source: Any, where: str, files: bool) -> bytes:
    if isinstance(source, Mapping):
        given = [source[key] for key in (*_KEYS[::-1],) if source.get(key) is not None]
        if not given:
            rule = "needs bytes, a path or a data URI"
            raise DataError(f"{where}: an image {rule}, got {reprlib.repr(dict(source))}")
        if given[0] is source.get("bytes") and isinstance(given[0], str):
            return _decoded(given[0], f"{where}: the bytes of an image are")
        source = given[0]
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and (found := _DATA_URI.fullmatch(source.strip())):
        return _decoded(found[1], f"{where}: the data URI of an image is")
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
            f"{where}: the image cannot be read: {reason}: {_beginning(source)}; {remedy}"
        ) from error


def _decoded(text: str, what: str) -> bytes:
    """The bytes of a base64 text, which JSON has instead; `what` begins the error."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:  # binascii's, or characters that are no ASCII
        raise DataError(
            f"{what} no base64: {error}, got {_beginning(text)}; encode the file as base64, or give"
            " its path"
        ) from error


def _beginning(text: str) -> str:
    """The beginning of a text that may be a whole image, for messages."""
    return repr(text) if len(text) <= 100 else f"{text[:60]!r}... of {len(text)} characters"
