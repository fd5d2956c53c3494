"""Types and ranges of the keys of a config.json, the same for all families; checked before use."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.config.validation import Range

_SIZE = Range("[1, 2147483647]")
_COUNT = Range("[0, 2147483647]")
_LAYER_COUNT = Range("[1, 1024]")
_POSITIVE = Range("(0, 3.4e38]")
_INTEGERS: Mapping[str, Range] = {
    "num_hidden_layers": _LAYER_COUNT,
    "_sliding_window_pattern": _LAYER_COUNT,
    "sliding_window_pattern": _LAYER_COUNT,
    "decoder_sparse_step": _LAYER_COUNT,
    "interleave_moe_layer_step": _LAYER_COUNT,
    "no_rope_layer_interval": _LAYER_COUNT,
    "full_attention_interval": _LAYER_COUNT,
    "linear_conv_kernel_dim": Range("[2, 64]"),
    "q_lora_rank": _COUNT,
    "index_topk_freq": _COUNT,
    "n_shared_experts": _COUNT,
    "first_k_dense_replace": _COUNT,
    "sliding_window": _COUNT,
    **dict.fromkeys(
        (
            *("vocab_size", "hidden_size", "intermediate_size", "intermediate_size_mlp"),
            *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
            *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "n_group", "topk_group", "attention_chunk_size"),
            *("rotary_dim", "original_max_position_embeddings"),
            *("index_topk", "index_n_heads", "index_head_dim"),
            *("shared_expert_intermediate_size", "linear_num_key_heads"),
            *("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        ),
        _SIZE,
    ),
}
_FLOATS: Mapping[str, Range] = {
    "attn_logit_softcapping": Range("[0, 3.4e38]"),
    "final_logit_softcapping": Range("[0, 3.4e38]"),
    "attn_scale": Range("[0, 3.4e38]"),
    "partial_rotary_factor": Range("(0, 1]"),
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"), _POSITIVE
    ),
    **dict.fromkeys(("routed_scaling_factor", "floor_scale"), _POSITIVE),
}
NUMERIC_KEYS = (*_INTEGERS, *_FLOATS)  # keys that hold a number
_ROPE_FLOATS: Mapping[str, Range] = dict.fromkeys(
    (
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        *("rope_theta", "beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor"),
    ),
    _POSITIVE,
) | dict.fromkeys(("mscale", "mscale_all_dim"), Range("[0, 3.4e38]"))
_FLAGS = {
    *("tie_word_embeddings", "norm_topk_prob", "rope_interleave", "use_qk_norm"),
    *("attention_bias", "attn_temperature_tuning", "truncate", "use_sliding_window"),
    "attn_output_gate",
    "indexer_rope_interleave",
}
_LISTS = {
    "layer_types": str,
    "architectures": str,
    "mlp_only_layers": int,
    "moe_layers": int,
    "no_rope_layers": int,
    "attn_type_list": int,
    "mlp_layer_types": str,
    "indexer_types": str,
}
_ROPE_LISTS = ("short_factor", "long_factor")


def schema_violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields keys of a config.json whose value has the wrong type or range; null counts as absent.

    Keys that no reader uses are not checked.
    """
    for key, value in config.items():
        if value is None:
            continue
        if key in _LISTS and not _is_list(value, _LISTS[key]):
            kind = "texts" if _LISTS[key] is str else "integers"
            yield f"{key} must be a list of {kind}, got {value!r}"
        if key in ("rope_parameters", "rope_scaling"):
            yield from _rope_problems(value, key)
        yield from _number_problem(key, value, _INTEGERS, int, key)
        yield from _number_problem(key, value, _FLOATS, float, key)
        yield from _flag_problem(key, value, key)


def _rope_problems(rope: Any, location: str) -> Iterator[str]:
    if not isinstance(rope, Mapping):
        yield f"{location} must be an object, got {rope!r}"
        return
    for key, value in rope.items():
        name = f"{location}.{key}"
        if isinstance(value, Mapping):  # settings of one attention type
            yield from _rope_problems(value, name)
        elif key in ("rope_type", "type") and not isinstance(value, str):
            yield f"{name} must be a text, got {value!r}"
        elif key in _ROPE_LISTS and not _is_list(value, (int, float)):
            yield f"{name} must be a list of numbers, got {value!r}"
        elif key in _ROPE_LISTS:
            for factor in value:
                yield from _number_problem(key, factor, {key: _POSITIVE}, float, f"each {name}")
        elif value is not None:
            yield from _number_problem(key, value, _ROPE_FLOATS, float, name)
            yield from _flag_problem(key, value, name)


def _number_problem(
    key: str, value: Any, ranges: Mapping[str, Range], kind: type, location: str
) -> Iterator[str]:
    if key not in ranges:
        return
    has_type = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not has_type or value not in ranges[key]:
        noun = "an integer" if kind is int else "a number"
        yield f"{location} must be {noun} {ranges[key]}, got {value!r}"


def _flag_problem(key: str, value: Any, location: str) -> Iterator[str]:
    if key in _FLAGS and not isinstance(value, bool):
        yield f"{location} must be true or false, got {value!r}"


def _is_list(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)
