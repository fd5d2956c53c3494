"""Programs of GPUs that are not here: memory, kernels, and what devices send each other."""

import dataclasses
import json
import re

import pytest
from commands import call

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import compile_only_devices, compiled_memory, memory
from jaxrl_llm.planning.accelerators import device_by_name
from jaxrl_llm.planning.published_shapes import SHAPES
from jaxrl_llm.planning.run_setting import RunSetting
from jaxrl_llm.sharding import reshard
from jaxrl_llm.sharding.mesh import mesh_sizes

SHAPE = dataclasses.replace(
    SHAPES["Llama-3.1-8B"], num_layers=4, hidden_size=1024, num_heads=8, mlp_size=4096
)
VALUES = {
    "algorithm": {"recipe": "ppo", "samples_per_prompt": 1},
    "model": {"compute_dtype": "bfloat16", "remat": "full"},
    "data": {"max_prompt_tokens": 1024},
    "rollout": {"max_response_tokens": 1024, "num_slots": 64},
    "trainer": {
        "prompts_per_step": 64,
        "minibatch_size": 64,
        "max_tokens_per_microbatch": 4096,
    },
    "rewards": {"functions": {"answer": {"function": "arithmetic"}}},
    "mesh": {"fsdp": 8},
}


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("l4", 1, "how to compile for them is not known.*a TPU --topology, or a --device of a100"),
        ("h100", 12, "devices: 12 x h100; use 1 to 8, or a number of whole hosts of 8"),
        ("v9:2x2", 0, "topology 'v9:2x2'"),
    ],
)
def test_devices_without_a_compiler_are_refused(name, count, message):
    with pytest.raises(ConfigError, match=message):
        compile_only_devices.devices_by_name(name, count)


def compiled(devices, name, **groups):
    """Returns the plan's bytes of a program, and the program."""
    config = from_config_dict({**VALUES, **groups})
    models = compiled_memory.abstract_models(config, SHAPE, devices)
    sizes = mesh_sizes(config.mesh, len(devices))
    planned = memory.program_parts(
        RunSetting(config, SHAPE, (), sizes, device_by_name("h100").backend)
    )[name]
    return planned.total, compiled_memory.program_lowerings(config, models)[name]().compile()


def total(program) -> int:
    found = program.memory_analysis()
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + outputs + found.temp_size_in_bytes


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["train", "score", "prefill", "decode"])
def test_programs_of_gpus(name, gpu_devices):
    planned, program = compiled(gpu_devices("h100", 8), name)
    text = program.as_text()
    attends = name in ("train", "score", "prefill")  # all of a row at one time
    assert ("__cudnn$fmha" in text) == attends
    assert ("Backward" in text) == (name == "train")
    assert ("gpu.triton" in text) == (name == "decode")  # the kernel that reads pages
    assert planned == pytest.approx(total(program), rel=0.15)  # tiny: what is not counted shows
    # Weights are sent in the compute dtype, each once a pass; summed gradients of a layer too.
    gathers = [c for c in reshard.collectives(text) if c.kind == "all-gather"]
    assert not attends or not any("f32" in gather.dtypes for gather in gathers)
    if name == "score":
        layers = SHAPE.num_layers * sum(
            gather.received_bytes for gather in gathers if gather.received_bytes > 1e5
        )
        rest = SHAPE.vocab_size * SHAPE.hidden_size * 2
        of_layers = 2 * (memory.num_params(SHAPE) - 2 * SHAPE.vocab_size * SHAPE.hidden_size)
        assert layers <= 1.1 * of_layers + SHAPE.num_layers * rest
    # No stack of layers is turned as a whole before a loop reads it.
    assert not re.search(r"transpose\S* = f32\[\d+,4,\d+\]", text) or name == "train"


@pytest.mark.nightly
def test_offloaded_activations_are_counted_as_host_memory(gpu_devices):
    devices = gpu_devices("h100", 8)
    config = from_config_dict({**VALUES, "model": {**VALUES["model"], "remat": "offload_full"}})
    models = compiled_memory.abstract_models(config, SHAPE, devices)
    report = compiled_memory.compiled_memory(
        compiled_memory.program_lowerings(config, models)["train"]
    )
    assert report.host_bytes > 0


@pytest.mark.nightly
def test_a_plan_asks_the_compiler_of_gpus(gpu_devices, capsys):
    gpu_devices("h100", 8)
    flags = ["--config=configs/grpo_tiny.py", "--device=h100", "--devices=8", "--compile", "--json"]
    code, out, log = call(capsys, "plan", *flags)
    assert code == 0, log
    found = json.loads(out)["compiled"]
    assert set(found) >= {"train", "score", "prefill", "decode", "reshard"}
    assert all(isinstance(size, float | int) and size > 0 for size in found.values())
