"""Custom CPU kernels (XLA FFI) for the matmuls and the attention of a decode step.

`kernels.cc` is compiled on first use by the machine's C++ compiler, for this processor; the library
is cached in the user's cache folder. The functions take float32 arrays on one device and
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
def is_available() -> bool:
    """Whether the kernels can be used on this machine; compiles and registers them if so.

    They need Linux and a C++ compiler: `CXX`, c++, g++ or clang++. If compilation fails, a warning
    is logged and XLA's kernels are used.
    """
    if sys.platform != "linux":
        return False
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        return False
    try:
        library = ctypes.CDLL(str(compile_library(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        logging.warning("CPU kernels: not used, XLA does their work. %s: %s", compiler, reason)
        return False
    for name in ("product", "mlp", "attention"):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(_PREFIX + name, handler, platform="cpu")
    return True


def compile_library(compiler: str) -> pathlib.Path:
    """Compiles the library, or finds it in the cache folder; returns its path.

    Raises:
      OSError: If the folder cannot be written or the compiler cannot be run.
      RuntimeError: If there is no home folder.
      subprocess.SubprocessError: If the compiler fails, or takes more than two minutes.
    """
    build_inputs = repr((compiler, _FLAGS, jaxlib.version.__version__, _processor_id()))
    key = hashlib.sha256(_SOURCE.read_bytes() + build_inputs.encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(home) / "jaxrl_llm"
    library = folder / f"cpu_kernels-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            output = pathlib.Path(scratch) / library.name
            command = [compiler, *_FLAGS, "-isystem", jax.ffi.include_dir()]
            command += [str(_SOURCE), "-o", str(output)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            os.replace(output, library)  # atomic: another process may do the same
    return library


def _processor_id() -> str:
    """Identifies the target of `-march=native`, as machines may share a home folder."""
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    features = (line for line in lines if line.startswith(("model name", "flags", "Features")))
    return platform.machine() + "".join(dict.fromkeys(features))


def product(x: Float[Array, "... I"], kernel: Float[Array, "O I"]) -> Float[Array, "... O"]:
    """`x @ kernel.T`."""
    return _call("product", (*x.shape[:-1], kernel.shape[0]), x, kernel)


def mlp(
    x: Float[Array, "... D"],
    gate: Float[Array, "F D"],
    up: Float[Array, "F D"],
    down: Float[Array, "D F"],
) -> Float[Array, "... D"]:
    """`(silu(x @ gate.T) * (x @ up.T)) @ down.T`."""
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
    recent_mask: Bool[Array, "S Q recent"],
) -> Float[Array, "S Q N H"]:
    """Attention over the pages of a KV cache and recent tokens; zeros where all is masked.

    A query attends to the positions from its `firsts` up to `ends` of its slot's pages, and to the
    recent tokens that the mask `recent_mask` selects.
    """
    return _call(
        "attention",
        q.shape,
        q,
        keys,
        values,
        table,
        firsts,
        ends,
        recent_keys,
        recent_values,
        recent_mask,
    )


def _call(name: str, shape: tuple[int, ...], *arguments: Array) -> Array:
    return jax.ffi.ffi_call(_PREFIX + name, jax.ShapeDtypeStruct(shape, jnp.float32))(*arguments)
