"""The closed form against the compiler, and what must hold of any estimate."""

import dataclasses
import importlib.util
import pathlib
import re

import jax
import pytest

from jaxrl_llm.config.agent import AgentConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.models.architecture import LayerType, VisionArchitecture
from jaxrl_llm.planning import compiled_memory, memory, memory_plan
from jaxrl_llm.planning.accelerators import DEVICES
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import RunSetting, num_layer_params, num_params

VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 1},
    "model": {"remat": "full"},
    "data": {"max_prompt_tokens": 128},
    "rollout": {"max_response_tokens": 128, "num_slots": 16},
    "trainer": {
        "prompts_per_step": 64,
        "minibatch_size": 32,
        "max_tokens_per_microbatch": 512,
    },
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
    "mesh": {"fsdp": 4, "tensor": 2},
}
SHAPE = dataclasses.replace(SHAPES["Qwen2.5-0.5B"], num_layers=4)


def setting(shape=SHAPE, split=(1, 4, 1, 2), backend="cpu", **groups) -> RunSetting:
    values = {**VALUES, **{name: {**VALUES.get(name, {}), **g} for name, g in groups.items()}}
    sizes = dict(zip(("data", "fsdp", "sequence", "tensor"), split, strict=True)) | {"expert": 1}
    return RunSetting(from_config_dict(values), shape, (), sizes, backend)


def test_a_window_costs_its_tokens_not_those_of_the_sequence():
    layers = (LayerType(window=1024), LayerType(), LayerType(chunk=1024), LayerType(window=20000))
    shape = dataclasses.replace(SHAPE, layers=layers)
    trainer = {"trainer": {"max_tokens_per_microbatch": 32768}}
    lengths = {"max_response_tokens": 32640, "num_slots": 16}

    def cached_tokens(**groups):
        """Tokens that one slot caches, summed over the layers, with a sequence in every slot."""
        rollout = {**lengths, **groups.pop("rollout", {})}
        ours = setting(shape, backend="tpu", rollout=rollout, **trainer)
        ours = dataclasses.replace(ours, config=dataclasses.replace(ours.config, **groups))
        return ours.cache_bytes(16, 32768) / ours.entry_bytes(16)

    # Pages of 128: a window of 1,024 may begin within one. Half of 20,000 would be no saving.
    assert cached_tokens() == 1152 + 32768 + 1152 + 32768
    assert cached_tokens(rollout={"window_cache": "sequence"}) == 4 * 32768
    # Episodes leave their slots between turns, and go on from pages.
    agent = AgentConfig(harness="package.module:function")
    assert cached_tokens(agent=agent) == 4 * 32768
    assert cached_tokens(agent=agent, rollout={"window_cache": "window"}) == cached_tokens()
    # More slots fit into the same memory.
    slots = []
    for kept in ("window", "sequence"):
        rollout = lengths | {"num_slots": 0, "window_cache": kept}
        ours = setting(shape, backend="tpu", rollout=rollout, **trainer)
        slots.append(dataclasses.replace(ours, memory_bytes=1 << 30).num_slots)
    assert slots[0] > slots[1]


def combinations():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "plan.py"
    spec = importlib.util.spec_from_file_location("plan_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    ["train", "decode"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("score", "score_critic")],
)
def test_within_a_tenth_of_the_compiler(name):
    """Compiled here and now, on fake CPU devices."""
    ours = setting()
    models = compiled_memory.abstract_models(ours.config, SHAPE, jax.devices())
    report = compiled_memory.compiled_memory(
        compiled_memory.program_lowerings(ours.config, models)[name]
    )
    assert memory.program_parts(ours)[name].total == pytest.approx(report.total_bytes, rel=0.1)


