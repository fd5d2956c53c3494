"""Writes models as GGUF files, which llama.cpp and Ollama run; one tensor at a time.

Metadata keys, tensor names and layouts are those of llama.cpp's `convert_hf_to_gguf.py`.
`gguf_file` reads the files. Needs the extra [gguf].
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import gguf
import jax
import numpy as np
from flax import traverse_util
from gguf import GGMLQuantizationType, LlamaFileType
from jax.experimental import multihost_utils

from jaxrl_llm.models import finite
from jaxrl_llm.models.architecture import Architecture, RopeScaling
from jaxrl_llm.models.attention_modules import rotary_frequencies
from jaxrl_llm.models.hf.checkpoint import TensorReader
from jaxrl_llm.models.hf.families import yarn_mscale
from jaxrl_llm.models.hf.family_format import CheckpointFormatError
from jaxrl_llm.models.hf.tensor_names import TensorName, tensor_names
from jaxrl_llm.models.transformer import Network

WeightType = Literal["f16", "bf16", "q8_0"]

_WEIGHT_TYPES: Mapping[WeightType, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
# Family -> `general.architecture`. llama.cpp has one architecture for all of Llama's descendants.
_ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
_WINDOW_PERIODS: Mapping[str, int] = {"gemma2": 2, "gemma3_text": 6}  # the last layer is full
# Layers of the models whose scores llama.cpp scales by hidden size and heads.
_LARGEST_GEMMA_LAYERS: Mapping[str, int] = {"gemma2": 46, "gemma3_text": 62}
_QUANTIZED_BLOCK = 32  # numbers of a row that share a scale
_ALWAYS_FLOAT32 = "ffn_gate_inp.weight"
_MAGIC = b"GGUF"


@dataclasses.dataclass(frozen=True)
class _GGUFTensor:
    """A tensor to write: its shape in numpy's order, and how to read it as float32."""

    name: str
    weight_type: GGMLQuantizationType
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def stored_bytes_shape(self) -> tuple[int, ...]:
        return gguf.quant_shape_to_byte_shape(self.shape, self.weight_type)

    def checked(self, path: pathlib.Path) -> np.ndarray:
        """The numbers in float32; raises if one is not finite, or too large for float16."""
        array = np.ascontiguousarray(self.read(), np.float32)
        largest = float(np.abs(array).max(initial=0.0))
        if not np.isfinite(largest):
            raise finite.NotFiniteError(
                f"{path}: {self.name} has NaN or infinite numbers; export another checkpoint"
            )
        limit = float(np.finfo(np.float16).max)
        if self.weight_type == GGMLQuantizationType.F16 and largest > limit:
            raise CheckpointFormatError(
                f"{path}: {self.name} has numbers up to {largest:.4g}, float16 ends at"
                f" {limit:.0f}; export with --gguf_type=bf16"
            )
        return array


def check(network: Network) -> None:
    """Raises CheckpointFormatError, with all reasons, if llama.cpp would compute otherwise."""
    if problems := list(_problems(network)):
        raise CheckpointFormatError(
            f"no GGUF file can hold this {network.shape.family} model: {'; '.join(problems)};"
            " export it with --format=hf"
        )


def check_replaceable(path: pathlib.Path) -> None:
    """Raises CheckpointFormatError if something other than a GGUF file is in the way."""
    if path.is_dir():
        raise CheckpointFormatError(f"{path}: is a folder; name a file that ends in .gguf")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise CheckpointFormatError(f"{path}: exists and is no GGUF file; name another")


