"""The program of an update and the time to compile it do not grow with the number of layers."""

import dataclasses
import time

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.models.architecture import Architecture, LayerType
from jaxrl_llm.planning import compiled_memory
from jaxrl_llm.planning.published_shapes import SHAPES

EXPERTS = LayerType(experts=True)


def dense(layers: int) -> Architecture:
    return narrow("Llama-3.1-8B", layers, [LayerType()])


def gemma3(layers: int) -> Architecture:
    return narrow("gemma-3-27b", layers, SHAPES["gemma-3-27b"].layer_types[:6])


def gpt_oss(layers: int) -> Architecture:
    return narrow("gpt-oss-20b", layers, SHAPES["gpt-oss-20b"].layer_types[:2])


def deepseek(layers: int) -> Architecture:
    shape = narrow("DeepSeek-V3", layers, [EXPERTS])
    latent = dataclasses.replace(SHAPES["DeepSeek-V3"].latent, kv_rank=128, q_rank=128)
    kinds = (LayerType(),) * 3 + (EXPERTS,) * (layers - 3)
    return dataclasses.replace(shape, layers=kinds, num_kv_heads=4, latent=latent)


def qwen3_moe(layers: int) -> Architecture:
    return narrow("Qwen3-30B-A3B", layers, [EXPERTS])


PATTERNS = {
    "dense": dense,
    "gemma3": gemma3,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek,
    "qwen3_moe": qwen3_moe,
}


def narrow(name: str, layers: int, pattern) -> Architecture:
    """Returns a published model with another depth; its kernels are those of wide ones."""
    of = SHAPES[name].experts
    if of:
        of = dataclasses.replace(of, num=16, per_token=4, size=256, groups=1, top_groups=1)
    return dataclasses.replace(
        SHAPES[name],
        num_layers=layers,
        layers=tuple(pattern) * (layers // len(pattern)),
        hidden_size=512,
        num_heads=4,
        num_kv_heads=2,
        mlp_size=1024,
        vocab_size=8192,
        experts=of,
    )


def update(shape: Architecture, devices):
    """Returns the lowered update of a GRPO run."""
    experts = bool(shape.experts)
    config = from_config_dict(
        {
            "model": {"compute_dtype": "bfloat16", "remat": "full"},
            "algorithm": {"recipe": "grpo", "samples_per_prompt": 8},
            "data": {"max_prompt_tokens": 512},
            "rollout": {"max_response_tokens": 512},
            "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
            "trainer": {"prompts_per_step": 1, "max_tokens_per_microbatch": 2048},
            "mesh": {"fsdp": 2, "expert": 2} if experts else {"fsdp": 4},
        }
    )
    models = compiled_memory.abstract_models(config, shape, devices)
    return compiled_memory.program_lowerings(config, models)["train"]()


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_the_program_of_48_layers_is_as_long_as_that_of_12(name):
    few, many = (update(PATTERNS[name](layers), jax.devices()[:4]) for layers in (12, 48))
    assert few.as_text().count("\n") == many.as_text().count("\n") > 1000


def seconds(shape: Architecture, devices) -> float:
    """Returns processor seconds to trace and compile an update: others may use the machine."""
    start = time.process_time()
    update(shape, devices).compile()
    return time.process_time() - start


@pytest.fixture
def never_cached():
    """Compiles all anew. jax asks only once per process whether to use its cache: so ask again."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def compared(name: str, devices) -> None:
    seconds(dense(6), devices)  # what is done once in a process
    few, many = (
        min(seconds(PATTERNS[name](layers), devices) for _ in range(2)) for layers in (12, 48)
    )
    print(f"{name}: {few:.1f} and {many:.1f} s, {many / few:.2f}")
    assert many <= 1.3 * few


@pytest.mark.nightly
@pytest.mark.parametrize("name", PATTERNS)
def test_48_layers_compile_in_little_more_time_than_12(name, never_cached):
    compared(name, jax.devices()[:4])


@pytest.mark.nightly
@pytest.mark.parametrize("name", PATTERNS)
def test_48_layers_compile_for_tpus_in_little_more_time_than_12(name, never_cached, tpu_devices):
    compared(name, tpu_devices("v5e:2x2"))
