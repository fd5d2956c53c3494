"""Maps the parameters of a network to tensor names and layouts in Hugging Face checkpoints."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.models.architecture import (
    Architecture,
    LayerStack,
    LayerType,
    VisionArchitecture,
)
from jaxrl_llm.models.hf.families import FAMILIES

# Modules of a block; a family may override them. An unlisted submodule keeps its own name.
_MODULES = {
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    **{f"attention.{ours}": f"self_attn.{ours}_proj" for ours in ("q", "k", "v", "o", "qkv")},
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
    "attention.indexer": "self_attn.indexer",
    "attention.indexer.q": "self_attn.indexer.wq_b",
    "attention.indexer.k": "self_attn.indexer.wk",
    "attention.indexer.weights": "self_attn.indexer.weights_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.router": "mlp.gate",
    "mlp.router.selection": "mlp.gate",  # the module that has the selection bias
    "mlp.shared": "mlp.shared_experts",
    "mlp.expert.gate": "mlp.experts.{}.gate_proj",
    "mlp.expert.up": "mlp.experts.{}.up_proj",
    "mlp.expert.down": "mlp.experts.{}.down_proj",
}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One parameter of the network and the file tensors that hold it.

    A tensor is [out, in] if `transposed`, and may fuse several parameters along its outputs: equal
    ones side by side or `interleaved`, or groups of outputs of each in turn (`widths`).
    """

    path: tuple[str, ...]  # keys into the parameter tree
    name: str  # a format: "{}" is the layer of a stacked parameter, then the expert
    transposed: bool = False  # [out, in] in the file, [in, out] in the tree
    layers: tuple[int, ...] = ()  # indices of the stacked layers
    experts: int = 0  # per layer, one tensor each; 0: one tensor per layer
    part: int = 0  # position in a fused tensor
    parts: int = 1  # parameters in the tensor
    part_sizes: tuple[int, ...] = ()  # their outputs; (): all the same
    interleaved: bool = False  # fused outputs alternate instead of being concatenated
    widths: tuple[int, ...] = ()  # outputs of each part in a group of fused outputs; (): equal
    keep_float32: bool = False  # float32 in every file

    @property
    def is_stacked(self) -> bool:
        return "layers" in self.path[:2]

    @property
    def file_names(self) -> list[str]:
        """Names of the file tensors: one per layer and expert, or a single one."""
        if not self.is_stacked:
            return [self.name]
        return [self.name.format(i, e) for i in self.layers for e in range(self.experts or 1)]

    @property
    def num_leading_dims(self) -> int:
        """Leading dims (layers, experts) that the parameter has and the file tensors lack."""
        return self.is_stacked + (self.experts > 0)

    def transpose_stored(self, array: Any) -> Any:
        """A file tensor in the layout of the parameter, or the other way round."""
        return array.T if self.transposed else array

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each file tensor, from the shape of the parameter."""
        *inner, outputs = shape[self.num_leading_dims :]
        num_fused = sum(self.part_sizes) or outputs * self.parts
        if self.widths:
            num_fused = outputs // self.widths[self.part] * sum(self.widths)
        stored = (*inner, num_fused)
        return stored[::-1] if self.transposed else stored

    def stored_slices(self, block: tuple[slice, ...], stored: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices of a file tensor of shape `stored` that hold a block of the parameter.

        They may hold more, see `parameter_block`: the groups of `widths` are read whole.
        """
        *inner, outputs = block
        if self.widths:
            first, last = self._groups(outputs)
            outputs = slice(first * sum(self.widths), last * sum(self.widths))
        elif self.interleaved:
            first, step = outputs.start * self.parts + self.part, self.parts
            outputs = slice(first, outputs.stop * self.parts, step)
        elif self.parts > 1:
            offset = self.part * (stored[0 if self.transposed else -1] // self.parts)
            if self.part_sizes:
                offset = sum(self.part_sizes[: self.part])
            outputs = slice(outputs.start + offset, outputs.stop + offset)
        slices = (*inner, outputs)
        return slices[::-1] if self.transposed else slices

    def _groups(self, outputs: slice) -> tuple[int, int]:
        """The first group of fused outputs of a block, and the one past its last."""
        width = self.widths[self.part]
        return outputs.start // width, -(-outputs.stop // width)

    def parameter_block(self, stored: np.ndarray, block: tuple[slice, ...]) -> np.ndarray:
        """A block of the parameter from the `stored_slices` of a file tensor."""
        array, outputs = self.transpose_stored(stored), block[-1]
        if not self.widths:
            return array
        width, offset = self.widths[self.part], sum(self.widths[: self.part])
        first, last = self._groups(outputs)
        grouped = array.reshape(*array.shape[:-1], last - first, sum(self.widths))
        own = grouped[..., offset : offset + width].reshape(*array.shape[:-1], -1)
        return own[..., outputs.start - first * width : outputs.stop - first * width]

    def fused_tensor(self, pieces: list[np.ndarray]) -> np.ndarray:
        """The fused file tensor of several parameters."""
        arrays = [self.transpose_stored(piece) for piece in pieces]
        leading, width = arrays[0].shape[:-1], self.widths[0] if self.widths else 0
        if self.widths:
            groups = arrays[0].shape[-1] // width
            by_group = [array.reshape(*leading, groups, -1) for array in arrays]
            fused = np.concatenate(by_group, -1).reshape(*leading, -1)
        elif self.interleaved:
            fused = np.stack(arrays, -1).reshape(*leading, -1)
        else:
            fused = np.concatenate(arrays, -1)
        return np.ascontiguousarray(self.transpose_stored(fused))


def tensor_names(shape: Architecture, head: str = "lm") -> tuple[TensorName, ...]:
    """All parameters of a network with their names in a Hugging Face checkpoint."""
    names = [TensorName(("embed",), "model.embed_tokens.weight")]
    for stack in shape.layer_stacks.values():
        names += _stack_names(shape, stack)
    names.append(TensorName(("norm", "scale"), "model.norm.weight"))
    names += _vision_names(shape)
    if head == "scalar":
        names.append(TensorName(("score",), "score.weight"))
    elif not shape.tie_embeddings:
        names.append(TensorName(("head",), "lm_head.weight"))
    return tuple(names)


def _vision_names(shape: Architecture) -> Iterator[TensorName]:
    if shape.vision is None:
        return
    yield TensorName(("vision", "patch"), "visual.patch_embed.proj.weight")
    yield from _ENDS_OF_VISION[shape.vision.kind](shape.vision)
    layer_indices = tuple(range(shape.vision.num_layers))
    modules = {"o": "attn.proj", **_MLP_OF_VISION[shape.vision.kind]}
    projections = [(ours, theirs, 0, 1) for ours, theirs in modules.items()]
    projections += [(ours, "attn.qkv", part, 3) for part, ours in enumerate("qkv")]
    norm_leaves = ("scale",) if shape.vision.kind == "qwen2_5" else ("scale", "bias")
    for ours, theirs in {"attention_norm": "norm1", "mlp_norm": "norm2"}.items():
        for leaf in norm_leaves:
            name = f"visual.blocks.{{}}.{theirs}.{_LEAVES[leaf]}"
            yield TensorName(("vision", "layers", ours, leaf), name, layers=layer_indices)
    for ours, theirs, part, parts in projections:
        for leaf in ("kernel", "bias"):
            keys = ("vision", "layers", *ours.split("."), leaf)
            name = f"visual.blocks.{{}}.{theirs}.{_LEAVES[leaf]}"
            yield TensorName(keys, name, leaf == "kernel", layer_indices, part=part, parts=parts)


def _linear_names(path: tuple[str, ...], theirs: str) -> Iterator[TensorName]:
    """The kernel and the bias of a projection of a vision encoder."""
    yield TensorName(("vision", *path, "kernel"), f"visual.{theirs}.weight", transposed=True)
    yield TensorName(("vision", *path, "bias"), f"visual.{theirs}.bias")


def _windowed_ends(vision: VisionArchitecture) -> Iterator[TensorName]:
    yield TensorName(("vision", "norm", "scale"), "visual.merger.ln_q.weight")
    yield from _linear_names(("merge_in",), "merger.mlp.0")
    yield from _linear_names(("merge_out",), "merger.mlp.2")


def _deepstack_ends(vision: VisionArchitecture) -> Iterator[TensorName]:
    yield TensorName(("vision", "patch_bias"), "visual.patch_embed.proj.bias")
    yield TensorName(("vision", "positions"), "visual.pos_embed.weight")
    mergers = {"merger": "merger"}
    for number in range(len(vision.deepstack_layers)):
        mergers[f"deepstack_{number}"] = f"deepstack_merger_list.{number}"
    for ours, theirs in mergers.items():
        yield TensorName(("vision", ours, "norm", "scale"), f"visual.{theirs}.norm.weight")
        yield TensorName(("vision", ours, "norm", "bias"), f"visual.{theirs}.norm.bias")
        yield from _linear_names((ours, "merge_in"), f"{theirs}.linear_fc1")
        yield from _linear_names((ours, "merge_out"), f"{theirs}.linear_fc2")


# By `VisionArchitecture.kind`: the tensors around the layers, and the modules of a layer's MLP.
_ENDS_OF_VISION: Mapping[str, Callable[[VisionArchitecture], Iterator[TensorName]]] = {
    "qwen2_5": _windowed_ends,
    "qwen3": _deepstack_ends,
}
_MLP_OF_VISION: Mapping[str, Mapping[str, str]] = {
    "qwen2_5": {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    "qwen3": {"mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2"},
}


def _stack_names(shape: Architecture, stack: LayerStack) -> Iterator[TensorName]:
    """The parameters of one stack of equal layers."""
    family = FAMILIES[shape.family]
    modules = {**_MODULES, **family.module_names}

    def file_module(module: str) -> str:
        if module in modules:
            return modules[module]
        parent, _, submodule = module.rpartition(".")
        is_projection = submodule in ("gate", "up", "gate_up", "down")
        return f"{modules.get(parent, parent)}.{submodule}{'_proj' if is_projection else ''}"

    def name(path: str, leaf: str, module: str = "", **fields) -> TensorName:
        keys = ("layers", stack.name, *path.split("."), leaf)
        theirs = f"model.layers.{{}}.{file_module(module or path)}.{_LEAVES.get(leaf, leaf)}"
        return TensorName(keys, theirs, leaf == "kernel", stack.layer_indices, **fields)

    def mlp(path: str, fused: bool = False) -> Iterator[TensorName]:
        for i, ours in enumerate(("gate", "up")):
            if fused:
                yield name(f"{path}.{ours}", "kernel", f"{path}.gate_up", part=i, parts=2)
            else:
                yield name(f"{path}.{ours}", "kernel")
        yield name(f"{path}.down", "kernel")

    if shape.pre_norms:
        yield name("attention_norm", "scale")
    if stack.layer.mixer == "gated_delta":
        yield from _gated_delta_names(shape, name)
    else:
        yield from _attention_names(shape, stack.layer, name)
    if shape.post_norms:
        yield name("attention_post_norm", "scale")
    if shape.pre_norms:
        yield name("mlp_norm", "scale")
    if not stack.layer.experts:
        yield from mlp("mlp", family.fused_gate_up)
    else:
        yield from _experts_names(shape, name)
        assert shape.experts is not None
        if shape.experts.shared_size:
            yield from mlp("mlp.shared")
        if shape.experts.shared_gate:
            yield name("mlp.shared_gate", "kernel")
    if shape.post_norms:
        yield name("mlp_post_norm", "scale")


def _attention_names(shape: Architecture, layer: LayerType, name) -> Iterator[TensorName]:
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
        if layer.top_keys:
            for module in ("q", "k", "weights"):
                yield name(f"attention.indexer.{module}", "kernel")
            yield name("attention.indexer.k_norm", "scale")
            yield name("attention.indexer.k_norm", "bias")
        return
    fused: dict[str, dict[str, object]] = {}
    if FAMILIES[shape.family].fused_qkv:
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        sizes = tuple(number * shape.head_size for number in heads)
        for part, ours in enumerate("qkv"):
            fused[ours] = {"part": part, "parts": 3, "part_sizes": sizes}
    for ours in "qkvo":
        module = "attention.qkv" if ours in fused else ""
        yield name(f"attention.{ours}", "kernel", module, **fused.get(ours, {}))
        if shape.o_bias if ours == "o" else shape.qkv_bias:
            yield name(f"attention.{ours}", "bias")
    if shape.qk_norm or shape.wide_qk_norm:
        yield name("attention.q_norm", "scale")
        yield name("attention.k_norm", "scale")
    if shape.sinks:
        yield name("attention", "sinks")


def _gated_delta_names(shape: Architecture, name) -> Iterator[TensorName]:
    """The parameters of a gated delta net, in the one or the other format of projections."""
    sizes = shape.gated_delta
    assert sizes is not None
    per_key_head = sizes.num_value_heads // sizes.num_key_heads
    values = per_key_head * sizes.value_size
    concatenated = (sizes.key_dims, sizes.key_dims, sizes.value_dims)
    fused: dict[str, tuple[str, tuple[int, ...]]] = {"in_proj_qkv": ("qkv", concatenated)}
    fused |= {f"in_proj_{ours}": (ours, ()) for ours in "zba"}
    if FAMILIES[shape.family].delta_by_key_head:
        by_head = (sizes.key_size, sizes.key_size, values, values)
        fused = {"in_proj_qkvz": ("qkvz", by_head), "in_proj_ba": ("ba", (per_key_head,) * 2)}

    def renamed(path: str, leaf: str, theirs: str, **fields) -> TensorName:
        ours = name(path, leaf, **fields)
        return dataclasses.replace(ours, name=f"model.layers.{{}}.linear_attn.{theirs}")

    for theirs, (projections, widths) in fused.items():
        for part, ours in enumerate(projections):
            fields = {"part": part, "widths": widths}
            yield renamed(f"attention.{ours}", "kernel", f"{theirs}.weight", **fields)
    for part, ours in enumerate("qkv"):
        convolution = renamed(
            f"attention.{ours}_conv", "weight", "conv1d.weight", part=part, widths=concatenated
        )
        yield dataclasses.replace(convolution, transposed=True)
    yield renamed("attention.decay", "log_rate", "A_log")
    yield renamed("attention.decay", "bias", "dt_bias")
    yield renamed("attention", "norm_scale", "norm.weight")
    yield renamed("attention.o", "kernel", "out_proj.weight")


def _experts_names(shape: Architecture, name) -> Iterator[TensorName]:
    experts, fused = shape.experts, FAMILIES[shape.family].fused_experts
    assert experts is not None
    yield name("mlp.router", "kernel")
    if experts.bias:
        yield name("mlp.router", "bias")
    if experts.selection_bias:
        bias = name("mlp.router", "selection_bias", "mlp.router.selection")
        theirs = bias.name.replace("selection_bias", "e_score_correction_bias")
        yield dataclasses.replace(bias, name=theirs, keep_float32=True)
    for i, ours in enumerate(("gate", "up", "down")):
        if not fused:
            yield name(f"mlp.{ours}", "kernel", f"mlp.expert.{ours}", experts=experts.num)
            continue
        fused_fields = {"part": i, "parts": 2, "interleaved": fused == "interleaved"}
        fields = fused_fields if ours != "down" else {}
        module = "mlp.expert.gate_up" if ours != "down" else "mlp.expert.down"
        stacked = name(f"mlp.{ours}", "kernel", module, **fields)
        theirs = stacked.name.removesuffix(".weight")
        yield dataclasses.replace(stacked, name=theirs, transposed=False)
        if experts.bias:
            path = (*stacked.path[:-1], "bias")
            yield dataclasses.replace(stacked, path=path, name=theirs + "_bias", transposed=False)


def is_ignorable(name: str, shape: Architecture, head: str) -> bool:
    """Whether a stored tensor is one that this network can ignore.

    These are the output projection under a tied or scalar head, rotary frequencies (older writers
    stored them), multi-token prediction layers, and the vision encoder of a text-only network.
    """
    if name == "lm_head.weight":
        return head == "scalar" or shape.tie_embeddings
    if name.startswith("visual."):
        return shape.vision is None
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if FAMILIES[shape.family].has_mtp_layers:
        if name.startswith("mtp."):
            return True
        if layer:
            return int(layer[1]) >= shape.num_layers
    return name.endswith("rotary_emb.inv_freq")
