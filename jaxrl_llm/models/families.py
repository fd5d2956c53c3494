"""Names of the supported model families on disk: config keys and tensor names.

A family is a value of `model_type` in config.json; adding one is a row of `FAMILIES`, and of the
tables below where its blocks differ.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.shape import RopeScaling, Shape


class CheckpointFormatError(UserError, ValueError):
    """A model folder that cannot be read or written; the message names file and remedy."""


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` differs from the others."""

    model_class: str  # prefix of its class names
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int = 0  # where config.json does not say; 0 is hidden_size / num_attention_heads


FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", qk_norm=True, head_dim=128),
}
HEADS: Mapping[str, str] = {"lm": "ForCausalLM", "scalar": "ForSequenceClassification"}

# Keys that change the arithmetic, and the only value each may have.
_FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
# Fields of a shape, and their keys in config.json: those that must be there, and all.
_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "mlp_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_KEYS = {
    **_REQUIRED,
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "rope_theta": "rope_theta",
}
_LLAMA3_ROPE = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; CheckpointFormatError if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointFormatError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointFormatError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def read_config(folder: str | pathlib.Path) -> dict[str, Any]:
    """Returns the contents of a model folder's config.json.

    Raises:
      CheckpointFormatError: If there is no such folder or no readable config.json in it.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        name = pathlib.PurePath(folder).name
        raise CheckpointFormatError(
            f"{folder}: no such folder; give a local folder with config.json and safetensors. A"
            " model is not downloaded by its name on Hugging Face:"
            f" `hf download {folder} --local-dir {name}` makes such a folder"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointFormatError(f"{folder}: has no config.json; is it a model folder?")
    config = read_json(folder / "config.json")
    if "model_type" not in config and "trainer" in config:
        raise CheckpointFormatError(
            f"{folder}: the folder of a run, not of a model; give it as --workdir, or make a"
            f" model's folder of it: launch/export.py --workdir={folder} --out=FOLDER"
        )
    return config


def eos_token_ids(folder: str | pathlib.Path) -> tuple[int, ...]:
    """Returns the tokens that end a response: of generation_config.json, else config.json, or ().

    Raises:
      CheckpointFormatError: If the folder or a readable config.json is missing.
    """
    generation = pathlib.Path(folder) / "generation_config.json"
    configs = [read_config(folder)]
    if generation.is_file():
        configs.insert(0, read_json(generation))
    for config in configs:
        ids = config.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def architecture(config: Mapping[str, Any], source: str = "config.json") -> tuple[str, str]:
    """Returns (family, head) of a model: ("llama", "lm"), ("qwen3", "scalar"), ...

    Raises:
      CheckpointFormatError: If the model is of no known family, or has a head of another kind;
        begins with `source`.
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        raise CheckpointFormatError(
            f"{source}: model_type is {family!r}; known families: {', '.join(FAMILIES)}"
        )
    known = {FAMILIES[family].model_class + suffix: head for head, suffix in HEADS.items()}
    names = config.get("architectures") or []
    for name in names:
        if name in known:
            return family, known[name]
    raise CheckpointFormatError(
        f"{source}: architectures is {names}; known for {family}: {', '.join(known)}"
    )


