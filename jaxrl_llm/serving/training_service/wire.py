"""Tinker's protobuf bodies: requests of passes, and results of passes and samples."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.serving.training_service import protobuf
from jaxrl_llm.training_api.training_data import Datum
from jaxrl_llm.training_api.training_session import PassResult

# `DType` of the wire: its number, and the dtype of the bytes.
_FLOAT32, _INT64 = 1, 2
_DTYPES: Mapping[int, Any] = {_FLOAT32: "<f4", _INT64: "<i8", 3: "<i4"}
_MASKED_LOG_PROB = -99999.0  # of top-k entries that do not exist
_STOP_REASONS = {"stop": 0, "length": 1}
# Names of our fields, by those of `loss_fn_inputs`.
_FIELDS = {"weights": "weights", "advantages": "advantages", "logprobs": "old_log_probs"}


class WireError(UserError, ValueError):
    """A request that this server does not support, or that contradicts itself."""


@dataclasses.dataclass(frozen=True)
class PassRequest:
    """A forward or forward-backward pass."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    settings: Mapping[str, float]
    forward_only: bool


def decode_pass(body: bytes) -> PassRequest:
    """Decodes a `ForwardBackwardRequest`.

    Raises:
      ProtobufError, WireError: If it cannot be read, or holds what is not supported here.
    """
    model_id, seq_id, loss, forward_only = "", 0, "", False
    data: list[Datum] = []
    old_settings: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for number, value in protobuf.fields(body):
        if number == 1:
            model_id = protobuf.text(value)
        elif number == 2:
            seq_id = protobuf.signed(value)
        elif number == 3:
            data.append(_decode_datum(protobuf.message(value), f"data[{len(data)}]"))
        elif number == 4:
            loss = protobuf.text(value)
        elif number == 5:
            key, number_value = _entry(value)
            old_settings[key] = protobuf.double(number_value)
        elif number == 6:
            forward_only = bool(value)
        elif number == 7:
            key, setting = _entry(value)
            settings[key] = _decode_setting(protobuf.message(setting), key)
    return PassRequest(model_id, seq_id, tuple(data), loss, settings or old_settings, forward_only)


def request_address(body: bytes) -> tuple[str, int]:
    """The model and the sequence number of a `ForwardBackwardRequest`; raises ProtobufError."""
    model_id, seq_id = "", 0
    for number, value in protobuf.fields(body):
        if number == 1:
            model_id = protobuf.text(value)
        elif number == 2:
            seq_id = protobuf.signed(value)
    return model_id, seq_id


def _entry(value: protobuf.Value) -> tuple[str, protobuf.Value]:
    """The key and the value of an entry of a map; an absent value is empty."""
    parts = dict(protobuf.fields(protobuf.message(value)))
    return protobuf.text(parts.get(1, b"")), parts.get(2, b"")


def _decode_setting(data: bytes, name: str) -> float:
    parts = dict(protobuf.fields(data))
    if 2 in parts:
        raise WireError(
            f"loss_fn_config.{name}: {protobuf.text(parts[2])!r:.100} is a text; losses of this"
            " server take numbers"
        )
    return protobuf.double(parts.get(1, 0))


def _decode_datum(data: bytes, where: str) -> Datum:
    tokens: list[np.ndarray] = []
    inputs: dict[str, np.ndarray] = {}
    for number, value in protobuf.fields(data):
        if number == 1:
            ((kind, chunk),) = list(protobuf.fields(protobuf.message(value))) or [(0, b"")]
            if kind != 1:
                raise WireError(f"{where}: has an image or audio; this server trains on text")
            parts = dict(protobuf.fields(protobuf.message(chunk)))
            tokens.append(np.frombuffer(protobuf.message(parts.get(1, b"")), "<i4"))
        elif number == 2:
            name, tensor = _entry(value)
            inputs[name] = _decode_tensor(protobuf.message(tensor), f"{where}.{name}")
    return _next_token_datum(
        np.concatenate(tokens) if tokens else np.zeros(0, np.int32), inputs, where
    )


def _decode_tensor(data: bytes, where: str) -> np.ndarray:
    dense, dtype, shape = b"", 0, list[int]()
    for number, value in protobuf.fields(data):
        if number == 1:
            dense = protobuf.message(value)
        elif number == 2:
            raise WireError(f"{where}: is sparse; this server takes one number for each token")
        elif number == 3:
            dtype = protobuf.signed(value)
        elif number == 4 and isinstance(value, bytes):  # packed
            position, view = 0, memoryview(value)
            while position < len(view):
                size, position = protobuf._read_varint(view, position)
                shape.append(size)
        elif number == 4:
            shape.append(protobuf.signed(value))
    if dtype not in _DTYPES:
        raise WireError(f"{where}: dtype {dtype} is not known; use float32 or int64")
    if len(dense) % np.dtype(_DTYPES[dtype]).itemsize:
        raise WireError(f"{where}: {len(dense)} bytes are no whole number of entries")
    array = np.frombuffer(dense, _DTYPES[dtype])
    if len(shape) > 1:
        raise WireError(
            f"{where}: shape {shape}; this server takes one number for each token: several targets"
            " at a position are not supported"
        )
    return array


