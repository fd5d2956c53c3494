"""Experts stacked in one file tensor, read as tensors of their own."""

import dataclasses
import math
import re
from collections.abc import Mapping

from jaxrl_llm.models.hf.safetensors_file import StoredTensor

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


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
