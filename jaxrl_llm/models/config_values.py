"""What each key of a config.json may hold, whatever the family; checked before anything is read."""

from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.config.ranges import Range

_SIZE = Range("[1, 2147483647]")
_COUNT = Range("[0, 2147483647]")
_SMALL = Range("[1, 1024]")
_POSITIVE = Range("(0, 3.4e38]")
_INTEGERS: Mapping[str, Range] = {
    "num_hidden_layers": _SMALL,
    "_sliding_window_pattern": _SMALL,
    "sliding_window_pattern": _SMALL,
    "decoder_sparse_step": _SMALL,
    "interleave_moe_layer_step": _SMALL,
    "no_rope_layer_interval": _SMALL,
    "q_lora_rank": _COUNT,
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
        ),
        _SIZE,
    ),
}
_NUMBERS: Mapping[str, Range] = {
    "attn_logit_softcapping": Range("[0, 3.4e38]"),
    "final_logit_softcapping": Range("[0, 3.4e38]"),
    "attn_scale": Range("[0, 3.4e38]"),
    "partial_rotary_factor": Range("(0, 1]"),
    **dict.fromkeys(
        ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"), _POSITIVE
    ),
    **dict.fromkeys(("routed_scaling_factor", "floor_scale"), _POSITIVE),
}
NUMBERS = (*_INTEGERS, *_NUMBERS)  # keys that hold a number
_OF_ROPE: Mapping[str, Range] = dict.fromkeys(
    (
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        *("rope_theta", "beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor"),
    ),
    _POSITIVE,
) | dict.fromkeys(("mscale", "mscale_all_dim"), Range("[0, 3.4e38]"))
_FLAGS = {
    *("tie_word_embeddings", "norm_topk_prob", "rope_interleave", "use_qk_norm"),
    *("attention_bias", "attn_temperature_tuning", "truncate"),
}
_LISTS = {
    "layer_types": str,
    "architectures": str,
    "mlp_only_layers": int,
    "moe_layers": int,
    "no_rope_layers": int,
}


def problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with single keys of a config.json; a key that is null is not given.

    Keys that nothing reads are not looked at.
    """
    for key, value in config.items():
        if value is None:
            continue
        if key in _LISTS and not _is_list(value, _LISTS[key]):
            kind = "texts" if _LISTS[key] is str else "integers"
            yield f"{key} must be a list of {kind}, got {value!r}"
        if key in ("rope_parameters", "rope_scaling"):
            yield from _of_rope(value, key)
        yield from _of_number(key, value, _INTEGERS, int, key)
        yield from _of_number(key, value, _NUMBERS, float, key)
        yield from _of_flag(key, value, key)


def _of_rope(rope: Any, where: str) -> Iterator[str]:
    if not isinstance(rope, Mapping):
        yield f"{where} must be an object, got {rope!r}"
        return
    for key, value in rope.items():
        name = f"{where}.{key}"
        if isinstance(value, Mapping):  # of one type of layers
            yield from _of_rope(value, name)
        elif key in ("rope_type", "type") and not isinstance(value, str):
            yield f"{name} must be a text, got {value!r}"
        elif value is not None:
            yield from _of_number(key, value, _OF_ROPE, float, name)
            yield from _of_flag(key, value, name)


def _of_number(
    key: str, value: Any, rules: Mapping[str, Range], kind: type, where: str
) -> Iterator[str]:
    if key not in rules:
        return
    fits = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not fits or value not in rules[key]:
        what = "an integer" if kind is int else "a number"
        yield f"{where} must be {what} {rules[key]}, got {value!r}"


def _of_flag(key: str, value: Any, where: str) -> Iterator[str]:
    if key in _FLAGS and not isinstance(value, bool):
        yield f"{where} must be true or false, got {value!r}"


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, kind) for item in value)
