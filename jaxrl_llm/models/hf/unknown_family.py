"""Explains a folder of an unknown family: which known family has all its keys and tensors, if any.

Only a hint. Two families may have the same keys and tensors and compute differently, so that such a
folder is refused until its owner writes the known name into it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flax import traverse_util

from jaxrl_llm.models.architecture import Architecture
from jaxrl_llm.models.hf import config_reader, config_writer
from jaxrl_llm.models.hf.contradictions import is_weight
from jaxrl_llm.models.hf.families import FAMILIES
from jaxrl_llm.models.hf.family_format import CheckpointFormatError
from jaxrl_llm.models.hf.tensor_names import is_ignorable, tensor_names
from jaxrl_llm.models.transformer import Network

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]  # of stored tensors, by name

_MAX_LISTED = 4
# Keys of any family that have no effect on the forward pass of a trained model.
_NEUTRAL_KEYS = frozenset(
    {
        *("architectures", "auto_map", "model_type", "_name_or_path", "transformers_version"),
        *("dtype", "torch_dtype", "use_cache", "initializer_range", "pretraining_tp"),
        *("output_router_logits", "router_aux_loss_coef", "output_attentions"),
        *("output_hidden_states", "return_dict", "quantization_config", "max_window_layers"),
        *("rope_parameters", "rope_scaling", "layer_types"),
    }
)
_NEUTRAL_SUFFIXES = ("_token_id", "_dropout", "_pdrop", "2id", "2label")
_UNSET: tuple[Any, ...] = (None, False, 0, [], {})


def problem(config: Config, stored: Shapes) -> str:
    """The reason to refuse a config of an unknown family, with the closest known family.

    `stored` may be empty, where the folder has no weights yet; then only keys are compared.
    """
    name = repr(config.get("model_type"))
    known = f"known families: {', '.join(FAMILIES)}"
    candidates = [(len(keys), family, keys) for family, keys in _candidates(config, stored)]
    if not candidates:
        parts = "config" if not stored else "config and tensors"
        return f"model_type is {name}; no known family has its {parts}; {known}"
    num_unread, family, unread = min(candidates, key=lambda candidate: candidate[0])
    if num_unread:
        more = f" and {num_unread - _MAX_LISTED} more" if num_unread > _MAX_LISTED else ""
        listed = ", ".join(unread[:_MAX_LISTED]) + more
        return (
            f"model_type is {name}, which is unknown; it resembles {family!r}, but no reader of"
            f" {family} knows {listed}; {known}"
        )
    compared = "its config has" if not stored else "its config and tensors have"
    class_name = config_reader.hf_class_name(family, "lm")
    return (
        f"model_type is {name}, which is unknown; {compared} only known parts: it could be read as"
        f" {family!r}. If its own code computes what {class_name} does, write model_type"
        f" {family!r} and architectures ['{class_name}'] into config.json"
    )


def _candidates(config: Config, stored: Shapes) -> Iterator[tuple[str, list[str]]]:
    """Yields families that can read a config and have its tensors, and the keys they ignore."""
    for family in FAMILIES:
        renamed = {
            **config,
            "model_type": family,
            "architectures": [config_reader.hf_class_name(family, "lm")],
        }
        try:
            shape = config_reader.architecture_from_config(renamed)
        except CheckpointFormatError:
            continue
        if not stored or _has_tensors(shape, stored):
            read = {*config_writer.to_hf_config(shape), *FAMILIES[family].defaults}
            yield family, sorted(key for key in config if _is_unread(key, config[key], read))


def _is_unread(key: str, value: Any, read: set[str]) -> bool:
    if key in read or key in _NEUTRAL_KEYS or key.endswith(_NEUTRAL_SUFFIXES):
        return False
    return value not in _UNSET


def _has_tensors(shape: Architecture, stored: Shapes) -> bool:
    """Whether a language model of this shape has exactly the stored weights."""
    leaves = traverse_util.flatten_dict(Network(shape).abstract_params())
    expected = {
        file_name: name.stored_shape(leaves[name.path].shape)
        for name in tensor_names(shape)
        for file_name in name.file_names
    }
    if any(stored.get(name) != size for name, size in expected.items()):
        return False
    unused = (name for name in stored if name not in expected)
    return not any(is_weight(name) and not is_ignorable(name, shape, "lm") for name in unused)
