"""What the parameters of a network are called in files of weights, and how they lie there."""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from jaxrl_llm.models.family_table import FAMILIES
from jaxrl_llm.models.shape import Shape, Stack

# Modules of a block; a family may call them otherwise. What follows a name in a longer one stays.
_MODULES = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    **{f"attention.{ours}": f"self_attn.{ours}_proj" for ours in ("q", "k", "v", "o")},
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
    "mlp.shared": "mlp.shared_experts",
    "mlp.expert.gate": "mlp.experts.{}.gate_proj",
    "mlp.expert.up": "mlp.experts.{}.up_proj",
    "mlp.expert.down": "mlp.experts.{}.down_proj",
}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One parameter of the network, and the tensors of a file that hold it.

    A tensor is [out, in] if `transposed`, and may hold several parameters side by side, each a
    part of its outputs.
    """

    path: tuple[str, ...]  # keys into the parameter tree
    name: str  # "{}" stands for the layer where the parameter is stacked, then for the expert
    transposed: bool = False  # [out, in] in the file, [in, out] in the tree
    numbers: tuple[int, ...] = ()  # of the layers that are stacked
    experts: int = 0  # of a layer, each in a tensor of its own; 0: one tensor for each layer
    part: int = 0
    parts: int = 1
    interleaved: bool = False  # parts take turns
    wide: bool = False  # float32 in every file

    @property
    def stacked(self) -> bool:
        return "layers" in self.path[:2]

    @property
    def file_names(self) -> list[str]:
        """The names in a file: by layer and expert, or a single one."""
        if not self.stacked:
            return [self.name]
        return [self.name.format(i, e) for i in self.numbers for e in range(self.experts or 1)]

    @property
    def num_leading(self) -> int:
        """Dims of the parameter that the tensors of a file do not have."""
        return self.stacked + (self.experts > 0)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of each tensor in a file for that of the parameter."""
        *inner, outputs = shape[self.num_leading :]
        stored = (*inner, outputs * self.parts)
        return stored[::-1] if self.transposed else stored

    def stored_block(self, block: tuple[slice, ...], stored: tuple[int, ...]) -> tuple[slice, ...]:
        """Returns where a block of the parameter lies in tensors of the shape `stored`."""
        *inner, outputs = block
        if self.interleaved:
            first, step = outputs.start * self.parts + self.part, self.parts
            outputs = slice(first, outputs.stop * self.parts, step)
        elif self.parts > 1:
            offset = self.part * (stored[0 if self.transposed else -1] // self.parts)
            outputs = slice(outputs.start + offset, outputs.stop + offset)
        found = (*inner, outputs)
        return found[::-1] if self.transposed else found

    def joined(self, pieces: list[np.ndarray]) -> np.ndarray:
        """Returns the tensor of a file that holds such parts."""
        axis = 0 if self.transposed else -1
        if not self.interleaved:
            return np.concatenate(pieces, axis)
        return np.stack(pieces, -1).reshape(*pieces[0].shape[:-1], -1)


def tensor_names(shape: Shape, head: str = "lm") -> tuple[TensorName, ...]:
    """Returns every parameter of a network with its name in a Hugging Face file."""
    names = [TensorName(("embed",), "model.embed_tokens.weight")]
    for stack in shape.stacks.values():
        names += _of_stack(shape, stack)
    names.append(TensorName(("norm", "scale"), "model.norm.weight"))
    names += _of_tower(shape)
    if head == "scalar":
        names.append(TensorName(("score",), "score.weight"))
    elif not shape.tie_embeddings:
        names.append(TensorName(("head",), "lm_head.weight"))
    return tuple(names)


def _of_tower(shape: Shape) -> Iterator[TensorName]:
    if shape.vision is None:
        return
    ends = {"merge_in": "merger.mlp.0", "merge_out": "merger.mlp.2"}
    yield TensorName(("vision", "patch"), "visual.patch_embed.proj.weight")
    yield TensorName(("vision", "norm", "scale"), "visual.merger.ln_q.weight")
    for ours, theirs in ends.items():
        yield TensorName(("vision", ours, "kernel"), f"visual.{theirs}.weight", transposed=True)
        yield TensorName(("vision", ours, "bias"), f"visual.{theirs}.bias")
    layers = tuple(range(shape.vision.num_layers))
    modules = {
        "o": "attn.proj",
        **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    places = [(ours, theirs, 0, 1) for ours, theirs in modules.items()]
    places += [(ours, "attn.qkv", part, 3) for part, ours in enumerate("qkv")]
    for ours, theirs in {"attention_norm": "norm1", "mlp_norm": "norm2"}.items():
        scale = ("vision", "layers", ours, "scale")
        yield TensorName(scale, f"visual.blocks.{{}}.{theirs}.weight", numbers=layers)
    for ours, theirs, part, parts in places:
        for leaf in ("kernel", "bias"):
            keys = ("vision", "layers", *ours.split("."), leaf)
            name = f"visual.blocks.{{}}.{theirs}.{_LEAVES[leaf]}"
            yield TensorName(keys, name, leaf == "kernel", layers, part=part, parts=parts)


def _of_stack(shape: Shape, stack: Stack) -> Iterator[TensorName]:
    """Yields the parameters of equal layers."""
    family = FAMILIES[shape.family]
    modules = {**_MODULES, **family.modules}

    def found(module: str) -> str:
        if module in modules:
            return modules[module]
        above, _, last = module.rpartition(".")
        projection = last in ("gate", "up", "gate_up", "down")
        return f"{modules.get(above, above)}.{last}{'_proj' if projection else ''}"

    def name(path: str, leaf: str, module: str = "", **where) -> TensorName:
        keys = ("layers", stack.name, *path.split("."), leaf)
        theirs = f"model.layers.{{}}.{found(module or path)}.{_LEAVES.get(leaf, leaf)}"
        return TensorName(keys, theirs, leaf == "kernel", stack.numbers, **where)

    def mlp(path: str, fused: bool = False) -> Iterator[TensorName]:
        for i, ours in enumerate(("gate", "up")):
            if fused:
                yield name(f"{path}.{ours}", "kernel", f"{path}.gate_up", part=i, parts=2)
            else:
                yield name(f"{path}.{ours}", "kernel")
        yield name(f"{path}.down", "kernel")

    yield name("attention_norm", "scale")
    yield from _of_attention(shape, name)
    if shape.post_norms:
        yield name("attention_post_norm", "scale")
    yield name("mlp_norm", "scale")
    if not stack.layer.experts:
        yield from mlp("mlp", family.fused_mlp)
    else:
        yield from _of_experts(shape, name)
        assert shape.experts is not None
        if shape.experts.shared_size:
            yield from mlp("mlp.shared")
    if shape.post_norms:
        yield name("mlp_post_norm", "scale")


def _of_attention(shape: Shape, name) -> Iterator[TensorName]:
    if shape.latent:
        if shape.latent.q_rank:
            yield name("attention.q_a", "kernel")
            yield name("attention.q_norm", "scale")
            yield name("attention.q_b", "kernel")
        else:
            yield name("attention.q", "kernel")
        yield name("attention.kv_a", "kernel")
        yield name("attention.kv_norm", "scale")
        yield name("attention.kv_b", "kernel")
        yield name("attention.o", "kernel")
        return
    for ours in "qkvo":
        yield name(f"attention.{ours}", "kernel")
        if shape.o_bias if ours == "o" else shape.qkv_bias:
            yield name(f"attention.{ours}", "bias")
    if shape.qk_norm:
        yield name("attention.q_norm", "scale")
        yield name("attention.k_norm", "scale")
    if shape.sinks:
        yield name("attention", "sinks")


def _of_experts(shape: Shape, name) -> Iterator[TensorName]:
    experts, fused = shape.experts, FAMILIES[shape.family].fused_experts
    assert experts is not None
    yield name("mlp.router", "kernel")
    if experts.bias:
        yield name("mlp.router", "bias")
    if experts.selection_bias:
        bias = name("mlp.router", "selection_bias")
        theirs = bias.name.replace("selection_bias", "e_score_correction_bias")
        yield dataclasses.replace(bias, name=theirs, wide=True)
    for i, ours in enumerate(("gate", "up", "down")):
        if not fused:
            yield name(f"mlp.{ours}", "kernel", f"mlp.expert.{ours}", experts=experts.num)
            continue
        together = {"part": i, "parts": 2, "interleaved": fused == "interleaved"}
        where = together if ours != "down" else {}
        module = "mlp.expert.gate_up" if ours != "down" else "mlp.expert.down"
        whole = name(f"mlp.{ours}", "kernel", module, **where)
        theirs = whole.name.removesuffix(".weight")
        yield dataclasses.replace(whole, name=theirs, transposed=False)
        if experts.bias:
            path = (*whole.path[:-1], "bias")
            yield dataclasses.replace(whole, path=path, name=theirs + "_bias", transposed=False)


def may_be_unused(name: str, shape: Shape, head: str) -> bool:
    """Returns whether this network needs no such tensor.

    A tied or scalar head does not use a stored output projection; rotary frequencies, which old
    writers stored, follow from the config; layers that predict further tokens are left out. What
    reads no images needs no tower.
    """
    if name == "lm_head.weight":
        return head == "scalar" or shape.tie_embeddings
    if name.startswith("visual."):
        return shape.vision is None
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer and FAMILIES[shape.family].extra_layers:
        return int(layer[1]) >= shape.num_layers
    return name.endswith("rotary_emb.inv_freq")
