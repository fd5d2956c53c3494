"""Quantized checkpoint tensors (MXFP4, FP8), dequantized while they are read.

Both formats store blocks of numbers with one scale each. Only the blocks that a device needs are
read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.models.hf.family_format import CheckpointFormatError
from jaxrl_llm.models.hf.safetensors_file import DerivedTensor, StoredTensor
from jaxrl_llm.models.hf.stacked_experts import TransposedTensor

_MXFP4_GROUP = 32  # numbers per scale
_EXPONENT_BIAS = 127  # of the MXFP4 scales, which are powers of two
_FP4_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; bit 3 is the sign
_FP4_VALUES = np.array([*_FP4_POSITIVE, *(-x for x in _FP4_POSITIVE)], np.float32)


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor(DerivedTensor):
    """An MXFP4 tensor [E, in, out], stored as [E, out, in / 32, 16] bytes of two numbers each.

    The low half of a byte comes first (OCP Microscaling Formats 1.0, Sec. 5.3).
    """

    scales: StoredTensor  # [E, out, in / 32]: exponents of two
    readable = True
    dtype_code = "MXFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, _ = self.stored.shape
        return experts, groups * _MXFP4_GROUP, outputs

    def __getitem__(self, block: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = block
        first_group, end_group = inputs.start // _MXFP4_GROUP, -(-inputs.stop // _MXFP4_GROUP)
        packed = np.asarray(self.stored.view()[experts, outputs, first_group:end_group])
        exponents = self.scales.view()[experts, outputs, first_group:end_group].astype(np.int32)
        values = _FP4_VALUES[np.stack([packed & 15, packed >> 4], -1)]  # [E, out, groups, 16, 2]
        groups = values.reshape(*packed.shape[:3], _MXFP4_GROUP)
        scaled = np.ldexp(groups, exponents[..., None] - _EXPONENT_BIAS)
        rows = scaled.reshape(*packed.shape[:2], -1).swapaxes(1, 2)
        return rows[
            :, inputs.start - first_group * _MXFP4_GROUP : inputs.stop - first_group * _MXFP4_GROUP
        ]


@dataclasses.dataclass(frozen=True)
class Fp8Tensor(DerivedTensor):
    """A tensor [out, in] of 8-bit floats with a scale per block (arXiv:2412.19437, Sec. 3.3)."""

    scales: StoredTensor  # one per block
    block_size: tuple[int, int]
    readable = True
    dtype_code = "F8_E4M3"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def __getitem__(self, block: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (
            np.arange(size)[span] // block_length
            for span, size, block_length in zip(block, self.shape, self.block_size, strict=True)
        )
        factors = self.scales.view()[rows[:, None], columns].astype(np.float32)
        return self.stored.view()[block].astype(np.float32) * factors


CheckpointTensor = StoredTensor | TransposedTensor | Mxfp4Tensor | Fp8Tensor


def dequantized_tensors(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor | TransposedTensor], source: str
) -> dict[str, CheckpointTensor]:
    """The tensors of a folder, with quantized pairs combined under the name of their weight.

    Raises:
      CheckpointFormatError: If quantized numbers and scales do not match.
    """
    tensors: dict[str, CheckpointTensor] = dict(stored)
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    for name, tensor in stored.items() if method == "mxfp4" else ():
        if name.endswith("_blocks"):
            weight_name = name.removesuffix("_blocks")
            scales = tensors.pop(f"{weight_name}_scales", None)
            shape = (*tensor.shape[:-1], _MXFP4_GROUP // 2)
            _check_pair(
                source=source,
                name=name,
                tensor=tensor,
                code="U8",
                shape=shape,
                scales=scales,
                scales_code="U8",
                scales_shape=shape[:-1],
            )
            del tensors[name]
            tensors[weight_name] = Mxfp4Tensor(tensor, scales)  # type: ignore[arg-type]
    sizes = quantization.get("weight_block_size") or (128, 128)
    for name, tensor in stored.items() if method == "fp8" else ():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.pop(f"{name}_scale_inv", None)
        if scales is None:
            continue
        blocks = tuple(-(-n // size) for n, size in zip(tensor.shape, sizes, strict=False))
        code = "F8_E8M0" if scales.dtype_code == "F8_E8M0" else "F32"
        _check_pair(
            source=source,
            name=name,
            tensor=tensor,
            code="F8_E4M3",
            shape=tensor.shape,
            scales=scales,
            scales_code=code,
            scales_shape=blocks,
        )
        tensors[name] = Fp8Tensor(tensor, scales, (sizes[0], sizes[1]))  # type: ignore[arg-type]
    return tensors


def _check_pair(source, name, tensor, code, shape, scales, scales_code, scales_shape) -> None:
    for label, component, expected_dtype, expected_shape in (
        (name, tensor, code, shape),
        (f"the scales of {name}", scales, scales_code, scales_shape),
    ):
        if component is None or (component.dtype_code, component.shape) != (
            expected_dtype,
            expected_shape,
        ):
            actual = (
                "missing" if component is None else f"{component.dtype_code}{list(component.shape)}"
            )
            raise CheckpointFormatError(
                f"{source}: {label}: {actual}, expected {expected_dtype}{list(expected_shape)};"
                " copy the folder again, or use one of bfloat16 weights"
            )
