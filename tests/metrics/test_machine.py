"""How full memory is said to be."""

import types

from jaxrl_llm.metrics import machine


def device(kind, stats=None):
    return types.SimpleNamespace(device_kind=kind, process_index=0, memory_stats=lambda: stats)


def test_memory_is_that_of_the_fullest_device():
    gib = 2**30
    stats = [{"peak_bytes_in_use": n * gib, "bytes_limit": 80 * gib} for n in (3, 7)]
    found = machine.memory([device("H100", s) for s in stats])
    assert found["perf/max_memory_allocated_gb"] == 7.0
    assert found["perf/max_memory_reserved_gb"] == 80.0
    assert 0.01 < found["perf/cpu_memory_used_gb"] <= found["perf/max_cpu_memory_used_gb"] + 0.05
    assert "perf/max_memory_allocated_gb" not in machine.memory([device("cpu")])
