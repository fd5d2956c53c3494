"""Compares plans with compilers: `python benchmarks/plan.py [--only=WORD,...] [--table]`.

Compiles the programs of a run for TPU topologies (no TPU needed; extra `[tpu]`), for GPUs (no GPU
needed; extra `[cuda]`) and for fake CPU devices, saves the reports of the compilers in
`benchmarks/plan_reports.json`, and prints them beside the analytic plan. A combination in that file
is not compiled again.
"""

import dataclasses
import json
import os
import pathlib
import runpy
import time
from collections.abc import Iterator

import jax
from absl import app, flags

from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import default_config_dict, from_config_dict
from jaxrl_llm.planning import compile_only_devices, compiled_memory, memory, resolve_sizes
from jaxrl_llm.planning.accelerators import GIB, device_by_name, topology_devices
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import RunSetting
from jaxrl_llm.sharding.mesh import mesh_sizes

REPORTS = pathlib.Path(__file__).with_name("plan_reports.json")
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
TABLE = flags.DEFINE_bool("table", False, "Compile nothing, print the saved reports.")
ONLY = flags.DEFINE_list("only", [], "Combinations whose name contains one of these.")

ON_CPU = {"cpu": 8, "one cpu": 1}
EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
TINY = "SmolLM2-135M"
SMALL, MIDDLE, LARGE = "Qwen2.5-0.5B", "Llama-3.2-3B", "Llama-3.1-8B"
HUGE = "Llama-3.1-70B"


@dataclasses.dataclass(frozen=True)
class Combination:
    """One run to plan: its devices, its model, and its differences from `base`."""

    topology: str  # "cpu": eight fake devices, "one cpu": one of them; "h100 x 8": GPUs
    model: str
    settings: dict
    programs: tuple[str, ...] = ("train",)
    config: str = ""  # a file of `configs/` without its suffix, instead of `base`

    @property
    def name(self) -> str:
        changed = " ".join(f"{k.partition('.')[2]}={v}" for k, v in self.settings.items())
        return f"{self.topology} {self.config or self.model} {changed}".strip()


def base() -> dict:
    """Returns PPO on sequences of 512 + 512 tokens with bfloat16 compute."""
    return {
        "algorithm.recipe": "ppo",
        "algorithm.samples_per_prompt": 1,
        "model.compute_dtype": "bfloat16",
        "model.remat": "full",
        "data.max_prompt_tokens": 512,
        "rollout.max_response_tokens": 512,
        "rollout.num_slots": 64,
        "trainer.prompts_per_step": 256,
        "trainer.minibatch_size": 128,
        "trainer.max_tokens_per_microbatch": 2048,
        "rewards.functions.answer": {"function": "arithmetic"},
    }


def made(combination: Combination) -> RLConfig:
    """Returns the config of a combination."""
    if combination.config:
        config = runpy.run_path(str(CONFIGS / f"{combination.config}.py"))["get_config"]()
        settings = combination.settings
    else:
        config, settings = default_config_dict(), {**base(), **combination.settings}
    for key, value in settings.items():
        *groups, last = key.split(".")
        group = config
        for name in groups:
            group = group[name]
        group[last] = value
    return from_config_dict(config)