# Weights that outweigh activations, so that the peak is where the optimizer is.
HEAVY = dataclasses.replace(
    SHAPE, num_layers=8, vocab_size=512, hidden_size=1024, num_heads=16, num_kv_heads=8,
    head_size=64, mlp_size=3072,
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("split", [(1, 4, 1, 2), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("name, dtype", [("muon", "float32"), ("muon", "int8"), ("adamw", "int8")])
def test_optimizers_are_near_the_compiler(name, dtype, split):
    ours = setting(
        HEAVY,
        split,
        algorithm={"recipe": "grpo", "samples_per_prompt": 2},
        mesh={"fsdp": split[1], "tensor": split[3]},
        data={"max_prompt_tokens": 32},
        rollout={"max_response_tokens": 32},
        trainer={
            "prompts_per_step": 8,
            "minibatch_size": 8,
            "max_tokens_per_microbatch": 256,
            "optimizer": {"name": name, "moment_dtype": dtype},
        },
    )
    models = compiled_memory.abstract_models(ours.config, HEAVY, jax.devices()[: ours.num_devices])
    lowering = compiled_memory.program_lowerings(ours.config, models)["train"]
    report = compiled_memory.compiled_memory(lowering)
    planned = memory.program_parts(ours)["train"]
    # The compiler's flags of the suite fuse more of the layer loops; by default ones it is a tenth.
    assert 0.9 < planned.total / report.total_bytes < 1.2
    plain = dataclasses.replace(ours.config.trainer.optimizer, name="adamw", moment_dtype="float32")
    trainer = dataclasses.replace(ours.config.trainer, optimizer=plain)
    of_adamw = dataclasses.replace(ours, config=dataclasses.replace(ours.config, trainer=trainer))
    assert planned.optimizer < 0.55 * memory.program_parts(of_adamw)["train"].optimizer


WITH_TOWER = dataclasses.replace(
    SHAPES["Qwen2.5-VL-3B"],
    num_layers=4,
    hidden_size=1024,
    num_heads=8,
    mlp_size=4096,
    vision=VisionArchitecture(8, 640, 8, 1664, full_layers=(3, 7)),
)


@pytest.mark.parametrize(
    "name, rate",
    [
        ("tower", 0.0),
        *(
            pytest.param(name, rate, marks=pytest.mark.nightly)
            for name in ("score", "train")
            for rate in (0.0, 1e-6)
        ),
    ],
)
def test_a_tower_and_its_images_are_within_a_tenth_of_the_compiler(name, rate):
    ours = setting(
        WITH_TOWER,
        algorithm={"recipe": "grpo", "samples_per_prompt": 2},
        data={"max_prompt_tokens": 512},
        trainer={
            "prompts_per_step": 32,
            "max_tokens_per_microbatch": 1280,
            "tower_learning_rate": rate,
        },
    )
    models = compiled_memory.abstract_models(ours.config, WITH_TOWER, jax.devices())
    report = compiled_memory.compiled_memory(
        compiled_memory.program_lowerings(ours.config, models)[name]
    )
    assert memory.program_parts(ours)[name].total == pytest.approx(report.total_bytes, rel=0.1)


SHARED = {
    "algorithm": {"recipe": "grpo", "samples_per_prompt": 4},
    "data": {"max_prompt_tokens": 192},
    "rollout": {"max_response_tokens": 64, "num_slots": 16},
    "mesh": {"fsdp": 1, "tensor": 1},
}


@pytest.mark.parametrize(
    "tokens, remat, rank, shared",
    [
        pytest.param(4096, "none", 0, True, marks=pytest.mark.slow),
        (1024, "none", 16, True),
        pytest.param(512, "none", 0, False, marks=pytest.mark.slow),
    ],
)
def test_rows_of_shared_prompts_and_adapters(tokens, remat, rank, shared):
    """On one CPU device, whose layers keep attention weights of rows as short as these."""
    shape = dataclasses.replace(SHAPES["SmolLM2-135M"], num_layers=8)
    sizes = {
        "prompts_per_step": 4,
        "minibatch_size": 16,
        "max_tokens_per_microbatch": tokens,
        "shared_prompts": "auto" if shared else "off",
    }
    groups = {**SHARED, "model": {"remat": remat}, "lora": {"rank": rank}, "trainer": sizes}
    ours = setting(shape, (1, 1, 1, 1), **groups)
    models = compiled_memory.abstract_models(ours.config, shape, jax.devices()[:1])
    laid = compiled_memory.abstract_packed(ours.config, models, 16).microbatches
    rows = ours.rows(16)
    assert laid.segment_ids.shape[1:] == (rows.rows, rows.width)
    assert laid.scored_columns.shape[-1] == rows.scored_tokens
    assert bool(laid.prefix_ids.shape[-1]) == shared
    report = compiled_memory.compiled_memory(
        compiled_memory.program_lowerings(ours.config, models)["train"]
    )
    assert memory.program_parts(ours)["train"].total == pytest.approx(report.total_bytes, rel=0.1)


def test_within_a_tenth_of_every_kept_report():
    """Reports of TPU topologies, GPUs and larger models, kept because they take minutes each."""
    benchmark = combinations()
    rows = list(benchmark.compared(benchmark.kept()))
    assert len({row.combination for row in rows}) >= 24
    gpus = [row for row in rows if re.match(r"[abh]\d00 x", row.combination)]
    assert len(gpus) >= 30
    kinds = {row.combination.split()[0] for row in gpus}
    assert kinds == {"a100", "h100", "h200", "b200"}
    wrong = [row for row in rows if abs(row.error) > 0.1]
    # What is not understood yet: scoring by 70B on v5p, where 0.9 GiB are missing.
    beyond = [row for row in wrong if "70B" in row.combination and row.program == "score"]
    assert wrong == beyond and len(beyond) <= 1, "\n".join(map(str, wrong))


def test_weights_and_optimizer_are_exact():
    ours = setting()
    models = compiled_memory.abstract_models(ours.config, SHAPE, jax.devices())
    state = compiled_memory.abstract_state(ours.config, models)
    held = sum(
        leaf.dtype.itemsize * leaf.size // leaf.sharding.num_devices
        if not leaf.sharding.is_fully_replicated
        else leaf.dtype.itemsize * leaf.size
        for leaf in jax.tree.leaves((state.policy, state.critic))
        if leaf.ndim
    )
    parts = memory.program_parts(ours)["train"]
    assert parts.weights + parts.optimizer == held


def test_published_sizes():
    billions = {"Qwen2.5-0.5B": 0.494, "Llama-3.2-3B": 3.213, "Llama-3.1-8B": 8.030}
    billions |= {"Qwen3-8B": 8.191, "Qwen2.5-32B": 32.764, "Llama-3.1-70B": 70.554}
    for name, size in billions.items():
        assert num_params(SHAPES[name]) / 1e9 == pytest.approx(size, abs=1e-3)


def test_low_precision_leaves_room_for_more_slots():
    def of(memory_bytes, **low):
        ours = setting(backend="tpu", rollout={"num_slots": 0, **low})
        return dataclasses.replace(ours, memory_bytes=memory_bytes)

    # A quarter of the memory is a byte too small for all 64 sequences of a step, of which each has
    # its prompt and half of its response on average.
    plain = of(0.0)
    logits = 3 * 4 * (64 / plain.row_shards) * plain.tensor_shard(SHAPE.vocab_size)
    needed = plain.cache_bytes(64, 128 + 128 / 2) + logits
    plain, int8, fp8 = (
        of(4 * (needed - 1), **low)
        for low in ({}, {"quantization": "int8"}, {"cache_dtype": "fp8"})
    )
    assert (plain.num_slots, int8.num_slots, fp8.num_slots) == (32, 32, 64)
    assert fp8.cache_bytes(64, 256) == plain.cache_bytes(64, 256) / 4
    # Embedding and norms stay; of 24 layers these are the first four.
    saved = plain.rollout_bytes - int8.rollout_bytes
    assert saved == pytest.approx(0.75 * 4 * num_layer_params(plain.rollout_params), rel=0.01)
    assert fp8.rollout_bytes == plain.rollout_bytes


def test_samples_of_a_prompt_count_it_once():
    """Groups of 16 on prompts of 1024 tokens: a quarter of slots times the longest."""
    sizes = {
        "data": {"max_prompt_tokens": 1024},
        "trainer": {"prompts_per_step": 32, "max_tokens_per_microbatch": 2048},
    }
    rollout = {"max_response_tokens": 256, "num_slots": 64}
    grouped, alone = (
        setting(rollout=rollout, algorithm={"samples_per_prompt": n}, **sizes) for n in (16, 1)
    )
    assert alone.cache_tokens == 64 * (1024 + 256)
    assert grouped.cache_tokens == 64 * 256 + 4 * 1024 == alone.cache_tokens / 4
    caches = [memory.program_parts(each)["decode"].cache for each in (grouped, alone)]
    assert caches[0] < 0.26 * caches[1]  # with the tokens that have not joined it


def test_smaller_settings_need_less_memory():
    """Each saving saves, and leaves what it is not about alone."""
    whole = memory.program_parts(setting(model={"remat": "none"}, backend="tpu"))
    for remat in ("dots", "full"):
        saving = memory.program_parts(setting(model={"remat": remat}, backend="tpu"))
        assert saving["train"].activations < whole["train"].activations
        assert saving["train"].optimizer == whole["train"].optimizer
        assert saving["decode"] == whole["decode"]
        whole = saving
    more = memory.program_parts(setting(rollout={"max_response_tokens": 128, "num_slots": 32}))
    assert more["decode"].cache == 2 * memory.program_parts(setting())["decode"].cache
    assert memory.peak_bytes(setting(split=(1, 8, 1, 1))) < memory.peak_bytes(
        setting(split=(8, 1, 1, 1))
    )


def test_everything_that_lies_beside_a_program_is_counted_once():
    ours = setting()
    on_device = memory.step_memory(ours)
    assert on_device["train"].optimizer == memory.resident_memory(ours).optimizer
    assert on_device["decode"].weights == memory.resident_memory(ours).weights
    for name, parts in on_device.items():
        freed = name in ("score", "score_critic", "train")
        beside = memory.resident_memory(ours).total - freed * ours.resident_parts("rollout").total
        assert parts.total >= beside


def test_the_plan_knows_its_room():
    plan = memory_plan.make_plan(setting().config, SHAPE, (), DEVICES["v5e"], 8)
    assert plan.fits and plan.free_bytes == DEVICES["v5e"].memory_bytes - plan.peak_bytes
