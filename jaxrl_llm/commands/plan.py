"""Prints the memory and time of a run before it starts."""

import json
import pathlib
from typing import Any

from absl import logging

from jaxrl_llm import errors
from jaxrl_llm.algorithms import requirements
from jaxrl_llm.commands.options import PlanOptions
from jaxrl_llm.config import bridge
from jaxrl_llm.planning import (
    largest_models,
    memory_plan,
    plan_report,
    pool_placement,
    resolve_sizes,
)
from jaxrl_llm.sharding import mesh as mesh_lib


def _compiled_programs(plan: memory_plan.MemoryPlan, devices) -> dict[str, Any]:
    # Imported here: it takes seconds, longer than a plan.
    from jaxrl_llm.planning import compiled_memory

    return compiled_memory.compiled_programs(plan, devices)


def main(options: PlanOptions) -> None:
    if options.config is None:
        _print_largest_models(options)
        return
    if options.chart:
        errors.raise_flag_problems(plan_report.chart_problems(options.chart))
        errors.check_package("matplotlib", "plot", "--chart:")
    config = options.config
    if config.learns_from_samples:
        requirements.check_functions(config.require_rl().algorithm)
        for warning in requirements.warnings(config.require_rl()):
            logging.warning("%s", warning)
    if (loss := config.preference_loss) is not None:
        requirements.check_preference_loss(loss)
    if not config.learns_from_samples and (options.compile or options.placement):
        flag = "compile" if options.compile else "placement"
        errors.raise_flag_problems([(flag, "is of job='rl' alone; leave it out")])
    for warning in config.warnings():
        logging.warning("%s", warning)
    target = _target(options)
    plan = resolve_sizes.make_plan(resolve_sizes.fit_mesh(config, target), target)
    compiled = _compiled_programs(plan, target.devices) if options.compile else {}
    nearest_fit = memory_plan.nearest_fit(plan)
    if options.json:
        report_json = plan_report.to_json(plan, nearest_fit, options.price)
        compiled_json = plan_report.compiled_to_json(plan, compiled)
        print(json.dumps({**report_json, **compiled_json}))
    else:
        _print(options, plan, compiled, nearest_fit)
    if options.chart:
        plan_report.save_chart(plan, options.chart)
    if options.fit:
        _write_config(options.fit, plan if plan.fits else nearest_fit.plan)


def _target(options: PlanOptions) -> resolve_sizes.HardwareTarget:
    if not (options.topology or options.device):
        return resolve_sizes.local_target(mesh_lib.run_devices())
    return resolve_sizes.topology_target(options.topology, options.device, options.devices)


def _print_largest_models(options: PlanOptions) -> None:
    target = _target(options)
    rows = list(largest_models.largest_models(target))
    print(largest_models.table(rows, target))
    if options.fit:
        plans = [row.plan for row in rows if row.job.startswith(options.job) and row.plan]
        if not plans:
            raise errors.ConfigError(f"--fit: no model fits for --job={options.job}")
        _write_config(options.fit, plans[-1])


def _write_config(path: str, plan: memory_plan.MemoryPlan) -> None:
    text = json.dumps(bridge.to_dict(plan.job), indent=2, allow_nan=False) + "\n"
    try:
        with pathlib.Path(path).open("x") as file:  # "x": never overwrites
            file.write(text)
    except OSError as error:
        reason = error.strerror or error
        raise errors.ConfigError(f"{path}: cannot be written: {reason}; name another") from error
    print(f"\n{path}: {plan_report.headline(plan)}")


def _print(
    options: PlanOptions,
    plan: memory_plan.MemoryPlan,
    compiled: dict[str, Any],
    nearest_fit: memory_plan.Advice,
) -> None:
    print(
        plan_report.headline(plan),
        plan_report.memory_table(plan, compiled),
        plan_report.bar_chart(plan),
        sep="\n\n",
    )
    if not plan.fits:
        print(f"\nnearest run that fits, {nearest_fit}")
    if plan.device.flops and plan.job.learns_from_samples:
        print("\n" + plan_report.time_table(plan, options.price))
    if any(program.time for program in compiled.values()):
        print("\n" + plan_report.compiler_time_table(plan, compiled))
    if options.placement:
        print(
            "\n"
            + pool_placement.ranking_table(
                pool_placement.rank_placements(plan.setting, plan.device, plan.num_devices)
            )
        )
