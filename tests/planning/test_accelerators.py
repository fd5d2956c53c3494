"""What devices can do at best, by the names that they give themselves."""

import math
import types

import pytest

from jaxrl_llm.planning import accelerators


def named(kind):
    return types.SimpleNamespace(device_kind=kind)


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
    assert accelerators.device_of_kind(kind).flops == tera * 1e12


def test_peak_of_several_devices():
    assert accelerators.peak_flops([named("H100")] * 4) == 4 * 989e12
    assert math.isnan(accelerators.peak_flops([named("cpu")]))
