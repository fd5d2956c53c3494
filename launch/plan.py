"""Plans a run before it starts: `python launch/plan.py --config=FILE --topology=v5p:2x2x4`.

Or `--devices=8 --device=h100`; without both, it plans for the devices of this process. Prints the
bytes per device by program and part, whether they fit, the nearest change that fits, and the time
of a step. `--compile` also asks the compiler, without a TPU.
"""

import json

import jax
from absl import flags
from ml_collections import config_flags

from jaxrl_llm import errors, program
from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.learner import planned
from jaxrl_llm.planning import fit, placement, report

CONFIG = config_flags.DEFINE_config_file("config", None, "File that describes the run.")
flags.mark_flag_as_required("config")
TOPOLOGY = flags.DEFINE_string("topology", "", "TPU topology, e.g. v5p:2x2x4.")
DEVICE = flags.DEFINE_string("device", "", "Kind of device, e.g. h100; see planning/devices.py.")
DEVICES = flags.DEFINE_integer("devices", 1, "Number of devices of kind --device.")
COMPILE = flags.DEFINE_bool("compile", False, "Compile every program and print its bytes.")
JSON = flags.DEFINE_bool("json", False, "Print one JSON object.")
PLACEMENT = flags.DEFINE_bool("placement", False, "Rank all 15 placements of PPO's four models.")
PRICE = flags.DEFINE_float("price", 0.0, "Dollars per device and hour; 0: not known.")
CHART = flags.DEFINE_string("chart", "", "PNG file to write a bar chart to (extra [plot]).")


def _compiled(plan: fit.Plan, devices) -> dict[str, float | str]:
    # This import takes seconds, longer than a plan.
    from jaxrl_llm.learner import lowering

    return lowering.compiled_bytes(plan, devices)


def main():
    if CHART.value:
        program.refuse(report.chart_problems(CHART.value))
        errors.check_package("matplotlib", "plot", "--chart:")
    config = from_config_dict(CONFIG.value)
    if isinstance(config, RLConfig):
        needs.check(config.algorithm)
    elif COMPILE.value or PLACEMENT.value:
        flag = "compile" if COMPILE.value else "placement"
        program.refuse([(flag, "is of job='rl' alone; leave it out")])
    if TOPOLOGY.value and DEVICE.value:
        program.refuse([("device", "give it or --topology, not both")])
    if not (TOPOLOGY.value or DEVICE.value):
        place = planned.here(jax.devices())
    else:
        place = planned.elsewhere(TOPOLOGY.value, DEVICE.value, DEVICES.value)
    plan = planned.plan(planned.filled(config, place), place)
    compiled = _compiled(plan, place.devices) if COMPILE.value else {}
    nearest = fit.nearest(plan)
    if JSON.value:
        found = report.to_json(plan, nearest, PRICE.value)
        print(json.dumps({**found, "compiled": compiled}))
    else:
        _print(plan, compiled, nearest)
    if CHART.value:
        report.save_chart(plan, CHART.value)


def _print(plan: fit.Plan, compiled: dict[str, float | str], nearest: fit.Advice) -> None:
    print(report.headline(plan), report.table(plan, compiled), report.bar_chart(plan), sep="\n\n")
    if not plan.fits:
        print(f"\nnearest run that fits, {nearest}")
    if plan.device.flops and isinstance(plan.job, RLConfig):
        print("\n" + report.times(plan, PRICE.value))
    if PLACEMENT.value:
        print("\n" + placement.table(placement.rank(plan.setting, plan.device, plan.num_devices)))


if __name__ == "__main__":
    program.run(main)
