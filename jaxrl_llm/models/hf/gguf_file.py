"""Reads models in GGUF files, the format of llama.cpp: their `Architecture` and their tensors.

Tensors are dequantized to float32 one at a time, while they are written. Needs the extra [gguf].
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
from flax import traverse_util

from jaxrl_llm.models import finite
from jaxrl_llm.models.architecture import Architecture, RopeScaling
from jaxrl_llm.models.attention_modules import rotary_frequencies
from jaxrl_llm.models.hf.checkpoint import TensorReader
from jaxrl_llm.models.hf.config_reader import CheckpointFormatError
from jaxrl_llm.models.hf.tensor_names import TensorName, tensor_names
from jaxrl_llm.models.transformer import Network

# Keys that carry no information beyond the shape, or that `read_architecture` checks against it.
_KNOWN_KEYS = {
    "vocab_size",
    "rope.dimension_count",
    "attention.key_length",
    "attention.value_length",
}
_FAMILY_FIELDS: Mapping[str, Any] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
_ROPE_FACTORS_TENSOR = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file; tensors are read on access."""

    path: pathlib.Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    def format_error(self, problem: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"{self.path}: {problem}")


class _StrictGGUFReader(gguf.GGUFReader):
    """A reader that raises on truncated files, where the library's returns shorter arrays."""

    def _get(self, offset, dtype, count=1, override_order=None):
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise EOFError(f"cut short: it needs byte {end} of {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)


def open_file(path: str | pathlib.Path) -> GGUFFile:
    """The metadata fields and tensors of a file; reads no weights.

    Raises:
      CheckpointFormatError: If there is no such file, or it is damaged, cut short, one of several
        parts, or not a model.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise CheckpointFormatError(f"{path}: no such file; give a file that ends in .gguf")
    try:
        reader = _StrictGGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library raises many types on damaged files
        problem = f"not a complete GGUF file: {type(error).__name__}: {error}; copy it again"
        raise CheckpointFormatError(f"{path}: {problem}") from error
    file = GGUFFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise file.format_error("is big-endian; convert it with gguf-convert-endian")
    if (num_parts := fields.get("split.count", 1)) > 1:
        remedy = "join them with `llama-gguf-split --merge`"
        raise file.format_error(f"is one of {num_parts} parts of a model; {remedy}")
    if fields.get("general.type", "model") != "model":
        raise file.format_error(f"holds {fields['general.type']!r}, not a model")
    return file


def read_architecture(file: GGUFFile) -> Architecture:
    """The `Architecture` of the network in a file.

    Raises:
      CheckpointFormatError: On an unknown architecture, a missing number, or a field whose
        arithmetic is not implemented.
    """
    family = str(file.fields.get("general.architecture"))
    if family not in _FAMILY_FIELDS:
        raise file.format_error(f"architecture is {family!r}; known: {', '.join(_FAMILY_FIELDS)}")
    if "token_embd.weight" not in file.tensors:
        raise file.format_error("token_embd.weight is missing; is it a language model?")
    read_keys = set(_KNOWN_KEYS)

    def number(key: str, default: float | None = None) -> Any:
        read_keys.add(key)
        value = file.fields.get(f"{family}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise file.format_error(f"{family}.{key} is {value!r}; expected one number above 0")
        return value

    num_heads = number("attention.head_count")
    hidden_size = number("embedding_length")
    head_size = number(
        "attention.key_length", number("rope.dimension_count", hidden_size // num_heads)
    )
    for key in ("rope.dimension_count", "attention.value_length"):
        if number(key, head_size) != head_size:
            raise file.format_error(
                f"{family}.{key} is {number(key)}, but heads have {head_size}; only the same"
                " size is implemented"
            )
    theta = float(number("rope.freq_base", 10_000.0))
    shape = Architecture(
        family=family,
        vocab_size=int(file.tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden_size,
        num_layers=number("block_count"),
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv", num_heads),
        head_size=head_size,
        mlp_size=number("feed_forward_length"),
        max_positions=number("context_length"),
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, head_size, theta),
        # The shortest decimal of this float32: 1e-5 is stored as 0.00000999999974.
        norm_eps=float(str(np.float32(number("attention.layer_norm_rms_epsilon")))),
        **_FAMILY_FIELDS[family],
        tie_embeddings="output.weight" not in file.tensors,
    )
    for key, value in file.fields.items():
        is_unread = key.startswith(f"{family}.") and key.removeprefix(f"{family}.") not in read_keys
        if is_unread and value not in (0, "none"):
            raise file.format_error(f"{key} is {value!r:.80}; it is not implemented for {family}")
    return shape


def _rope_scaling(file: GGUFFile, head_size: int, theta: float) -> RopeScaling:
    """Llama 3's rotary scaling; the file holds its divisor of each frequency, not its settings.

    Among the settings only the factor differs between released models.
    """
    if _ROPE_FACTORS_TENSOR not in file.tensors:
        return RopeScaling()
    stored_factors = _dequantized_array(file.tensors[_ROPE_FACTORS_TENSOR])
    scaling = RopeScaling(factor=float(stored_factors.max()))
    frequencies, scaled_frequencies = (
        rotary_frequencies(head_size, theta, s) for s in (RopeScaling(), scaling)
    )
    expected_factors = np.asarray(frequencies / scaled_frequencies)
    # Both are float32, computed in a different order of operations.
    if stored_factors.shape != expected_factors.shape or not np.allclose(
        stored_factors, expected_factors, rtol=1e-4
    ):
        raise file.format_error(
            f"{_ROPE_FACTORS_TENSOR} is not Llama 3's scaling; no other is implemented"
        )
    return scaling


def tensor_reader(file: GGUFFile, network: Network, dtype: np.dtype) -> TensorReader:
    """A function that reads one tensor in a dtype and in the layout of a Hugging Face folder.

    Raises:
      CheckpointFormatError: If a tensor of the network is missing, has another shape or a type that
        cannot be read, or the file has a tensor that the network lacks.
    """
    num_layers = network.shape.num_layers
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    name_map = gguf.get_tensor_name_map(architectures[network.shape.family], num_layers)
    leaves = traverse_util.flatten_dict(network.abstract_params())
    tensors: dict[tuple[TensorName, int], gguf.ReaderTensor] = {}
    for name in tensor_names(network.shape):
        expected = name.stored_shape(leaves[name.path].shape)
        for layer, file_name in enumerate(name.file_names):
            key = name_map.get_name(file_name, try_suffixes=(".weight", ".bias"))
            tensor = file.tensors.get(key or "")
            if tensor is None:
                raise file.format_error(f"{key} ({file_name}) is missing; copy it again")
            if (stored_shape := tuple(tensor.shape[::-1].tolist())) != expected:
                raise file.format_error(f"{key} is {list(stored_shape)}, expected {list(expected)}")
            _check_readable(file, tensor)
            tensors[name, layer] = tensor
    known_names = {_ROPE_FACTORS_TENSOR, *(tensor.name for tensor in tensors.values())}
    if unknown := sorted(file.tensors.keys() - known_names):
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise file.format_error(f"{network.shape.family} has no {', '.join(unknown[:4])}{more}")

    def read(name: TensorName, layer: int, expert: int) -> np.ndarray:
        tensor = tensors[name, layer]
        array = _dequantized_array(tensor)
        if not np.isfinite(array).all():
            number = int((~np.isfinite(array)).sum())
            raise finite.NotFiniteError(
                f"{file.path}: {tensor.name} has {number} NaN or infinite numbers; the file is"
                " damaged, take another copy of it"
            )
        projection = name.path[-2] if len(name.path) > 1 else ""
        if network.shape.family == "llama" and projection in ("q", "k"):
            array = _split_half_rows(array, network.shape.head_size)
        return array.astype(dtype, copy=False)

    return read


def _dequantized_array(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def _check_readable(file: GGUFFile, tensor: gguf.ReaderTensor) -> None:
    first_row = tensor.data[:1]
    try:
        gguf.dequantize(first_row, tensor.tensor_type)
    except NotImplementedError as error:
        raise file.format_error(
            f"{tensor.name} is stored as {tensor.tensor_type.name}: {error}"
        ) from error


def _split_half_rows(array: np.ndarray, head_size: int) -> np.ndarray:
    """Query or key rows in the order of transformers: rotated pairs are half a head apart.

    llama.cpp stores the pairs side by side in models of the Llama family.
    """
    pairs = array.reshape(-1, head_size // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