HALF = {
    "model.param_dtype": "bfloat16",
    "trainer.optimizer.moment_dtype": "bfloat16",
    "critic.optimizer.moment_dtype": "bfloat16",
}
GRPO = {
    "algorithm.recipe": "grpo",
    "algorithm.samples_per_prompt": 4,
    "trainer.prompts_per_step": 64,
}
# 16 sequences of GSM8K, so short that layers keep their attention weights.
REAL = {
    "algorithm.recipe": "grpo",
    "algorithm.samples_per_prompt": 4,
    "trainer.prompts_per_step": 4,
    "trainer.minibatch_size": 16,
    "data.max_prompt_tokens": 256,
    "rollout.max_response_tokens": 96,
    "rollout.num_slots": 16,
    "model.compute_dtype": "float32",
}
LONG = {"data.max_prompt_tokens": 1024, "rollout.max_response_tokens": 1024}
MUCH = {"trainer.max_tokens_per_microbatch": 4096, **LONG}
# What a template leaves to the plan.
OPEN = {"trainer.max_tokens_per_microbatch": 16_384}
# Fake CPU devices compute in float32: the CPU has no bfloat16 arithmetic of its own.
WHOLE = {"model.compute_dtype": "float32"}
ALL = ("prefill", "decode", "score", "score_critic", "train", "reshard", "reshard_layer")
OF_GRPO = tuple(name for name in ALL if name != "score_critic")
MESHES = (
    {"mesh.fsdp": 8},
    {"mesh.fsdp": 4, "mesh.tensor": 2},
    {"mesh.data": 8, "mesh.fsdp": 1},
)
COMBINATIONS = [
    Combination("v5p:2x2x2", LARGE, {"mesh.fsdp": 8, **MUCH}, ALL),
    Combination("v5e:4x4", LARGE, {"mesh.fsdp": 4, "mesh.tensor": 4, **HALF}, ALL),
    Combination(
        "v5e:4x4",
        LARGE,
        {"mesh.fsdp": 4, "mesh.tensor": 4, "mesh.rollout": "train", **HALF},
        ("decode", "reshard", "reshard_layer"),
    ),
    Combination(
        "v5p:4x4x4", HUGE, {"mesh.fsdp": 16, "mesh.tensor": 4, **LONG}, ("train", "decode", "score")
    ),
    *(
        Combination("cpu", SMALL, {**mesh, "model.remat": remat, **WHOLE}, programs)
        for mesh in MESHES
        for remat, programs in (
            ("full", ("train", "score", "score_critic", "decode")),
            ("dots", ("train",)),
            ("none", ("train",)),
        )
    ),
    *(
        Combination("cpu", SMALL, {"mesh.fsdp": 8, "model.remat": remat, **WHOLE})
        for remat in ("attention", "projections", "offload_full", "offload_attention")
    ),
    Combination("cpu", SMALL, {"mesh.data": 2, "mesh.fsdp": 4, **WHOLE}),
    Combination("cpu", SMALL, {"mesh.fsdp": 8, **GRPO, **WHOLE}),
    Combination("cpu", SMALL, {"mesh.fsdp": 8, "lora.rank": 32, **GRPO, **WHOLE}),
    Combination("cpu", MIDDLE, {"mesh.fsdp": 8, **WHOLE}, ("train", "score", "decode")),
    Combination("cpu", MIDDLE, {"mesh.fsdp": 4, "mesh.tensor": 2, **WHOLE}),
    Combination("cpu", MIDDLE, {"mesh.data": 2, "mesh.fsdp": 4, "model.remat": "dots", **WHOLE}),
    Combination("cpu", MIDDLE, {"mesh.fsdp": 8, "model.remat": "offload_full", **WHOLE}),
    Combination("cpu", MIDDLE, {"mesh.fsdp": 8, **GRPO, **WHOLE}),
    Combination("cpu", LARGE, {"mesh.fsdp": 8, **WHOLE}, ("train", "score")),
    Combination("cpu", LARGE, {"mesh.fsdp": 2, "mesh.tensor": 4, **WHOLE}),
    Combination("cpu", LARGE, {"mesh.fsdp": 8, "model.remat": "offload_full", **GRPO, **WHOLE}),
    *(
        Combination(
            "one cpu",
            TINY,
            {**REAL, "trainer.max_tokens_per_microbatch": tokens, "model.remat": remat, **more},
            ("train", "score", "decode")
            if (tokens, remat, more) == (512, "none", {})
            else ("train",),
        )
        for tokens, remat, more in (
            (512, "none", {}),
            (512, "full", {}),
            (1536, "none", {}),
            (1536, "full", {}),
            (1536, "dots", {}),
            (4096, "none", {}),
            (4096, "full", {}),
            (16_384, "none", {"trainer.shared_prompts": "off"}),
            (512, "none", {"lora.rank": 16}),
            (512, "dots", {"lora.rank": 16}),
            (512, "projections", {"lora.rank": 16}),
            (1536, "none", {"lora.rank": 16}),
            (1536, "dots", {"lora.rank": 16}),
            (1536, "full", {"lora.rank": 16}),
            (4096, "full", {"lora.rank": 16}),
        )
    ),
    Combination("v5e:2x2", SMALL, {"mesh.fsdp": 4}, ("train", "score", "decode")),
    Combination("v5e:2x2", SMALL, {"mesh.fsdp": 2, "mesh.tensor": 2, **GRPO}),
    Combination("v5e:2x2", SMALL, {"mesh.fsdp": 4, "model.remat": "dots"}),
    Combination("v5e:2x2", SMALL, {"mesh.fsdp": 4, "model.remat": "offload_full"}),
    Combination("v5e:2x2", SMALL, {"mesh.data": 2, "mesh.fsdp": 2}),
    Combination("v5e:2x4", MIDDLE, {"mesh.fsdp": 4, "mesh.tensor": 2}, ("train", "decode")),
    Combination("v5p:2x2x1", MIDDLE, {"mesh.fsdp": 4, **GRPO}),
    Combination("v5p:2x2x2", LARGE, {"mesh.fsdp": 4, "mesh.tensor": 2, "model.remat": "attention"}),
    Combination("v5p:8x8x8", "DeepSeek-V3", {}, OF_GRPO, "grpo_deepseek_v3"),
    Combination("h100 x 8", LARGE, {"mesh.fsdp": 8, **MUCH}, ALL),
    Combination("h100 x 8", LARGE, {"mesh.fsdp": 8, **MUCH, **GRPO}, ("train", "score")),
    Combination("h100 x 8", LARGE, {"mesh.fsdp": 8, "model.remat": "offload_full", **MUCH, **GRPO}),
    Combination("h100 x 8", MIDDLE, {"mesh.fsdp": 4, "mesh.tensor": 2}, ALL),
    Combination("h100 x 1", SMALL, {"mesh.fsdp": 1, **GRPO}, OF_GRPO),
    Combination("h100 x 1", SMALL, OPEN, OF_GRPO, "grpo_qwen2.5_0.5b_gsm8k"),
    Combination("a100 x 8", MIDDLE, {"mesh.fsdp": 8, "model.remat": "dots"}, ("train", "score")),
    Combination("h200 x 1", SMALL, {"mesh.fsdp": 1, **LONG, **GRPO}, ("train", "decode")),
    Combination("b200 x 1", SMALL, {"mesh.fsdp": 1, **LONG, **GRPO}, ("train", "decode")),
]


