"""Two places of a model folder that say different things: found, and named, before a run begins.

Each place alone is valid, so one of them would silently win. A folder whose places agree, or of
which only one says anything, has no contradiction.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.models.family_table import FAMILIES, rope_type
from jaxrl_llm.models.quantized_file import Tensor
from jaxrl_llm.models.safetensors_file import BLOCK_BYTES

Config = Mapping[str, Any]

_ROPES = ("rope_parameters", "rope_scaling")
# Keys of rotary settings that config.json may also have beside them.
_OUTER_KEYS = {
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_SPELLINGS = (
    ("num_local_experts", "num_experts"),
    ("num_local_experts", "n_routed_experts"),
    ("num_experts", "n_routed_experts"),
    ("sliding_window_pattern", "_sliding_window_pattern"),
)
# Endings of tensors that a network computes with: left out, it computes otherwise.
_WEIGHTS = (".weight", ".bias", ".sinks", "_bias", "_proj", "_blocks", "_scales", "_scale_inv")


def in_config(config: Config) -> Iterator[str]:
    """Yields contradictions within a config.json; a key that is null says nothing."""
    config = {key: value for key, value in config.items() if value is not None}
    for key, other in _SPELLINGS:
        if key in config and other in config and config[key] != config[other]:
            yield f"{key} is {config[key]!r} and {other} is {config[other]!r}; correct one of them"
    ropes = {key: config[key] for key in _ROPES if isinstance(config.get(key), Mapping)}
    for key, rope in ropes.items():
        yield from _in_rope(rope, key, config)
    if len(ropes) == 2 and all(ropes.values()):
        yield from _between_ropes(*(ropes[key] for key in _ROPES))
    yield from _in_attention(config)
    known = [name for name in config.get("architectures") or () if _head(config, name)]
    if len(set(known)) > 1:
        yield f"architectures names {', '.join(known)}; keep the one that the weights are of"


def _head(config: Config, name: Any) -> str:
    """The ending of a class name that says which head a model of this family has; "" if none."""
    row = FAMILIES.get(str(config.get("model_type")))
    if row is None or not isinstance(name, str):
        return ""
    prefixes = tuple(filter(None, (row.model_class, row.classifier, row.language_model)))
    heads = ("ForCausalLM", "ForSequenceClassification")
    return next((head for head in heads if name.endswith(head) and name.startswith(prefixes)), "")


def _in_rope(rope: Config, where: str, config: Config) -> Iterator[str]:
    nested = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    for key, value in nested.items():
        outer = config if key == "full_attention" else {}
        yield from _in_rope(value, f"{where}.{key}", outer)
        if key == "sliding_attention":
            local = {"rope_theta": config.get("rope_local_base_freq")}
            yield from _beside(value, f"{where}.{key}", local, {"rope_theta": "rope_theta"})
    if nested:
        return
    old, new = rope.get("type"), rope.get("rope_type")
    if old is not None and new is not None and old != new and {old, new} != {"mrope", "default"}:
        yield f"{where}: type is {old!r} and rope_type is {new!r}; correct one of them"
    factor = rope.get("factor")
    if rope_type(rope) == "default" and _is_number(factor) and factor != 1:
        yield (
            f"{where}: factor is {factor}, but the type is 'default', which scales nothing; set"
            " rope_type, or leave factor out"
        )
    yield from _beside(rope, where, config, _OUTER_KEYS)


def _beside(rope: Config, where: str, config: Config, keys: Mapping[str, str]) -> Iterator[str]:
    for inner, outer in keys.items():
        value, other = rope.get(inner), config.get(outer)
        if _is_number(value) and _is_number(other) and not _is_same(value, other):
            name = "rope_local_base_freq" if where.endswith("sliding_attention") else outer
            yield f"{where}.{inner} is {value} and {name} is {other}; correct one of them"


def _between_ropes(parameters: Config, scaling: Config) -> Iterator[str]:
    """Yields where `rope_parameters`, which newer files have, and `rope_scaling` differ."""
    if isinstance(parameters.get("full_attention"), Mapping):
        parameters = parameters["full_attention"]
    if isinstance(scaling.get("full_attention"), Mapping):
        scaling = scaling["full_attention"]
    kinds = [rope_type(rope) for rope in (parameters, scaling)]
    plain = [kind if kind != "mrope" else "default" for kind in kinds]
    if plain[0] != plain[1]:
        yield (
            f"rope_parameters is of type {kinds[0]!r} and rope_scaling of type {kinds[1]!r}"
            f" ({dict(scaling)}); remove the one that is not the model's"
        )
        return
    for key in sorted({*parameters} & {*scaling} - {"type", "rope_type"}):
        if not _is_same(parameters[key], scaling[key]):
            yield (
                f"rope_parameters.{key} is {parameters[key]!r} and rope_scaling.{key} is"
                f" {scaling[key]!r}; remove the one that is not the model's"
            )
    missing = {*scaling} - {*parameters} - {"type", "rope_type", *_OUTER_KEYS}
    if plain[0] != "default" and missing:
        yield (
            f"rope_scaling has {', '.join(sorted(missing))}, which rope_parameters lacks; remove"
            " the one that is not the model's"
        )


def _in_attention(config: Config) -> Iterator[str]:
    types = config.get("layer_types")
    if not isinstance(types, Sequence) or isinstance(types, str):
        return
    # Not `_sliding_window_pattern`: transformers writes its default beside layer_types of any kind.
    length = config.get("sliding_window_pattern")
    usual = {*types} <= {"sliding_attention", "full_attention"}  # else refused as what it is
    usual &= len(types) == config.get("num_hidden_layers")
    if isinstance(length, int) and length > 0 and usual:
        for number, kind in enumerate(types):
            expected = "sliding_attention" if (number + 1) % length else "full_attention"
            if kind != expected:
                yield (
                    f"layer_types[{number}] is {kind!r}, but sliding_window_pattern={length} makes"
                    f" it {expected!r}; correct one of them"
                )
                return
    if "sliding_attention" in types and config.get("use_sliding_window") is False:
        yield "layer_types has sliding_attention, but use_sliding_window is false"


def of_text_and_images(whole: Config, keys: Iterable[str]) -> Iterator[str]:
    """Yields keys that a config has beside and inside its text_config with different values."""
    text = whole.get("text_config")
    if not isinstance(text, Mapping):
        return
    for key in sorted(keys):
        inner, outer = text.get(key), whole.get(key)
        if inner is not None and outer is not None and not _is_same(inner, outer):
            yield f"{key} is {outer!r} and text_config.{key} is {inner!r}; correct one of them"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_same(one: Any, other: Any) -> bool:
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other, rel_tol=1e-12)
    return one == other


def is_tied(embedding: Tensor, head: Tensor) -> bool:
    """Whether a stored output projection is the embedding; stops at the first difference."""
    if embedding.shape != head.shape:
        return False
    rows = max(1, BLOCK_BYTES // max(1, 4 * math.prod(embedding.shape[1:])))
    for start in range(0, embedding.shape[0], rows):
        block = (slice(start, min(start + rows, embedding.shape[0])), slice(0, embedding.shape[1]))
        one, other = (np.asarray(tensor.view()[block], np.float32) for tensor in (embedding, head))
        if not np.array_equal(one, other, equal_nan=True):
            return False
    return True


def is_weight(name: str) -> bool:
    """Whether a tensor that a network does not use is one that its family would compute with."""
    return name.startswith(("model.layers.", "model.embed", "model.norm", "lm_head.")) and (
        name.endswith(_WEIGHTS)
    )
