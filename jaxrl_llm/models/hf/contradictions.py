"""Detects settings of a model folder that contradict each other, before a run begins.

Each setting alone is valid, so without the check one of them would silently win. Settings that
agree, or of which only one is present, are no contradiction.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.hf.families import FAMILIES, rope_type
from jaxrl_llm.models.hf.quantized_tensors import CheckpointTensor
from jaxrl_llm.models.hf.safetensors_file import COMPARE_BLOCK_BYTES

Config = Mapping[str, Any]

_ROPE_KEYS = ("rope_parameters", "rope_scaling")
# Keys of rotary settings that config.json may also hold at its top level.
_TOP_LEVEL_ROPE_KEYS = {
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_ALIASES = (
    ("num_local_experts", "num_experts"),
    ("num_local_experts", "n_routed_experts"),
    ("num_experts", "n_routed_experts"),
    ("sliding_window_pattern", "_sliding_window_pattern"),
)
# Suffixes of tensors that take part in the forward pass: ignoring one changes the result.
_WEIGHT_SUFFIXES = (
    ".weight",
    ".bias",
    ".sinks",
    "_bias",
    "_proj",
    "_blocks",
    "_scales",
    "_scale_inv",
)


def config_contradictions(config: Config) -> Iterator[str]:
    """Yields contradictions within a config.json; null counts as absent."""
    config = {key: value for key, value in config.items() if value is not None}
    for key, other in _ALIASES:
        if key in config and other in config and config[key] != config[other]:
            yield f"{key} is {config[key]!r} and {other} is {config[other]!r}; correct one of them"
    ropes = {key: config[key] for key in _ROPE_KEYS if isinstance(config.get(key), Mapping)}
    for key, rope in ropes.items():
        yield from _rope_conflicts(rope, key, config)
    if len(ropes) == 2 and all(ropes.values()):
        yield from _rope_spelling_conflicts(*(ropes[key] for key in _ROPE_KEYS))
    yield from _rotary_dim_conflicts(config, ropes)
    yield from _attention_conflicts(config)
    class_names = [name for name in config.get("architectures") or () if _head_suffix(config, name)]
    if len(set(class_names)) > 1:
        yield f"architectures names {', '.join(class_names)}; keep the one that the weights are of"


def _head_suffix(config: Config, name: Any) -> str:
    """The suffix of a class name of this family that names its head; "" for other classes."""
    row = FAMILIES.get(str(config.get("model_type")))
    if row is None or not isinstance(name, str):
        return ""
    prefixes = tuple(filter(None, (row.model_class, row.classifier_class, row.causal_lm_class)))
    heads = ("ForCausalLM", "ForSequenceClassification")
    return next((head for head in heads if name.endswith(head) and name.startswith(prefixes)), "")


def _rope_conflicts(rope: Config, location: str, config: Config) -> Iterator[str]:
    nested = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    for key, value in nested.items():
        outer = config if key == "full_attention" else {}
        yield from _rope_conflicts(value, f"{location}.{key}", outer)
        if key == "sliding_attention":
            top_level = {"rope_theta": config.get("rope_local_base_freq")}
            yield from _top_level_conflicts(
                value, f"{location}.{key}", top_level, {"rope_theta": "rope_theta"}
            )
    if nested:
        return
    legacy_kind, kind = rope.get("type"), rope.get("rope_type")
    if (
        legacy_kind is not None
        and kind is not None
        and legacy_kind != kind
        and {legacy_kind, kind} != {"mrope", "default"}
    ):
        yield f"{location}: type is {legacy_kind!r} and rope_type is {kind!r}; correct one of them"
    factor = rope.get("factor")
    if rope_type(rope) == "default" and _is_number(factor) and factor != 1:
        yield (
            f"{location}: factor is {factor}, but the type is 'default', which scales nothing; set"
            " rope_type, or leave factor out"
        )
    yield from _top_level_conflicts(rope, location, config, _TOP_LEVEL_ROPE_KEYS)


def _top_level_conflicts(
    rope: Config, location: str, config: Config, keys: Mapping[str, str]
) -> Iterator[str]:
    for inner, outer in keys.items():
        value, other = rope.get(inner), config.get(outer)
        if _is_number(value) and _is_number(other) and not _is_equal(value, other):
            name = "rope_local_base_freq" if location.endswith("sliding_attention") else outer
            yield f"{location}.{inner} is {value} and {name} is {other}; correct one of them"


def _rotary_dim_conflicts(config: Config, ropes: Mapping[str, Config]) -> Iterator[str]:
    """Yields a rotary_dim (MiniMax-M2) that is another share of a head than is given beside it."""
    size, rotary_dim = config.get("head_dim"), config.get("rotary_dim")
    if not isinstance(size, int) or not isinstance(rotary_dim, int):
        return
    places = {"": config, **{f"{key}.": rope for key, rope in ropes.items()}}
    for location, settings in places.items():
        fraction = settings.get("partial_rotary_factor")
        if isinstance(fraction, (int, float)) and int(size * fraction) != rotary_dim:
            yield (
                f"rotary_dim is {rotary_dim} and {location}partial_rotary_factor is {fraction} of"
                f" heads of {size} dims; correct one of them"
            )
            return


def _rope_spelling_conflicts(parameters: Config, scaling: Config) -> Iterator[str]:
    """Yields differences between `rope_parameters` (newer files) and `rope_scaling`."""
    if isinstance(parameters.get("full_attention"), Mapping):
        parameters = parameters["full_attention"]
    if isinstance(scaling.get("full_attention"), Mapping):
        scaling = scaling["full_attention"]
    kinds = [rope_type(rope) for rope in (parameters, scaling)]
    base_kinds = [kind if kind != "mrope" else "default" for kind in kinds]
    if base_kinds[0] != base_kinds[1]:
        yield (
            f"rope_parameters is of type {kinds[0]!r} and rope_scaling of type {kinds[1]!r}"
            f" ({dict(scaling)}); remove the one that is not the model's"
        )
        return
    for key in sorted({*parameters} & {*scaling} - {"type", "rope_type"}):
        if not _is_equal(parameters[key], scaling[key]):
            yield (
                f"rope_parameters.{key} is {parameters[key]!r} and rope_scaling.{key} is"
                f" {scaling[key]!r}; remove the one that is not the model's"
            )
    missing = {*scaling} - {*parameters} - {"type", "rope_type", *_TOP_LEVEL_ROPE_KEYS}
    if base_kinds[0] != "default" and missing:
        yield (
            f"rope_scaling has {', '.join(sorted(missing))}, which rope_parameters lacks; remove"
            " the one that is not the model's"
        )


def _attention_conflicts(config: Config) -> Iterator[str]:
    layer_types = config.get("layer_types")
    if not isinstance(layer_types, Sequence) or isinstance(layer_types, str):
        return
    # Not `_sliding_window_pattern`: transformers writes its default beside any layer_types.
    length = config.get("sliding_window_pattern")
    # Other types are refused elsewhere.
    is_sliding_pattern = {*layer_types} <= {"sliding_attention", "full_attention"}
    is_sliding_pattern &= len(layer_types) == config.get("num_hidden_layers")
    if isinstance(length, int) and length > 0 and is_sliding_pattern:
        for layer, kind in enumerate(layer_types):
            expected = "sliding_attention" if (layer + 1) % length else "full_attention"
            if kind != expected:
                yield (
                    f"layer_types[{layer}] is {kind!r}, but sliding_window_pattern={length} makes"
                    f" it {expected!r}; correct one of them"
                )
                return
    if "sliding_attention" in layer_types and config.get("use_sliding_window") is False:
        yield "layer_types has sliding_attention, but use_sliding_window is false"


def text_config_contradictions(config: Config, keys: Iterable[str]) -> Iterator[str]:
    """Yields keys with different values at the top level and in text_config."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return
    for key in sorted(keys):
        inner, outer = text.get(key), config.get(key)
        if inner is not None and outer is not None and not _is_equal(inner, outer):
            yield f"{key} is {outer!r} and text_config.{key} is {inner!r}; correct one of them"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_equal(value: Any, other: Any) -> bool:
    if _is_number(value) and _is_number(other):
        return math.isclose(value, other, rel_tol=1e-12)
    return value == other


def is_tied(embedding: CheckpointTensor, head: CheckpointTensor) -> bool:
    """Whether a stored output projection equals the embedding; stops at the first difference.

    Of remote files each process compares a part, so that together they read both once.
    """
    if embedding.shape != head.shape:
        return False
    rows = max(1, COMPARE_BLOCK_BYTES // max(1, 4 * math.prod(embedding.shape[1:])))
    begin, end = 0, embedding.shape[0]
    if embedding.is_remote:
        process, count = jax.process_index(), jax.process_count()
        begin, end = end * process // count, end * (process + 1) // count
    for start in range(begin, end, rows):
        block = (slice(start, min(start + rows, end)), slice(0, embedding.shape[1]))
        embedding_rows, head_rows = (
            np.asarray(tensor.view()[block], np.float32) for tensor in (embedding, head)
        )
        if not np.array_equal(embedding_rows, head_rows, equal_nan=True):
            return False
    return True


def is_weight(name: str) -> bool:
    """Whether a tensor that the network leaves unused is a weight of its forward pass."""
    return name.startswith(("model.layers.", "model.embed", "model.norm", "lm_head.")) and (
        name.endswith(_WEIGHT_SUFFIXES)
    )