@dataclasses.dataclass(frozen=True)
class Row:
    """One program of one combination: planned and reported bytes."""

    combination: str
    program: str
    planned: float
    reported: float

    @property
    def error(self) -> float:
        return self.planned / self.reported - 1


def absent_devices(combination: Combination) -> tuple[str, int]:
    """Arguments of `compile_only_devices.devices_by_name`; the count is for GPUs alone."""
    kind, _, count = combination.topology.partition(" x ")
    return kind, int(count or 0)


def setting(combination: Combination) -> RunSetting:
    """Returns the input of the analytic plan of a combination."""
    config, (kind, count) = made(combination), absent_devices(combination)
    if combination.topology in ON_CPU:
        backend, count = "cpu", ON_CPU[combination.topology]
    elif count:
        backend = device_by_name(kind).backend
    else:
        device, count = topology_devices(kind)
        backend = device.backend
    sizes = mesh_sizes(config.mesh, count)
    return RunSetting(config, SHAPES[combination.model], (), sizes, backend)


def compared(reports: dict) -> Iterator[Row]:
    """Yields plan and report of every program in `reports` that could be compiled."""
    for combination in COMBINATIONS:
        planned = memory.program_parts(setting(combination))
        for program, report in reports.get(combination.name, {}).items():
            if isinstance(report, dict):
                total = compiled_memory.CompiledMemory(**report).total_bytes
                yield Row(combination.name, program, planned[program].total, total)


def kept() -> dict:
    """Returns the reports in the file, by combination and program."""
    return json.loads(REPORTS.read_text()) if REPORTS.exists() else {}


def keep(name: str, program: str, report: dict | str) -> None:
    found = kept()  # read again: another process may have added to it
    found.setdefault(name, {})[program] = report
    REPORTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def main(_):
    for combination in [] if TABLE.value else COMBINATIONS:
        if ONLY.value and not any(word in combination.name for word in ONLY.value):
            continue
        config = made(combination)
        known = kept().get(combination.name, {})
        wanted = [name for name in combination.programs if name not in known]
        if not wanted:
            continue
        count = ON_CPU.get(combination.topology, 0)
        devices = jax.devices()[:count] or compile_only_devices.devices_by_name(
            *absent_devices(combination)
        )
        shape = SHAPES[combination.model]
        config = resolve_sizes.choose_sizes(config, shape, devices)
        programs = compiled_memory.program_lowerings(
            config, compiled_memory.abstract_models(config, shape, devices)
        )
        for name in wanted:
            start = time.perf_counter()
            try:
                report = dataclasses.asdict(compiled_memory.compiled_memory(programs[name]))
            except compiled_memory.CompilerOutOfMemory as error:
                report = str(error)
            keep(combination.name, name, report)
            print(combination.name, name, report, f"{time.perf_counter() - start:.1f}s", flush=True)
            jax.clear_caches()
    print("| combination | program | planned GiB | compiler GiB | error |\n|---|---|---|---|---|")
    for row in compared(kept()):
        planned, reported = row.planned / GIB, row.reported / GIB
        print(
            f"| {row.combination} | {row.program} | {planned:.2f} | {reported:.2f}"
            f" | {row.error:+.1%} |"
        )


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {EIGHT_DEVICES}"
    # Compilations for absent devices cannot be read back from the cache.
    jax.config.update("jax_enable_compilation_cache", False)
    app.run(main)