def shape_from_config(config: Mapping[str, Any], source: str = "config.json") -> Shape:
    """Returns the shape that the contents of a config.json describe.

    Rotary settings are read as `rope_theta` with `rope_scaling`, and as `rope_parameters`.

    Raises:
      CheckpointFormatError: On an unknown family, a missing key, or an option that would
        change the arithmetic in a way that is not implemented; begins with `source`.
    """
    name, _ = architecture(config, source)
    family = FAMILIES[name]
    missing = [key for key in _REQUIRED.values() if not isinstance(config.get(key), int)]
    if missing:
        raise CheckpointFormatError(f"{source}: {', '.join(missing)} missing or no integer")
    for key, value in _FIXED.items():
        if config.get(key) not in (None, value):
            raise CheckpointFormatError(
                f"{source}: {key} is {config[key]!r}; only {value!r} is implemented for {name}"
            )
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise CheckpointFormatError(
            f"{source}: layer_types is {sorted(set(config['layer_types']))}; only full_attention"
            " is implemented"
        )
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise CheckpointFormatError(
            f"{source}: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        )
    head_size = config.get("head_dim") or family.head_dim or hidden // heads
    if head_size % 2:
        raise CheckpointFormatError(
            f"{source}: heads of {head_size}; rotary embeddings need an even size"
        )
    theta, scaling = _rope(config, source)
    return Shape(
        family=name,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        mlp_size=config["intermediate_size"],
        max_positions=config.get("max_position_embeddings", Shape.max_positions),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling]:
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default" and not any(isinstance(value, Mapping) for value in rope.values()):
        return theta, RopeScaling()
    if kind != "llama3":
        raise CheckpointFormatError(
            f"{source}: {key} is {dict(rope)}; rope_type must be 'default' or 'llama3', the same"
            " for all layers"
        )
    missing = [name for name in _LLAMA3_ROPE.values() if name not in rope]
    if missing:
        raise CheckpointFormatError(f"{source}: {key} of type llama3 lacks {', '.join(missing)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointFormatError(f"{source}: {key}.partial_rotary_factor must be 1")
    factor, low, high, original = (rope[name] for name in _LLAMA3_ROPE.values())
    return theta, RopeScaling(float(factor), float(low), float(high), int(original))


def to_hf_config(
    shape: Shape,
    head: str = "lm",
    dtype: str = "float32",
    source_config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the contents of a config.json; the inverse of `shape_from_config`.

    The head "scalar" becomes a sequence classifier with one label. `dtype` is that of the tensors.
    Keys of `source_config` that depend on none of these (token ids, dropout) are kept.

    Raises:
      CheckpointFormatError: If the family is unknown or the shape is not one it can have.
    """
    if shape.family not in FAMILIES:
        raise CheckpointFormatError(
            f"shape.family is {shape.family!r}; known families: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[shape.family]
    for switch in ("qkv_bias", "qk_norm"):
        if getattr(shape, switch) != getattr(family, switch):
            raise CheckpointFormatError(
                f"shape.{switch} is {getattr(shape, switch)}, but {shape.family} models have"
                f" {switch}={getattr(family, switch)}; another reader would compute otherwise"
            )
    replaced = ("rope_parameters", "torch_dtype", "dtype", "id2label", "label2id", "num_labels")
    config = {k: v for k, v in (source_config or {}).items() if k not in replaced}
    config |= {key: getattr(shape, field) for field, key in _KEYS.items()}
    scaling = {key: getattr(shape.rope_scaling, field) for field, key in _LLAMA3_ROPE.items()}
    stretched = shape.rope_scaling.factor != 1.0
    config.update(
        model_type=shape.family,
        architectures=[family.model_class + HEADS[head]],
        hidden_act="silu",
        # The older of the two spellings, which every reader knows.
        rope_scaling={"rope_type": "llama3", **scaling} if stretched else None,
        torch_dtype=dtype,
    )
    if head == "scalar":
        config.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    return config


@dataclasses.dataclass(frozen=True)
class TensorName:
    """One parameter of the network and what it is called in a file."""

    path: tuple[str, ...]  # keys into the parameter tree
    name: str  # "{}" stands for the layer where the parameter is stacked
    transposed: bool = False  # [out, in] in the file, [in, out] in the tree

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"

    def file_names(self, num_layers: int) -> list[str]:
        """Returns the names in a file: one for each layer, or a single one."""
        return [self.name.format(i) for i in range(num_layers)] if self.stacked else [self.name]


def tensor_names(shape: Shape, head: str = "lm") -> tuple[TensorName, ...]:
    """Returns every parameter of a network with its name in a Hugging Face file."""
    names = [TensorName(("embed",), "model.embed_tokens.weight")]

    def add(path: str, module: str, bias: bool = False) -> None:
        keys, name = ("layers", *path.split(".")), f"model.layers.{{}}.{module}"
        if path.endswith("norm"):
            names.append(TensorName((*keys, "scale"), f"{name}.weight"))
            return
        names.append(TensorName((*keys, "kernel"), f"{name}.weight", transposed=True))
        if bias:
            names.append(TensorName((*keys, "bias"), f"{name}.bias"))

    add("attention_norm", "input_layernorm")
    for ours in "qkv":
        add(f"attention.{ours}", f"self_attn.{ours}_proj", shape.qkv_bias)
    add("attention.o", "self_attn.o_proj")
    if shape.qk_norm:
        add("attention.q_norm", "self_attn.q_norm")
        add("attention.k_norm", "self_attn.k_norm")
    add("mlp_norm", "post_attention_layernorm")
    for ours in ("gate", "up", "down"):
        add(f"mlp.{ours}", f"mlp.{ours}_proj")
    names.append(TensorName(("norm", "scale"), "model.norm.weight"))
    if head == "scalar":
        names.append(TensorName(("score",), "score.weight"))
    elif not shape.tie_embeddings:
        names.append(TensorName(("head",), "lm_head.weight"))
    return tuple(names)


def may_be_unused(name: str, shape: Shape, head: str) -> bool:
    """Returns whether this network needs no such tensor.

    A tied or scalar head does not use a stored output projection; rotary frequencies, which old
    writers stored, follow from the config.
    """
    if name == "lm_head.weight":
        return head == "scalar" or shape.tie_embeddings
    return name.endswith("rotary_emb.inv_freq")
