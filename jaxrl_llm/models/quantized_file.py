"""Tensors that a model folder stores in few bits, read as the numbers they stand for.

Both kinds keep blocks of numbers with a scale each. Only the blocks that a device needs are read.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.models.family_table import CheckpointFormatError
from jaxrl_llm.models.safetensors_file import StoredTensor

_GROUP = 32  # numbers with one scale, in MXFP4
_EXPONENT_BIAS = 127  # of MXFP4's scales, which are powers of two
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of 4 bits; bit 3 is the sign
_NUMBERS = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """A tensor [E, in, out], stored as [E, out, in / 32, 16] bytes of two numbers each.

    The low half of a byte comes first (OCP Microscaling Formats 1.0, Sec. 5.3).
    """

    blocks: StoredTensor
    scales: StoredTensor  # [E, out, in / 32]: exponents of two
    readable = True
    code = "MXFP4"

    @property
    def file(self) -> pathlib.Path:
        return self.blocks.file

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, _ = self.blocks.shape
        return experts, groups * _GROUP, outputs

    def view(self) -> "Mxfp4":
        return self

    def __getitem__(self, block: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = block
        first, last = inputs.start // _GROUP, -(-inputs.stop // _GROUP)
        pairs = np.asarray(self.blocks.view()[experts, outputs, first:last])
        exponents = self.scales.view()[experts, outputs, first:last].astype(np.int32)
        numbers = _NUMBERS[np.stack([pairs & 15, pairs >> 4], -1)]  # [E, out, groups, 16, 2]
        groups = numbers.reshape(*pairs.shape[:3], _GROUP)
        scaled = np.ldexp(groups, exponents[..., None] - _EXPONENT_BIAS)
        wide = scaled.reshape(*pairs.shape[:2], -1).swapaxes(1, 2)
        return wide[:, inputs.start - first * _GROUP : inputs.stop - first * _GROUP]


@dataclasses.dataclass(frozen=True)
class Fp8:
    """A tensor [out, in] of 8-bit floats, with a factor for each block (arXiv:2412.19437, 3.3)."""

    numbers: StoredTensor
    scales: StoredTensor  # of blocks
    block_size: tuple[int, int]
    readable = True
    code = "F8_E4M3"

    @property
    def file(self) -> pathlib.Path:
        return self.numbers.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    def view(self) -> "Fp8":
        return self

    def __getitem__(self, block: tuple[slice, ...]) -> np.ndarray:
        rows, columns = (
            np.arange(size)[part] // step
            for part, size, step in zip(block, self.shape, self.block_size, strict=True)
        )
        factors = self.scales.view()[rows[:, None], columns].astype(np.float32)
        return self.numbers.view()[block].astype(np.float32) * factors


Tensor = StoredTensor | Mxfp4 | Fp8


def dequantized(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor], source: str
) -> dict[str, Tensor]:
    """Returns the tensors of a folder, quantized ones under the names of what they stand for.

    Raises:
      CheckpointFormatError: If numbers and scales do not fit each other.
    """
    found: dict[str, Tensor] = dict(stored)
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    for name, tensor in stored.items() if method == "mxfp4" else ():
        if name.endswith("_blocks"):
            whole = name.removesuffix("_blocks")
            scales = found.pop(f"{whole}_scales", None)
            shape = (*tensor.shape[:-1], _GROUP // 2)
            _check(source, name, tensor, "U8", shape, scales, "U8", shape[:-1])
            del found[name]
            found[whole] = Mxfp4(tensor, scales)  # type: ignore[arg-type]
    sizes = quantization.get("weight_block_size") or (128, 128)
    for name, tensor in stored.items() if method == "fp8" else ():
        if name.endswith("_scale_inv"):
            continue
        scales = found.pop(f"{name}_scale_inv", None)
        if scales is None:
            continue
        blocks = tuple(-(-n // size) for n, size in zip(tensor.shape, sizes, strict=False))
        code = "F8_E8M0" if scales.code == "F8_E8M0" else "F32"
        _check(source, name, tensor, "F8_E4M3", tensor.shape, scales, code, blocks)
        found[name] = Fp8(tensor, scales, (sizes[0], sizes[1]))  # type: ignore[arg-type]
    return found


def _check(source, name, tensor, code, shape, scales, code_of_scales, shape_of_scales) -> None:
    for what, part, kind, wanted in (
        (name, tensor, code, shape),
        (f"the scales of {name}", scales, code_of_scales, shape_of_scales),
    ):
        if part is None or (part.code, part.shape) != (kind, wanted):
            came = "missing" if part is None else f"{part.code}{list(part.shape)}"
            raise CheckpointFormatError(
                f"{source}: {what}: {came}, expected {kind}{list(wanted)}; copy the folder again,"
                " or use one of bfloat16 weights"
            )
