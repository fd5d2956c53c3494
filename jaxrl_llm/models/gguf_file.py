"""Models in GGUF files, the format of llama.cpp: their shape and their tensors under our names.

Quantized tensors become float32 one at a time, when they are written. Needs the extra [gguf].
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from flax import traverse_util

from jaxrl_llm.models import finite
from jaxrl_llm.models.attention_layers import rotary_frequencies
from jaxrl_llm.models.families import CheckpointFormatError
from jaxrl_llm.models.huggingface import Contents
from jaxrl_llm.models.shape import RopeScaling, Shape
from jaxrl_llm.models.tensor_names import TensorName, tensor_names
from jaxrl_llm.models.transformer import Network

# Fields that say nothing that the shape does not say, or that `read_shape` compares with it.
_KNOWN = {"vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length"}
_FAMILIES: Mapping[str, Any] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """An opened file; tensors are read when they are asked for."""

    path: pathlib.Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    def fault(self, what: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self.path}: {what}")


class _Reader(gguf.GGUFReader):
    """The library's reader, which would return shorter arrays where a file ends too early."""

    def _get(self, offset, dtype, count=1, override_order=None):
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise EOFError(f"cut short: it needs byte {end} of {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)


def open_file(path: str | pathlib.Path) -> GGUFFile:
    """Returns the fields and the tensors of a file; reads no weights.

    Raises:
      CheckpointFormatError: If there is no such file, or it is damaged, cut short, one of several
        parts, or not a model.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise CheckpointFormatError(f"{path}: no such file; give a file that ends in .gguf")
    try:
        reader = _Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # of a damaged file the library raises many kinds
        what = f"not a complete GGUF file: {type(error).__name__}: {error}; copy it again"
        raise CheckpointFormatError(f"{path}: {what}") from error
    file = GGUFFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise file.fault("is big-endian; convert it with gguf-convert-endian")
    if (parts := fields.get("split.count", 1)) > 1:
        remedy = "join them with `llama-gguf-split --merge`"
        raise file.fault(f"is one of {parts} parts of a model; {remedy}")
    if fields.get("general.type", "model") != "model":
        raise file.fault(f"holds {fields['general.type']!r}, not a model")
    return file


def read_shape(file: GGUFFile) -> Shape:
    """Returns the shape of the network in a file.

    Raises:
      CheckpointFormatError: On an unknown architecture, a missing number, or a field that would
        change the arithmetic in a way that is not implemented.
    """
    name = str(file.fields.get("general.architecture"))
    if name not in _FAMILIES:
        raise file.fault(f"architecture is {name!r}; known: {', '.join(_FAMILIES)}")
    if "token_embd.weight" not in file.tensors:
        raise file.fault("token_embd.weight is missing; is it a language model?")
    read = set(_KNOWN)

    def number(key: str, default: float | None = None) -> Any:
        read.add(key)
        value = file.fields.get(f"{name}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise file.fault(f"{name}.{key} is {value!r}; expected one number above 0")
        return value

    heads = number("attention.head_count")
    hidden = number("embedding_length")
    head_size = number("attention.key_length", number("rope.dimension_count", hidden // heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if number(key, head_size) != head_size:
            raise file.fault(
                f"{name}.{key} is {number(key)}, but heads have {head_size}; only the same size is"
                " implemented"
            )
    theta = float(number("rope.freq_base", 10_000.0))
    shape = Shape(
        family=name,
        vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_size=head_size,
        mlp_size=number("feed_forward_length"),
        max_positions=number("context_length"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, head_size, theta),
        # The shortest number with this float32: 1e-5 is stored as 0.00000999999974.
        norm_eps=float(str(np.float32(number("attention.layer_norm_rms_epsilon")))),
        **_FAMILIES[name],
        tie_embeddings="output.weight" not in file.tensors,
    )
    for key, value in file.fields.items():
        unread = key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in read
        if unread and value not in (0, "none"):
            raise file.fault(f"{key} is {value!r:.80}; it is not implemented for {name}")
    return shape


def _rope_scaling(file: GGUFFile, head_size: int, theta: float) -> RopeScaling:
    """Returns Llama 3's scaling; a file holds what it divides each frequency by, and no settings.

    Of these only the factor differs between released models.
    """
    if _ROPE_FACTORS not in file.tensors:
        return RopeScaling()
    stored = _values(file.tensors[_ROPE_FACTORS])
    scaling = RopeScaling(factor=float(stored.max()))
    plain, scaled = (rotary_frequencies(head_size, theta, s) for s in (RopeScaling(), scaling))
    expected = np.asarray(plain / scaled)
    # Both are float32, of other orders of operations.
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise file.fault(f"{_ROPE_FACTORS} is not Llama 3's scaling; no other is implemented")
    return scaling


def contents(file: GGUFFile, network: Network, dtype: np.dtype) -> Contents:
    """Returns the function that reads one tensor in a dtype, as a Hugging Face folder stores it.

    Raises:
      CheckpointFormatError: If the file lacks a tensor of the network, has another shape or a type
        that cannot be read, or a tensor that the network does not have.
    """
    num_layers = network.shape.num_layers
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    theirs = gguf.get_tensor_name_map(architectures[network.shape.family], num_layers)
    leaves = traverse_util.flatten_dict(network.abstract())
    found: dict[tuple[TensorName, int], gguf.ReaderTensor] = {}
    for name in tensor_names(network.shape):
        expected = name.stored_shape(leaves[name.path].shape)
        for layer, file_name in enumerate(name.file_names):
            key = theirs.get_name(file_name, try_suffixes=(".weight", ".bias"))
            tensor = file.tensors.get(key or "")
            if tensor is None:
                raise file.fault(f"{key} ({file_name}) is missing; take another copy of it")
            if (stored := tuple(tensor.shape[::-1].tolist())) != expected:
                raise file.fault(f"{key} is {list(stored)}, expected {list(expected)}")
            _check_readable(file, tensor)
            found[name, layer] = tensor
    known = {_ROPE_FACTORS, *(tensor.name for tensor in found.values())}
    if unknown := sorted(file.tensors.keys() - known):
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise file.fault(f"{network.shape.family} has no {', '.join(unknown[:4])}{more}")

    def read(name: TensorName, layer: int, expert: int) -> np.ndarray:
        tensor = found[name, layer]
        array = _values(tensor)
        if not np.isfinite(array).all():
            number = int((~np.isfinite(array)).sum())
            raise finite.NotFiniteError(
                f"{file.path}: {tensor.name} has {number} NaN or infinite numbers; the file is"
                " damaged, take another copy of it"
            )
        projection = name.path[-2] if len(name.path) > 1 else ""
        if network.shape.family == "llama" and projection in ("q", "k"):
            array = _halves(array, network.shape.head_size)
        return array.astype(dtype, copy=False)

    return read


def _values(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def _check_readable(file: GGUFFile, tensor: gguf.ReaderTensor) -> None:
    first = tensor.data[:1]
    try:
        gguf.dequantize(first, tensor.tensor_type)
    except NotImplementedError as error:
        raise file.fault(
            f"{tensor.name} is stored as {tensor.tensor_type.name}: {error}"
        ) from error


def _halves(array: np.ndarray, head_size: int) -> np.ndarray:
    """Returns rows with the pairs that rotate together half a head apart, as transformers does.

    llama.cpp has them side by side in models of Llama's family.
    """
    pairs = array.reshape(-1, head_size // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
