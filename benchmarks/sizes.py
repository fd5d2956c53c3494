"""Tables of `docs/memory_by_size.md`: `python benchmarks/sizes.py` plans the configs of 3B to 671B.

Nothing is allocated and no compiler runs; it takes seconds.
"""

import argparse
import importlib.util
import pathlib
import re
from collections.abc import Iterator, Mapping

from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.planning import memory_plan, pool_placement, resolve_sizes
from jaxrl_llm.planning.memory_plan import MemoryPlan

GIB = 1 << 30
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
SIZES = {"3B": "3b", "8B": "8b", "32B": "32b", "70B": "70b", "671B": "deepseek_v3"}
SLICES = {"ppo": "ppo_70b_slices", "grpo": "grpo_deepseek_v3_slices"}
PARTS = ("weights", "gradients", "optimizer", "activations", "cache", "temporary")


def loaded(name: str) -> tuple[RLConfig, str]:
    """Returns a config of the folder `configs`, and the topology that its docstring names."""
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (topology,) = re.findall(r"`launch/plan.py`, (\S+):", module.__doc__ or "")
    return from_config_dict(module.get_config()), topology


def plan_of(name: str, mesh: Mapping[str, int] = {}) -> tuple[MemoryPlan, str]:
    """Returns the plan of a config on its own devices, which need not be here, and their name.

    Axes of `mesh` take the place of the config's.
    """
    config, topology = loaded(name)
    config = memory_plan.with_changes(config, {f"mesh.{axis}": size for axis, size in mesh.items()})
    return resolve_sizes.make_plan(config, resolve_sizes.topology_target(topology, "", 1)), topology


def by_program(recipe: str) -> Iterator[str]:
    """Yields a table: GiB on a device of each program of each size, on the config's own devices."""
    yield "| config | devices | decode | score | train | peak | device has |"
    yield "|---" * 7 + "|"
    for size in SIZES.values():
        plan, topology = plan_of(f"{recipe}_{size}")
        totals = [plan.programs[name].total / GIB for name in ("decode", "score", "train")]
        cells = [f"`{recipe}_{size}`", f"`{topology}`", *(f"{total:.1f}" for total in totals)]
        cells += [f"{plan.peak_bytes / GIB:.1f}", f"{plan.device.memory_bytes / GIB:.1f}"]
        yield "| " + " | ".join(cells) + " |"


def by_part(recipe: str) -> Iterator[str]:
    """Yields a table: what the training program of each size consists of, GiB on a device."""
    yield "| config | " + " | ".join(PARTS) + " |"
    yield "|---" * (1 + len(PARTS)) + "|"
    for size in SIZES.values():
        program = plan_of(f"{recipe}_{size}")[0].programs["train"]
        cells = [f"{getattr(program, part) / GIB:.2f}" for part in PARTS]
        yield f"| `{recipe}_{size}` | " + " | ".join(cells) + " |"


def by_slices(recipe: str) -> Iterator[str]:
    """Yields a table: a config of several slices with its stages, and without them."""
    name = SLICES[recipe]
    mesh = loaded(name)[0].mesh
    flat = {"stage": 1, "stage_rounds": 1}
    meshes = {
        "stages": {},
        "weights gathered over slices": flat | {"fsdp": mesh.stage * mesh.fsdp},
        "all weights on each slice": flat | {"data": mesh.stage},
    }
    yield f"| `{name}` | mesh | peak | device has | seconds a step |"
    yield "|---" * 5 + "|"
    for what, changes in meshes.items():
        plan, _ = plan_of(name, changes)
        cells = [
            what,
            memory_plan.mesh_axes_text(plan.setting.mesh),
            f"{plan.peak_bytes / GIB:.1f}",
        ]
        cells += [f"{plan.device.memory_bytes / GIB:.1f}"]
        cells += [f"{pool_placement.step_speed(plan).step_s:.0f}" if plan.fits else "does not fit"]
        yield "| " + " | ".join(cells) + " |"


TABLES = {"program": by_program, "part": by_part, "slices": by_slices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", choices=TABLES, default="program")
    parser.add_argument("--recipe", choices=("ppo", "grpo"), default="grpo")
    options = parser.parse_args()
    print("\n".join(TABLES[options.table](options.recipe)))


if __name__ == "__main__":
    main()
