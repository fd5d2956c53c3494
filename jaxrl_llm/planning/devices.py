"""What each kind of accelerator has: memory, arithmetic, memory and link bandwidth.

Figures are the vendors' published ones for dense bfloat16 and for all links of one device
together, one direction. Memory is what a program may use: of TPUs what their compiler allows,
of GPUs nine tenths of what is installed, the rest being the runtime's and other libraries'.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config import ConfigError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator as JAX counts devices.

    Attributes:
      name: As in `DEVICES`.
      memory_bytes: What programs may use.
      flops: bfloat16 operations a second, dense; 0: not known, no times are given.
      memory_bandwidth: Bytes a second of its own memory.
      link_bandwidth: Bytes a second to its neighbours, one direction, all links together.
      domain: Devices joined by those links; beyond it `network_bandwidth` counts.
      network_bandwidth: Bytes a second of each device over the network between domains.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    domain: int
    network_bandwidth: float


def _tpu(name, memory_gib, teraflops, memory_gbs, link_gbs, domain) -> Device:
    return Device(
        name, int(memory_gib * GIB), teraflops * 1e12, memory_gbs * 1e9, link_gbs * 1e9, domain,
        network_bandwidth=6.25e9,
    )  # fmt: skip


def _gpu(name, memory_gb, teraflops, memory_gbs, link_gbs, network_gbs) -> Device:
    return Device(
        name, int(0.9 * memory_gb * 1e9), teraflops * 1e12, memory_gbs * 1e9, link_gbs * 1e9, 8,
        network_bandwidth=network_gbs * 1e9,
    )  # fmt: skip


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _tpu("v4", 30.5, 275, 1228, 150, 4096),
        _tpu("v5e", 15.75, 197, 819, 100, 256),
        _tpu("v5p", 95.73, 459, 2765, 300, 8960),
        _tpu("v6e", 31.24, 918, 1640, 224, 256),
        _tpu("tpu7x", 94.74, 1153.5, 3690, 300, 9216),  # JAX counts both halves of a chip
        _gpu("a100", 80, 312, 2039, 300, 25),
        _gpu("h100", 80, 989, 3350, 450, 50),
        _gpu("h200", 141, 989, 4800, 450, 50),
        _gpu("b200", 180, 2250, 8000, 900, 50),
    )
}

# What JAX calls a device -> its row. The first that is found counts.
_KINDS = (
    (r"TPU v5 ?(lite|e)", "v5e"),
    (r"TPU v5", "v5p"),
    (r"TPU v6", "v6e"),
    (r"TPU7x|TPU v7", "tpu7x"),
    (r"TPU v4", "v4"),
    (r"A100", "a100"),
    (r"H100", "h100"),
    (r"H200", "h200"),
    (r"B200", "b200"),
)


def named(name: str) -> Device:
    """Returns a kind of device by its name.

    Raises:
      ConfigError: If it is not in the table.
    """
    if name.lower() not in DEVICES:
        raise ConfigError([f"device: unknown {name!r}; known: {', '.join(DEVICES)}"])
    return DEVICES[name.lower()]


def present(devices: Sequence[Any]) -> Device | None:
    """Returns the row of devices of this process; of CPU devices each one's share of the memory.

    None of a kind that is not in the table: nothing is known of its memory.
    """
    first = devices[0]
    if first.platform == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        local = sum(device.process_index == first.process_index for device in devices)
        return Device("cpu", pages // local, 0.0, 0.0, 0.0, len(devices), 0.0)
    for pattern, name in _KINDS:
        if re.search(pattern, first.device_kind):
            return DEVICES[name]
    return None


def backend(device: Device) -> str:
    """Returns whose compiler's habits a plan for such devices assumes: "cpu", or "tpu" for all."""
    return "cpu" if device.name == "cpu" else "tpu"


def of_topology(topology: str) -> tuple[Device, int]:
    """Returns kind and number of the devices of a TPU topology: "v5e:4x4" has 16.

    Raises:
      ConfigError: If it is not written so.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", topology)
    if not match:
        raise ConfigError([f"topology: {topology!r}; write it as 'v5e:4x4' or 'v5p:2x2x4'"])
    device = named(match[1])
    chips = math.prod(int(side) for side in match[2].split("x"))
    return device, chips * (2 if device.name == "tpu7x" else 1)
