"""Our own kernels for the matmuls and the attention of a decode step on a CPU.

The machine's own compiler compiles `kernels.cc` when it is first needed, for this processor; the
library is kept in the user's cache folder. The functions take float32 arrays on one device and
have no gradient.
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import jaxlib.version
from absl import logging
from jaxtyping import Array, Bool, Float, Int

_SOURCE = pathlib.Path(__file__).with_suffix(".cc")
_OPTIMIZED = ("-O3", "-march=native", "-ffp-contract=fast")
_FLAGS = ("-std=c++20", *_OPTIMIZED, "-fPIC", "-shared", "-pthread")
_PREFIX = "jaxrl_llm_"


@functools.cache
def available() -> bool:
    """Returns whether the kernels can be used here; compiles them if the cache has none.

    They need Linux and a C++ compiler: `CXX`, c++, g++ or clang++. If the compiler fails, the log
    says so and XLA does their work.
    """
    if sys.platform != "linux":
        return False
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        return False
    try:
        library = ctypes.CDLL(str(build(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        logging.warning("CPU kernels: not used, XLA does their work. %s: %s", compiler, said)
        return False
    for name in ("product", "mlp", "attention"):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(_PREFIX + name, handler, platform="cpu")
    return True


def build(compiler: str) -> pathlib.Path:
    """Returns the compiled library, from the cache folder if it is there.

    Raises:
      OSError: If the folder cannot be written or the compiler cannot be run.
      RuntimeError: If there is no home folder.
      subprocess.SubprocessError: If the compiler fails, or takes more than two minutes.
    """
    setting = repr((compiler, _FLAGS, jaxlib.version.__version__, _processor()))
    key = hashlib.sha256(_SOURCE.read_bytes() + setting.encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(home) / "jaxrl_llm"
    library = folder / f"cpu_kernels-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = pathlib.Path(scratch) / library.name
            command = [compiler, *_FLAGS, "-isystem", jax.ffi.include_dir()]
            command += [str(_SOURCE), "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            os.replace(made, library)  # atomic: another process may do the same
    return library


def _processor() -> str:
    """Returns what `-march=native` depends on, as machines may share a home folder."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    of_one = (line for line in lines if line.startswith(("model name", "flags", "Features")))
    return platform.machine() + "".join(dict.fromkeys(of_one))


def product(x: Float[Array, "... I"], kernel: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """Returns `x @ kernel.T`."""
    return _call("product", (*x.shape[:-1], kernel.shape[0]), x, kernel)


def mlp(
    x: Float[Array, "... D"],
    gate: Float[Array, "F D"],
    up: Float[Array, "F D"],
    down: Float[Array, "D F"],
) -> Float[Array, "... D"]:
    """Returns `(silu(x @ gate.T) * (x @ up.T)) @ down.T`."""
    return _call("mlp", x.shape, x, gate, up, down)


def attention(
    q: Float[Array, "S Q N H"],
    keys: Float[Array, "pages K H page"],
    values: Float[Array, "pages K page H"],
    table: Int[Array, "S pages_of_slot"],
    firsts: Int[Array, "S Q"],
    ends: Int[Array, " S"],
    recent_keys: Float[Array, "S K H recent"],
    recent_values: Float[Array, "S K recent H"],
    seen: Bool[Array, "S Q recent"],
) -> Float[Array, "S Q N H"]:
    """Returns attention over pages and recent tokens; zeros where a query sees nothing.

    A query sees the positions from its `firsts` up to `ends` of its slot's pages, and the recent
    tokens that `seen` says.
    """
    given = q, keys, values, table, firsts, ends, recent_keys, recent_values, seen
    return _call("attention", q.shape, *given)


def _call(name: str, shape: tuple[int, ...], *arguments: Array) -> Array:
    return jax.ffi.ffi_call(_PREFIX + name, jax.ShapeDtypeStruct(shape, jnp.float32))(*arguments)
