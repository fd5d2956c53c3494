"""Reads the weights of a model in vLLM back, as tensors of a Hugging Face checkpoint.

vLLM joins projections, and on CPU keeps only packed copies of them. There a matrix is read by
multiplying the identity with it, which is exact.
"""

from collections.abc import Mapping
from typing import Any

import torch

# Joined module -> its parts, if the model does not tell them.
_PACKED: Mapping[str, list[str]] = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


def compare(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Compares a model's weights with tensors of a checkpoint, on one device.

    Returns `num_compared`, `differing` (largest difference by name) and the names `skipped`, whose
    modules cannot be read.
    """
    packed = {**_PACKED, **(getattr(model, "packed_modules_mapping", None) or {})}
    whole_by_part = {part: whole for whole, parts in packed.items() for part in parts}
    modules = dict(model.named_modules())
    differing: dict[str, float] = {}
    skipped: list[str] = []
    for name, expected in tensors.items():
        module_name, _, leaf = name.rpartition(".")
        parent, _, own_name = module_name.rpartition(".")
        start, joined_name = 0, module_name
        if module_name not in modules and own_name in whole_by_part:
            whole = whole_by_part[own_name]
            joined_name = f"{parent}.{whole}"
            for part in packed[whole][: packed[whole].index(own_name)]:
                start += tensors[f"{parent}.{part}.{leaf}"].shape[0]
        module = modules.get(joined_name)
        read = None if module is None else _leaf(module, leaf, expected)
        if read is None:
            skipped.append(name)
            continue
        read = read[start : start + expected.shape[0]].cpu()
        if not torch.equal(read, expected.to(read.dtype)):
            difference = (read.double() - expected.double()).abs().max()
            differing[name] = float(difference)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    if (read := _head(model, head)) is not None and not torch.equal(read, head.to(read.dtype)):
        differing["logits"] = float((read.double() - head.double()).abs().max())
    return {
        "num_compared": len(tensors) - len(skipped),
        "differing": differing,
        "skipped": skipped,
    }


@torch.no_grad()
def _leaf(module: torch.nn.Module, leaf: str, expected: torch.Tensor) -> torch.Tensor | None:
    """A parameter of a module in the layout of the checkpoint, None if it has none."""
    parameter = getattr(module, leaf, None)
    if parameter is None:
        return None
    if parameter.numel():
        return parameter.detach()
    method = getattr(module, "quant_method", None)  # its weight is packed
    if method is None or expected.ndim != 2:
        return None
    device = parameter.device
    identity = torch.eye(expected.shape[1], dtype=expected.dtype, device=device)
    return method.apply(module, identity, bias=None).T


@torch.no_grad()
def _head(model: Any, expected: torch.Tensor) -> torch.Tensor | None:
    """The output projection as the model computes logits with it."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if head is None or method is None:
        return None
    identity = torch.eye(expected.shape[1], dtype=expected.dtype, device=head.weight.device)
    return method.apply(head, identity, bias=None).T[: expected.shape[0]].cpu()
