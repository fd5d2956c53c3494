"""Prints the memory and time of a run before it starts."""

import json

import jax
from absl import logging

from jaxrl_llm import errors
from jaxrl_llm.algorithms import needs
from jaxrl_llm.commands.options import Plan
from jaxrl_llm.learner import planned
from jaxrl_llm.planning import fit, placement, report


def _compiled(plan: fit.Plan, devices) -> dict[str, float | str]:
    # This import takes seconds, longer than a plan.
    from jaxrl_llm.learner import lowering

    return lowering.compiled_bytes(plan, devices)


def main(options: Plan) -> None:
    if options.chart:
        errors.refuse(report.chart_problems(options.chart))
        errors.check_package("matplotlib", "plot", "--chart:")
    config = options.config
    if config.learns_from_samples:
        needs.check(config.require_rl().algorithm)
        for warning in needs.warnings(config.require_rl()):
            logging.warning("%s", warning)
    elif options.compile or options.placement:
        flag = "compile" if options.compile else "placement"
        errors.refuse([(flag, "is of job='rl' alone; leave it out")])
    for warning in config.warnings():
        logging.warning("%s", warning)
    if not (options.topology or options.device):
        place = planned.here(jax.devices())
    else:
        place = planned.elsewhere(options.topology, options.device, options.devices)
    plan = planned.plan(planned.filled(config, place), place)
    compiled = _compiled(plan, place.devices) if options.compile else {}
    nearest = fit.nearest(plan)
    if options.json:
        found = report.to_json(plan, nearest, options.price)
        print(json.dumps({**found, "compiled": compiled}))
    else:
        _print(options, plan, compiled, nearest)
    if options.chart:
        report.save_chart(plan, options.chart)


def _print(
    options: Plan, plan: fit.Plan, compiled: dict[str, float | str], nearest: fit.Advice
) -> None:
    print(report.headline(plan), report.table(plan, compiled), report.bar_chart(plan), sep="\n\n")
    if not plan.fits:
        print(f"\nnearest run that fits, {nearest}")
    if plan.device.flops and plan.job.learns_from_samples:
        print("\n" + report.times(plan, options.price))
    if options.placement:
        print("\n" + placement.table(placement.rank(plan.setting, plan.device, plan.num_devices)))
