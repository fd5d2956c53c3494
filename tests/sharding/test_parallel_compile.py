"""Programs compiled in threads: order, errors, the log, and the end of a process."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm.sharding.parallel_compile import CompilePool


def test_a_call_uses_what_was_compiled_ahead(compilations, caplog):
    ahead, double = CompilePool(), jax.jit(lambda x: x * 2)
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    ahead.submit("double", lambda: double.lower(shape).compile())
    with caplog.at_level("INFO"):
        ahead.wait("double", "another")
    assert "programs compiled side by side" in caplog.text and "double" in caplog.text
    x = jax.device_put(jnp.ones(3))
    compilations.clear()
    assert double(x).tolist() == [2, 2, 2] and compilations == []


def test_side_by_side_in_order_and_an_error_names_its_program():
    ahead, met, order = CompilePool(num_threads=2), threading.Barrier(2, timeout=60), []

    def fails():
        raise ValueError("too large")

    for name in ("a", "b", "c", "d"):
        ahead.submit(name, lambda name=name: (order.append(name), met.wait()))  # two at a time
    ahead.submit("bad", fails)
    ahead.wait("a", "b", "c", "d")
    assert sorted(order[:2]) == ["a", "b"] and sorted(order[2:]) == ["c", "d"]
    with pytest.raises(ValueError, match="too large") as raised:
        ahead.wait()
    assert "'bad'" in raised.value.__notes__[0]


def test_a_process_that_ends_waits_for_what_is_compiled_and_begins_no_more():
    code = """
import threading, time
from jaxrl_llm.sharding.parallel_compile import CompilePool
ahead, begun = CompilePool(num_threads=1), threading.Event()
ahead.submit("slow", lambda: (begun.set(), time.sleep(0.5), print("slow is done", flush=True)))
ahead.submit("never", lambda: print("never", flush=True))
begun.wait()
raise SystemExit(3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (3, "slow is done"), done.stderr
