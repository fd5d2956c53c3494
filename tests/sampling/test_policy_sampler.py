"""What the sampling side of a policy holds; where its weights lie is in `test_placement.py`."""

import os
import pathlib
import sys

import numpy as np
import pytest

from jaxrl_llm.sampling import policy_sampler


def resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_goes_back_to_the_system():
    """The last piece lies behind all others, so the allocator alone keeps these."""
    pieces = [np.ones(1 << 16, np.uint8) for _ in range(3000)]
    del pieces[:-1]
    before = resident_bytes()
    policy_sampler._trim_memory()
    assert before - resident_bytes() > 2500 << 16
