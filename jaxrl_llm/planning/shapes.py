"""Shapes of published models, for plans made before a model's folder is at hand."""

import dataclasses
import pathlib
from collections.abc import Mapping

from jaxrl_llm.config import ConfigError, ModelConfig, RLConfig
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.shape import RopeScaling, Shape, random_model

_LLAMA3_ROPE = RopeScaling(factor=8.0)


def _llama(
    vocab_size: int, sizes: tuple[int, int, int, int, int], *, head_size: int = 128, **rest
) -> Shape:
    hidden, layers, heads, kv_heads, mlp = sizes
    return Shape(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        mlp_size=mlp,
        norm_eps=1e-5,
        **{"rope_theta": 500_000.0, "tie_embeddings": False, **rest},
    )


def _qwen2(vocab_size: int, sizes: tuple[int, int, int, int, int], *, tied: bool) -> Shape:
    shape = _llama(vocab_size, sizes, head_size=sizes[0] // sizes[2])
    return dataclasses.replace(
        shape,
        family="qwen2",
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
        tie_embeddings=tied,
        max_positions=32_768,
    )


def _qwen3(sizes: tuple[int, int, int, int, int], *, tied: bool) -> Shape:
    return dataclasses.replace(
        _qwen2(151_936, sizes, tied=tied),
        family="qwen3",
        head_size=128,
        qkv_bias=False,
        qk_norm=True,
        max_positions=40_960,
    )


# (hidden, layers, heads, key and value heads, MLP) as their config.json say.
SHAPES: Mapping[str, Shape] = {
    "Qwen2.5-0.5B": _qwen2(151_936, (896, 24, 14, 2, 4864), tied=True),
    "Qwen2.5-1.5B": _qwen2(151_936, (1536, 28, 12, 2, 8960), tied=True),
    "Qwen2.5-3B": _qwen2(151_936, (2048, 36, 16, 2, 11_008), tied=True),
    "Qwen2.5-7B": _qwen2(152_064, (3584, 28, 28, 4, 18_944), tied=False),
    "Qwen2.5-14B": _qwen2(152_064, (5120, 48, 40, 8, 13_824), tied=False),
    "Qwen2.5-32B": _qwen2(152_064, (5120, 64, 40, 8, 27_648), tied=False),
    "Qwen2.5-72B": _qwen2(152_064, (8192, 80, 64, 8, 29_568), tied=False),
    "Qwen3-0.6B": _qwen3((1024, 28, 16, 8, 3072), tied=True),
    "Qwen3-1.7B": _qwen3((2048, 28, 16, 8, 6144), tied=True),
    "Qwen3-4B": _qwen3((2560, 36, 32, 8, 9728), tied=True),
    "Qwen3-8B": _qwen3((4096, 36, 32, 8, 12_288), tied=False),
    "Qwen3-14B": _qwen3((5120, 40, 40, 8, 17_408), tied=False),
    "Qwen3-32B": _qwen3((5120, 64, 64, 8, 25_600), tied=False),
    "SmolLM2-135M": _llama(
        49_152,
        (576, 30, 9, 3, 1536),
        head_size=64,
        rope_theta=100_000.0,
        tie_embeddings=True,
    ),
    "Llama-2-7b": _llama(32_000, (4096, 32, 32, 32, 11_008), rope_theta=10_000.0),
    "Llama-2-13b": _llama(32_000, (5120, 40, 40, 40, 13_824), rope_theta=10_000.0),
    "Llama-2-34b": _llama(32_000, (8192, 48, 64, 8, 22_016), rope_theta=10_000.0),
    "Llama-2-70b": _llama(32_000, (8192, 80, 64, 8, 28_672), rope_theta=10_000.0),
    "Llama-3.2-1B": _llama(
        128_256,
        (2048, 16, 32, 8, 8192),
        head_size=64,
        tie_embeddings=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "Llama-3.2-3B": _llama(
        128_256,
        (3072, 28, 24, 8, 8192),
        tie_embeddings=True,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "Llama-3.1-8B": _llama(128_256, (4096, 32, 32, 8, 14_336), rope_scaling=_LLAMA3_ROPE),
    "Llama-3.1-70B": _llama(128_256, (8192, 80, 64, 8, 28_672), rope_scaling=_LLAMA3_ROPE),
    "Llama-3.3-70B": _llama(128_256, (8192, 80, 64, 8, 28_672), rope_scaling=_LLAMA3_ROPE),
}


def known_shape(name: str) -> Shape:
    """Returns the shape of a published model by its name, whatever suffix that carries.

    Raises:
      ConfigError: If no known name begins `name`.
    """
    found = [known for known in SHAPES if name.lower().startswith(known.lower())]
    if not found:
        raise ConfigError(
            [
                f"config.model.path: {name!r} is no folder here and no published model known by"
                f" name; give a folder with config.json, or one of {', '.join(SHAPES)}"
            ]
        )
    return SHAPES[max(found, key=len)]


def shape_of(config: ModelConfig, vocab_size: int) -> Shape:
    """Returns the shape of a run's policy: of its folder, by the folder's name, or as configured.

    Args:
      config: Of the model.
      vocab_size: Of a random model; a folder or a name brings its own.
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