def _next_token_datum(tokens: np.ndarray, inputs: Mapping[str, np.ndarray], where: str) -> Datum:
    """A datum whose index t is about token t, from one whose index t is about the next token.

    The model reads the inputs and the last target, which predicts nothing.
    """
    if "target_tokens" not in inputs:
        raise WireError(f"{where}: no target_tokens; give the token after each input")
    targets = inputs["target_tokens"]
    fields: dict[str, Any] = {}
    for name, values in inputs.items():
        if len(values) != len(tokens):
            raise WireError(
                f"{where}.{name}: {len(values)} entries for {len(tokens)} input tokens; give one"
                " for each"
            )
        if name == "target_tokens":
            continue
        if name not in _FIELDS:
            known = ", ".join(("target_tokens", *_FIELDS))
            raise WireError(f"{where}: no loss of this server reads {name!r:.100}; use {known}")
        fields[_FIELDS[name]] = np.concatenate([[0.0], values.astype(np.float64)])
    if not len(tokens):
        raise WireError(f"{where}: no input tokens")
    if targets.dtype.kind != "i":
        raise WireError(f"{where}.target_tokens: not integers")
    read = np.concatenate([tokens, targets[-1:]]).astype(np.int64)
    return Datum(read, fields, np.concatenate([tokens[:1], targets]).astype(np.int64))


def encode_pass_result(result: PassResult) -> bytes:
    """Encodes a `ForwardBackwardOutput` with the log-prob of every target."""
    rows = [log_probs[1:].astype("<f4").tobytes() for log_probs in result.log_probs]
    offsets = np.cumsum([0, *map(len, rows)]).astype("<i8")
    tensor = protobuf.encode((1, b"".join(rows)), (2, offsets.tobytes()), (3, _FLOAT32))
    entry = protobuf.encode((1, "logprobs"), (2, tensor))
    record = protobuf.encode((1, "ArrayRecord"), (2, entry), (3, len(rows)))
    metrics = {"loss:sum": result.loss, **{f"{k}:sum": v for k, v in result.metrics.items()}}
    return protobuf.encode(
        (1, "ArrayRecord"),
        (2, record),
        *((3, protobuf.encode((1, name), (2, float(v)))) for name, v in metrics.items()),
    )


@dataclasses.dataclass(frozen=True)
class FinishedSample:
    """A finished sample."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: str
    top_log_probs: Sequence[Sequence[tuple[int, float]]] = ()


@dataclasses.dataclass(frozen=True)
class SampledPrompt:
    """The log-probs of a prompt; NaN where none were asked for."""

    log_probs: np.ndarray  # [tokens]
    top_tokens: np.ndarray  # [tokens, k]
    top_log_probs: np.ndarray  # [tokens, k]


def encode_samples(samples: Sequence[FinishedSample], prompt: SampledPrompt | None) -> bytes:
    """Encodes a `SampleResponse`."""
    parts: list[tuple[int, int | float | str | bytes]] = []
    for sample in samples:
        fields: list[tuple[int, int | float | str | bytes]] = [
            (1, _STOP_REASONS[sample.finish_reason]),
            (2, np.asarray(sample.tokens, "<i4").tobytes()),
            (3, np.asarray(sample.log_probs, "<f4").tobytes()),
        ]
        if sample.top_log_probs:
            fields.append((4, _encode_top(*_top_arrays(sample.top_log_probs))))
        parts.append((1, protobuf.encode(*fields)))
    if prompt is not None:
        parts.append((2, prompt.log_probs.astype("<f4").tobytes()))
        if prompt.top_tokens.shape[1]:
            parts.append((3, _encode_top(prompt.top_tokens, prompt.top_log_probs)))
    return protobuf.encode(*parts)


def _top_arrays(rows: Sequence[Sequence[tuple[int, float]]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([[t for t, _ in row] for row in rows]), np.array(
        [[p for _, p in row] for row in rows]
    )


def _encode_top(tokens: np.ndarray, log_probs: np.ndarray) -> bytes:
    known = np.isfinite(log_probs)
    tokens = np.where(known, tokens, 0).astype("<i4")
    log_probs = np.where(known, log_probs, _MASKED_LOG_PROB).astype("<f4")
    return protobuf.encode(
        (1, tokens.tobytes()), (2, log_probs.tobytes()), (3, tokens.shape[1]), (4, len(tokens))
    )
