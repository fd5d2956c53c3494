"""The wire format of protocol buffers, as far as the bodies of Tinker's API need it.

A message is a list of (field number, value): varints and fixed 64-bit values are integers, texts,
bytes and messages are bytes. https://protobuf.dev/programming-guides/encoding
"""

import struct
from collections.abc import Iterator

from jaxrl_llm.errors import UserError

Value = int | bytes

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class ProtobufError(UserError, ValueError):
    """Bytes that are not a protocol buffer."""


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value & (2**64 - 1), position
        shift += 7
    raise ProtobufError("the body is not a protocol buffer: a number is cut short")


def fields(data: bytes | memoryview) -> Iterator[tuple[int, Value]]:
    """Yields the number and value of each field of a message; raises ProtobufError."""
    view, position = memoryview(data), 0
    while position < len(view):
        key, position = _read_varint(view, position)
        kind = key & 7
        if kind == _VARINT:
            value, position = _read_varint(view, position)
            yield key >> 3, value
            continue
        if kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            size, position = _read_varint(view, position)
        else:
            raise ProtobufError(f"the body is not a protocol buffer: wire type {kind}")
        if position + size > len(view):
            raise ProtobufError("the body is not a protocol buffer: a field is cut short")
        chunk = bytes(view[position : position + size])
        position += size
        yield key >> 3, chunk if kind == _BYTES else int.from_bytes(chunk, "little")


def signed(value: Value) -> int:
    """The int32 or int64 that a varint holds."""
    assert isinstance(value, int)
    return value - 2**64 if value >= 2**63 else value


def double(value: Value) -> float:
    """The double that a fixed 64-bit field holds."""
    assert isinstance(value, int)
    return struct.unpack("<d", value.to_bytes(8, "little"))[0]


def text(value: Value) -> str:
    """The text of a field; raises ProtobufError if it is not UTF-8."""
    try:
        return message(value).decode()
    except UnicodeDecodeError:
        raise ProtobufError("the body is not a protocol buffer: a text is not UTF-8") from None


def message(value: Value) -> bytes:
    """The bytes of a field; raises ProtobufError for a number."""
    if not isinstance(value, bytes):
        raise ProtobufError("the body is not a protocol buffer: a number where bytes are expected")
    return value


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode(*parts: tuple[int, int | float | str | bytes]) -> bytes:
    """A message of these fields: integers as varints, floats as doubles.

    >>> encode((1, 150), (2, "hi")).hex()
    '08960112026869'
    >>> list(fields(encode((1, 150), (2, b"hi"))))
    [(1, 150), (2, b'hi')]
    """
    encoded = bytearray()
    for number, value in parts:
        if isinstance(value, int):
            encoded += _varint(number << 3 | _VARINT) + _varint(value)
        elif isinstance(value, float):
            encoded += _varint(number << 3 | _FIXED64) + struct.pack("<d", value)
        else:
            raw = value.encode() if isinstance(value, str) else value
            encoded += _varint(number << 3 | _BYTES) + _varint(len(raw)) + raw
    return bytes(encoded)
