"""How full the memory of the machine is."""

import pathlib
import resource
from collections.abc import Sequence
from typing import Any

import jax

GIB = 2**30


def memory(devices: Sequence[Any]) -> dict[str, float]:
    """Returns the memory in use, in GiB: of the fullest device of this process, and of the host.

    `perf/max_memory_allocated_gb` is the peak of the devices since the process began,
    `perf/max_memory_reserved_gb` what the allocator may have; both are left out where the
    platform does not tell (CPU). `perf/cpu_memory_used_gb` is what the process holds now,
    `perf/max_cpu_memory_used_gb` its peak.
    """
    here = [d for d in devices if d.process_index == jax.process_index()]
    stats = [found for device in here if (found := device.memory_stats())]
    used = {
        "perf/max_memory_allocated_gb": "peak_bytes_in_use",
        "perf/max_memory_reserved_gb": "bytes_limit",
    }
    found = {
        name: max(s[key] for s in stats) / GIB
        for name, key in used.items()
        if stats and all(key in s for s in stats)
    }
    found["perf/max_cpu_memory_used_gb"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    )
    pages = pathlib.Path("/proc/self/statm")
    if pages.exists():
        resident = int(pages.read_text().split()[1]) * resource.getpagesize()
        found["perf/cpu_memory_used_gb"] = resident / GIB
    return found
