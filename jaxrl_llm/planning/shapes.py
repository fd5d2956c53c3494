"""Shapes of published models, for plans made before a model's folder is at hand."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.config import ConfigError, ModelConfig, RLConfig
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.shape import RopeScaling, Shape, random_model

# hidden, layers, query heads, key and value heads, MLP; as their config.json say
_Sizes = tuple[int, int, int, int, int]
_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"norm_eps": 1e-5, "rope_theta": 500_000.0},
    "qwen2": {"norm_eps": 1e-6, "rope_theta": 1e6, "max_positions": 32_768, "qkv_bias": True},
    "qwen3": {"norm_eps": 1e-6, "rope_theta": 1e6, "max_positions": 40_960, "qk_norm": True},
}


def _shape(family: str, vocab_size: int, sizes: _Sizes, *, tied: bool = False, **rest) -> Shape:
    hidden, layers, heads, kv_heads, mlp = sizes
    return Shape(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_size=mlp,
        tie_embeddings=tied,
        **{"head_size": 128, **_FAMILIES[family], **rest},
    )


def _llama3(sizes: _Sizes, factor: float = 8.0, **rest) -> Shape:
    return _shape("llama", 128_256, sizes, rope_scaling=RopeScaling(factor=factor), **rest)


def _llama2(sizes: _Sizes) -> Shape:
    return _shape("llama", 32_000, sizes, rope_theta=10_000.0)


def _qwen2(sizes: _Sizes, *, tied: bool = False, **rest) -> Shape:
    return _shape("qwen2", 151_936 if tied else 152_064, sizes, tied=tied, **rest)


def _qwen3(sizes: _Sizes, **rest) -> Shape:
    return _shape("qwen3", 151_936, sizes, **rest)


SHAPES: Mapping[str, Shape] = {
    "Qwen2.5-0.5B": _qwen2((896, 24, 14, 2, 4864), tied=True, head_size=64),
    "Qwen2.5-1.5B": _qwen2((1536, 28, 12, 2, 8960), tied=True),
    "Qwen2.5-3B": _qwen2((2048, 36, 16, 2, 11_008), tied=True),
    "Qwen2.5-7B": _qwen2((3584, 28, 28, 4, 18_944)),
    "Qwen2.5-14B": _qwen2((5120, 48, 40, 8, 13_824)),
    "Qwen2.5-32B": _qwen2((5120, 64, 40, 8, 27_648)),
    "Qwen2.5-72B": _qwen2((8192, 80, 64, 8, 29_568)),
    "Qwen3-0.6B": _qwen3((1024, 28, 16, 8, 3072), tied=True),
    "Qwen3-1.7B": _qwen3((2048, 28, 16, 8, 6144), tied=True),
    "Qwen3-4B": _qwen3((2560, 36, 32, 8, 9728), tied=True),
    "Qwen3-8B": _qwen3((4096, 36, 32, 8, 12_288)),
    "Qwen3-14B": _qwen3((5120, 40, 40, 8, 17_408)),
    "Qwen3-32B": _qwen3((5120, 64, 64, 8, 25_600)),
    "SmolLM2-135M": _shape(
        "llama", 49_152, (576, 30, 9, 3, 1536), tied=True, head_size=64, rope_theta=100_000.0
    ),
    "Llama-2-7b": _llama2((4096, 32, 32, 32, 11_008)),
    "Llama-2-13b": _llama2((5120, 40, 40, 40, 13_824)),
    "Llama-2-34b": _llama2((8192, 48, 64, 8, 22_016)),
    "Llama-2-70b": _llama2((8192, 80, 64, 8, 28_672)),
    "Llama-3.2-1B": _llama3((2048, 16, 32, 8, 8192), 32.0, tied=True, head_size=64),
    "Llama-3.2-3B": _llama3((3072, 28, 24, 8, 8192), 32.0, tied=True),
    "Llama-3.1-8B": _llama3((4096, 32, 32, 8, 14_336)),
    "Llama-3.1-70B": _llama3((8192, 80, 64, 8, 28_672)),
    "Llama-3.3-70B": _llama3((8192, 80, 64, 8, 28_672)),
}


def known_shape(name: str) -> Shape:
    """Returns the shape of a published model by its name, whatever suffix that carries.

    Raises:
      ConfigError: If no known name begins `name`.
    """
    found = [known for known in SHAPES if name.lower().startswith(known.lower())]
    if not found:
        rule = "is no folder here and no published model known by name; give a folder with"
        known = f"config.json, or one of {', '.join(SHAPES)}"
        raise ConfigError([f"config.model.path: {name!r} {rule} {known}"])
    return SHAPES[max(found, key=len)]


def shape_of(config: ModelConfig, vocab_size: int) -> Shape:
    """Returns the shape of a run's policy: of its folder, by the folder's name, or as configured.

    A random model has `vocab_size`; a folder or a name has its own.
    """
    if not config.path:
        return random_model(config, vocab_size)
    folder = pathlib.Path(config.path)
    if folder.is_dir():
        return huggingface.read_shape(folder)
    return known_shape(folder.name)


def scorers(config: RLConfig, policy: Shape) -> tuple[Shape, ...]:
    """Returns the shapes of a run's reward and cost models; one without a folder is as `policy`."""
    models = (*config.rewards.models.values(), *config.rewards.cost_models.values())
    return tuple(
        shape_of(dataclasses.replace(config.model, path=model.path), 0) if model.path else policy
        for model in models
    )