def save(
    path: str | os.PathLike[str],
    network: Network,
    read_tensor: TensorReader,
    tokenizer_fields: Mapping[str, Any],
    *,
    weight_type: WeightType = "f16",
    general_fields: Mapping[str, Any],
) -> None:
    """Writes a model as one GGUF file, which appears whole or not at all.

    On several hosts every process must call this; process 0 writes. Vectors, norms and routers are
    float32, as llama.cpp's converter stores them; with "q8_0" a matrix whose rows are no multiple
    of 32 is float16.

    Args:
      read_tensor: Reads a tensor in float32, in the layout of a Hugging Face folder.
      tokenizer_fields: Of `gguf_tokenizer.to_fields`, for `network.shape.vocab_size` tokens.
      weight_type: Of matrices. "q8_0" has 8 bits a weight and a float16 scale for 32 of them.
      general_fields: `general.*` beside architecture, type and sizes: name, license.

    Raises:
      CheckpointFormatError: If llama.cpp would compute otherwise, a number exceeds float16, or
        something other than a GGUF file is at `path`.
      NotFiniteError: If a number is NaN or infinite.
    """
    path = pathlib.Path(path)
    check(network)
    check_replaceable(path)
    tensors = list(_tensors(network, read_tensor, _WEIGHT_TYPES[weight_type][0]))
    if jax.process_index() == 0:
        fields = {
            **_general_fields(network, tensors, general_fields),
            **architecture_fields(network.shape),
            "general.quantization_version": gguf.GGML_QUANT_VERSION,
            "general.file_type": int(_WEIGHT_TYPES[weight_type][1]),
            **tokenizer_fields,
        }
        _write_file(path, _ARCHITECTURES[network.shape.family], fields, tensors)
    else:
        for tensor in tensors:
            tensor.checked(path)  # a collective: gathering needs every process
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"export to {path}")


def architecture_fields(shape: Architecture) -> dict[str, Any]:
    """The metadata of a network: sizes and settings, by llama.cpp's keys."""
    scaling = shape.rope_scaling
    windows = {layer.window for layer in shape.layer_types} - {0}
    keys: dict[str, Any] = {
        "block_count": shape.num_layers,
        "context_length": _context_length(shape),
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.mlp_size,
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": shape.num_kv_heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": float(shape.norm_eps),
        "rope.freq_base": float(shape.rope_theta),
    }
    if scaling.factor != 1.0 and scaling.kind != "llama3":  # that is a tensor
        keys |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": float(scaling.factor)}
    if scaling.factor != 1.0 and scaling.kind == "yarn":
        keys["rope.scaling.original_context_length"] = scaling.original_max_positions
        keys["rope.scaling.yarn_beta_fast"] = float(scaling.fast_turns)
        keys["rope.scaling.yarn_beta_slow"] = float(scaling.slow_turns)
    if _ARCHITECTURES[shape.family] == "llama":
        keys |= {"vocab_size": shape.vocab_size, "rope.dimension_count": shape.head_size}
    if shape.family in _WINDOW_PERIODS:
        keys["attention.sliding_window"] = max(windows)
    if shape.family == "gemma3_text":
        keys["rope.freq_base_swa"] = float(shape.local_rope_theta)
    for key, cap in {"attn": shape.score_cap, "final": shape.logit_cap}.items():
        if cap:
            keys[f"{key}_logit_softcapping"] = float(cap)
    if shape.experts:
        keys |= {"expert_count": shape.experts.num, "expert_used_count": shape.experts.per_token}
    if shape.experts and shape.family == "qwen3_moe":
        keys["expert_feed_forward_length"] = shape.experts.size
    return {f"{_ARCHITECTURES[shape.family]}.{key}": value for key, value in keys.items()}


def _context_length(shape: Architecture) -> int:
    """The longest context that llama.cpp computes as the model does.

    Its Llama architecture has no sliding window: within one, attention is the same.
    """
    windows = {layer.window for layer in shape.layer_types}
    if shape.family in ("mistral", "mixtral") and max(windows):
        return min(shape.max_positions, max(windows))
    return shape.max_positions


