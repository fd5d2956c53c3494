"""What the compiler says a run's programs need, on devices present or of a TPU topology."""

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging
from jax.experimental import topologies

from jaxrl_llm.config import ConfigError
from jaxrl_llm.learner import lowering
from jaxrl_llm.planning import memory
from jaxrl_llm.planning.fit import Plan


@dataclasses.dataclass(frozen=True)
class Report:
    """The compiler's account of one program, in bytes on each device."""

    arguments: int
    outputs: int
    aliased: int  # of the outputs: they reuse the memory of donated arguments
    temporary: int
    host: int  # arguments, outputs and temporaries in host memory
    lower_s: float
    compile_s: float

    @property
    def total(self) -> int:
        """Bytes of device memory that the program needs while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporary


class Refused(Exception):
    """The compiler finds that a program cannot fit; the first line of its reason."""


def topology_devices(topology: str) -> Sequence[Any]:
    """Returns the devices of a TPU topology such as "v5e:4x4"; none needs to be attached.

    Raises:
      ConfigError: If the TPU compiler is not installed or does not know the topology.
    """
    # No machine is asked for its metadata, and another process may use the compiler too.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as error:  # the plugin raises types of its own
        raise ConfigError(
            [
                f"topology {topology!r}: {str(error).splitlines()[0]}; write it as 'v5e:4x4',"
                " and install the TPU compiler with pip install 'jaxrl_llm[tpu]'"
            ]
        ) from error


def compile_report(lower: Any) -> Report:
    """Returns the compiler's account of one of `lowering.lowered`'s programs.

    Raises:
      Refused: If the compiler finds that the program cannot fit.
    """
    start = time.perf_counter()
    lowered = lower()
    middle = time.perf_counter()
    try:
        stats = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        raise Refused(str(error).splitlines()[0]) from error
    return Report(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
        lower_s=middle - start,
        compile_s=time.perf_counter() - middle,
    )


def of_plan(plan: Plan, devices: Sequence[Any] | str) -> dict[str, float | str]:
    """Returns by program what is on a device while it runs, by the compiler's own report.

    What lies beside a program is as in the analytic plan; a program that the compiler refuses
    has its reason in place of a number.

    Raises:
      ConfigError: If the devices are only named, not known to a compiler, or share out to pools.
    """
    if not devices:
        raise ConfigError(
            [f"--compile: {plan.device.name} devices are not here; give a TPU --topology"]
        )
    if isinstance(devices, str):
        devices = topology_devices(devices)
    if len(plan.pools) > 1:
        raise ConfigError(
            ["--compile: programs of several pools are not compiled; use placement.choice=colocate"]
        )
    setting = plan.setting
    models = lowering.abstract_models(setting.config, setting.policy, list(devices))
    own = memory.programs(setting)
    found: dict[str, float | str] = {}
    for name, lower in lowering.lowered(setting.config, models).items():
        logging.info("compiling %s", name)
        try:
            report = compile_report(lower)
        except Refused as error:
            found[name] = str(error)
        else:
            found[name] = report.total + plan.programs[name].total - own[name].total
    return found
