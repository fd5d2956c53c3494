"""Experts stacked in one file tensor: read as tensors of their own, or in their other layout."""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf.families import FAMILIES
from jaxrl_llm.models.hf.safetensors_file import DerivedTensor, StoredTensor, TensorToWrite

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclasses.dataclass(frozen=True)
class TransposedTensor(DerivedTensor):
    """A file tensor [E, out, in], read as [E, in, out]."""

    @property
    def readable(self) -> bool:
        return self.stored.readable

    @property
    def dtype_code(self) -> str:
        return self.stored.dtype_code

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, inputs = self.stored.shape
        return experts, inputs, outputs

    def __getitem__(self, block: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = block
        return np.asarray(self.stored.view()[experts, outputs, inputs]).swapaxes(1, 2)


def expert_tensors(
    stored: Mapping[str, StoredTensor], shape: Architecture
) -> dict[str, StoredTensor | TransposedTensor]:
    """The tensors of a folder, experts in the layout in which their family is read."""
    family = FAMILIES[shape.family]
    if family.stacks_experts:
        return {**split_experts(stored)}
    transposed = _transposed_experts(stored, shape) if family.transposes_experts else {}
    return {**stored, **transposed}


def written_experts(tensor: TensorToWrite, shape: Architecture) -> TensorToWrite:
    """A tensor in the layout in which transformers writes it: stacks of some families turned."""
    is_stack = _STACKED.fullmatch(tensor.name) and FAMILIES[shape.family].transposes_experts
    if not is_stack:
        return tensor
    experts, inputs, outputs = tensor.shape
    return dataclasses.replace(
        tensor,
        shape=(experts, outputs, inputs),
        contents=lambda: tensor.contents().swapaxes(1, 2),
    )


def _transposed_experts(
    stored: Mapping[str, StoredTensor], shape: Architecture
) -> dict[str, TransposedTensor]:
    """The experts of layers that are stored as [E, out, in].

    One tensor of a layer may be square, both never are: where one has the other layout, both have.
    """
    experts = shape.experts
    assert experts is not None
    transposed_shapes = {
        "gate_up_proj": (experts.num, 2 * experts.size, shape.hidden_size),
        "down_proj": (experts.num, shape.hidden_size, experts.size),
    }
    by_module: dict[str, dict[str, str]] = {}
    for name in stored:
        if match := _STACKED.fullmatch(name):
            by_module.setdefault(match[1], {})[match[2]] = name
    return {
        name: TransposedTensor(stored[name])
        for parts in by_module.values()
        if all(stored[name].shape == transposed_shapes[part] for part, name in parts.items())
        for name in parts.values()
    }


def split_experts(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a folder with `gate_up_proj` [E, 2 I, D] and `down_proj` [E, D, I] split.

    Their parts lie one behind the other in the file, so each expert's gate, up and down projection
    is a tensor within it. Others are unchanged.
    """
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        match = _STACKED.fullmatch(name)
        parts = ("gate_proj", "up_proj") if match and match[2] != "down_proj" else ("down_proj",)
        is_stack = tensor.readable and len(tensor.shape) == 3 and not tensor.shape[1] % len(parts)
        if match is None or not is_stack:
            tensors[name] = tensor
            continue
        experts, rows, columns = tensor.shape
        shape = (rows // len(parts), columns)
        size = (tensor.end - tensor.begin) // max(1, experts * len(parts))
        assert size * experts * len(parts) == tensor.dtype.itemsize * math.prod(tensor.shape)
        for number in range(experts * len(parts)):
            expert, part = divmod(number, len(parts))
            begin = tensor.begin + number * size
            own = f"{match[1]}.{expert}.{parts[part]}.weight"
            tensors[own] = dataclasses.replace(
                tensor, name=own, shape=shape, begin=begin, end=begin + size
            )
    return tensors
