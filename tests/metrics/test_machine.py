"""What devices can do at best, by the names that they give themselves."""

import math
import types

import pytest

from jaxrl_llm.metrics import machine


def device(kind, stats=None):
    return types.SimpleNamespace(device_kind=kind, process_index=0, memory_stats=lambda: stats)


@pytest.mark.parametrize(
    "kind, tera",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA L40S", 362),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 2307 / 2),  # as libtpu calls it; two devices a chip
    ],
)
def test_known_devices(kind, tera):
    assert machine.peak_flops(kind) == tera * 1e12


def test_share_of_the_best():
    assert machine.utilization(989e12, 2.0, [device("H100")] * 4) == 1 / 8
    assert math.isnan(machine.utilization(1.0, 1.0, [device("cpu")]))


def test_memory_is_that_of_the_fullest_device():
    gib = 2**30
    stats = [{"peak_bytes_in_use": n * gib, "bytes_limit": 80 * gib} for n in (3, 7)]
    found = machine.memory([device("H100", s) for s in stats])
    assert found["perf/max_memory_allocated_gb"] == 7.0
    assert found["perf/max_memory_reserved_gb"] == 80.0
    assert 0.01 < found["perf/cpu_memory_used_gb"] <= found["perf/max_cpu_memory_used_gb"] + 0.05
    assert "perf/max_memory_allocated_gb" not in machine.memory([device("cpu")])
