"""Reads and writes the config.json keys of the indexer of sparse attention (DSA)."""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.architecture import Architecture, KeyIndexer


def indexer_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `Architecture` fields of the indexer.

    Raises ValueError on unimplemented or impossible values; the message begins with the key.
    """
    if not config.get("q_lora_rank"):
        raise ValueError("q_lora_rank must be above 0: the indexer reads the latent of the queries")
    if config["index_head_dim"] < config["qk_rope_head_dim"]:
        raise ValueError(
            f"index_head_dim is {config['index_head_dim']}; its first qk_rope_head_dim="
            f"{config['qk_rope_head_dim']} dims are rotated, so it must be at least that"
        )
    if config.get("rope_interleave", True) is not True:
        raise ValueError("rope_interleave must be true: neighbouring dims are rotated together")
    _check_mlp_types(config)
    # Layers that share the keys of an earlier one (arXiv:2603.12201) have no indexer.
    interval, pattern = config.get("index_topk_freq", 1), config.get("index_topk_pattern", "")
    if {*config.get("indexer_types", ["full"])} != {"full"} or interval != 1 or "S" in str(pattern):
        raise ValueError(
            "indexer_types (index_topk_freq, index_topk_pattern) must be 'full' for all layers;"
            " layers that share the selected keys of an earlier layer are not implemented"
        )
    return {
        "indexer": KeyIndexer(
            num_heads=config["index_n_heads"],
            head_size=config["index_head_dim"],
            rope_interleaved=config.get("indexer_rope_interleave", False),
        )
    }


def _check_mlp_types(config: Mapping[str, Any]) -> None:
    types, num_layers = config.get("mlp_layer_types"), config["num_hidden_layers"]
    if types is not None and (not {*types} <= {"dense", "sparse"} or len(types) != num_layers):
        raise ValueError(
            f"mlp_layer_types must be 'dense' or 'sparse' for each of the {num_layers} layers"
        )


def indexer_config_keys(shape: Architecture) -> dict[str, Any]:
    """The config.json keys for which `indexer_fields` returns this shape."""
    indexer = shape.indexer
    if indexer is None:
        return {}
    return {
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_size,
        "indexer_rope_interleave": indexer.rope_interleaved,
        "indexer_types": ["full"] * shape.num_layers,
    }