def _problems(network: Network) -> Iterator[str]:
    """Yields each reason why llama.cpp cannot hold the model, or would compute otherwise."""
    shape = network.shape
    if network.head != "lm":
        yield "it is a reward model, without a head that samples tokens"
    if shape.vision is not None:
        yield "it reads images, and llama.cpp keeps the vision encoder in another file"
    if shape.family not in _ARCHITECTURES:
        yield f"the families that are written are {', '.join(_ARCHITECTURES)}"
        return
    yield from _layer_problems(shape)
    yield from _rope_problems(shape)
    score_scale = shape.query_scale or shape.head_size**-0.5
    expected_scale = shape.head_size**-0.5
    if shape.num_layers == _LARGEST_GEMMA_LAYERS.get(shape.family):
        expected_scale = (shape.hidden_size // shape.num_heads) ** -0.5
    if not math.isclose(score_scale, expected_scale, rel_tol=1e-6):
        yield f"it scales scores by {score_scale:.6g}, llama.cpp by {expected_scale:.6g}"
    if shape.experts and not shape.experts.normalized:
        yield "its expert weights are not normalized (norm_topk_prob), llama.cpp normalizes them"
    if shape.family == "gemma2" and not shape.tie_embeddings:
        yield "it has an output projection, llama.cpp uses the embedding"
    if shape.family == "gemma3_text" and shape.score_cap:
        yield "it caps attention scores (attn_logit_softcapping), llama.cpp does not"


def _layer_problems(shape: Architecture) -> Iterator[str]:
    layers = shape.layer_types
    if shape.experts and not all(layer.experts for layer in layers):
        yield "some layers have experts and others none, in llama.cpp all have"
    if period := _WINDOW_PERIODS.get(shape.family):
        expected = [(number + 1) % period > 0 for number in range(shape.num_layers)]
        if [layer.window > 0 for layer in layers] != expected:
            yield f"in llama.cpp every layer but each {period}th has a sliding window"
        elif len({layer.window for layer in layers}) > 2:
            yield "its layers have different sliding windows"
    elif shape.family not in ("mistral", "mixtral") and any(layer.window for layer in layers):
        yield "it has sliding windows, llama.cpp's architecture none"


def _rope_problems(shape: Architecture) -> Iterator[str]:
    scaling = shape.rope_scaling
    if scaling.factor == 1.0:
        return
    if scaling.kind == "llama3" and _ARCHITECTURES[shape.family] != "llama":
        yield "it has Llama 3's rotary scaling, which llama.cpp reads in Llama models only"
    if scaling.kind == "yarn":
        magnitude = yarn_mscale(scaling.factor, 1.0)
        if not math.isclose(scaling.magnitude, magnitude, rel_tol=1e-6):
            yield f"its YaRN scales by {scaling.magnitude:.6g}, llama.cpp by {magnitude:.6g}"
        if not scaling.whole_dims:
            yield "its YaRN does not round to whole dims (truncate), llama.cpp does"


def _tensors(
    network: Network, read_tensor: TensorReader, matrix_type: GGMLQuantizationType
) -> Iterator[_GGUFTensor]:
    """All tensors of a file, layer by layer."""
    shape = network.shape
    architecture = _ARCHITECTURES[shape.family]
    architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    name_map = gguf.get_tensor_name_map(architectures[architecture], shape.num_layers)
    leaves = traverse_util.flatten_dict(network.abstract_params())
    tensors: list[tuple[int, _GGUFTensor]] = []
    for name in tensor_names(shape):
        stored_shape = name.stored_shape(leaves[name.path].shape)
        if name.experts:
            stored_shape = (name.experts, *stored_shape)
        for layer in name.layers if name.is_stacked else (0,):
            file_name = name.name.format(layer, 0)
            if name.experts:
                key = f"blk.{layer}.ffn_{name.path[-2]}_exps.weight"
            else:
                key = name_map.get_name(file_name, try_suffixes=(".weight", ".bias")) or ""
            assert key and name.parts == 1, f"{file_name} has no name in {architecture}"
            entry = _GGUFTensor(
                name=key,
                weight_type=_stored_type(key, stored_shape, matrix_type),
                shape=stored_shape,
                read=_reader(shape, read_tensor, name, layer),
            )
            tensors.append((layer if name.is_stacked else -1, entry))
    if shape.rope_scaling.factor != 1.0 and shape.rope_scaling.kind == "llama3":
        factors = _rope_factors(shape)
        yield _GGUFTensor(
            "rope_freqs.weight", GGMLQuantizationType.F32, factors.shape, lambda: factors
        )
    yield from (entry for _, entry in sorted(tensors, key=lambda pair: pair[0]))


def _reader(
    shape: Architecture, read_tensor: TensorReader, name: TensorName, layer: int
) -> Callable[[], np.ndarray]:
    """Reads one tensor in the layout of llama.cpp; all experts of a layer at once."""
    projection = name.path[-2] if len(name.path) > 1 else ""
    is_paired = _ARCHITECTURES[shape.family] == "llama" and projection in ("q", "k")

    def read() -> np.ndarray:
        if name.experts:
            return np.stack([read_tensor(name, layer, e) for e in range(name.experts)])
        array = read_tensor(name, layer, 0)
        if is_paired:
            return _paired_rows(array, shape.head_size)
        if name.path[-1] == "scale" and shape.norm_offset:
            return array.astype(np.float32) + np.float32(shape.norm_offset)
        return array

    return read


def _paired_rows(array: np.ndarray, head_size: int) -> np.ndarray:
    """Query or key rows with those that rotate together side by side, as in Llama's own files."""
    halves = array.reshape(-1, 2, head_size // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _rope_factors(shape: Architecture) -> np.ndarray:
    """Llama 3's rotary scaling: the divisor of each frequency."""
    plain, scaled = (
        np.asarray(rotary_frequencies(shape.head_size, shape.rope_theta, scaling))
        for scaling in (RopeScaling(), shape.rope_scaling)
    )
    return (plain / scaled).astype(np.float32)


def _stored_type(
    name: str, shape: tuple[int, ...], matrix_type: GGMLQuantizationType
) -> GGMLQuantizationType:
    is_small = len(shape) == 1 or name.endswith(("_norm.weight", _ALWAYS_FLOAT32))
    if is_small:
        return GGMLQuantizationType.F32
    if matrix_type == GGMLQuantizationType.Q8_0 and shape[-1] % _QUANTIZED_BLOCK:
        return GGMLQuantizationType.F16
    return matrix_type


def _general_fields(
    network: Network, tensors: Iterable[_GGUFTensor], fields: Mapping[str, Any]
) -> dict[str, Any]:
    sizes = {tensor.name: math.prod(tensor.shape) for tensor in tensors}
    expert_sizes = {name: size for name, size in sizes.items() if name.endswith("_exps.weight")}
    num_experts = network.shape.experts.num if network.shape.experts else 0
    total, of_experts = sum(sizes.values()), sum(expert_sizes.values())
    per_expert = of_experts // num_experts if num_experts else 0
    label = gguf.size_label(total, total - of_experts, per_expert, num_experts)
    return {"general.type": "model", **fields, "general.size_label": label}


def _write_file(
    path: pathlib.Path,
    architecture: str,
    fields: Mapping[str, Any],
    tensors: list[_GGUFTensor],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    writer = gguf.GGUFWriter(partial, architecture)
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        str: writer.add_string,
        list: writer.add_array,
        float: writer.add_float32,
        int: writer.add_uint32,
    }
    for key, value in fields.items():
        adders[type(value)](key, value)
    for tensor in tensors:
        stored_shape = tensor.stored_bytes_shape
        writer.add_tensor_info(
            tensor.name,
            stored_shape,
            np.dtype(np.uint8),
            math.prod(stored_shape),
            raw_dtype=tensor.weight_type,
        )
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            array = gguf.quantize(tensor.checked(path), tensor.weight_type)
            writer.write_tensor_data(array.view(np.uint8))
        writer.close()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
