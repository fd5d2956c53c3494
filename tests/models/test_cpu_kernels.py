"""Decoding on a CPU: kernels of our own give what float64 does; the folder can be deleted."""

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jaxrl_llm
from jaxrl_llm.models.cpu_kernels import kernels, matmuls
from jaxrl_llm.rollout.engine import decode_attention

needs_compiler = pytest.mark.skipif(
    not kernels.is_available(), reason="no C++ compiler, so no kernels of our own"
)


def random(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).normal(size=shape).astype(np.float32)


def silu(x):
    return x / (1.0 + np.exp(-x))


def test_products_with_the_weight_first():
    a, b = jax.random.split(jax.random.key(2))
    x, kernel = jax.random.normal(a, (2, 3, 5)), jax.random.normal(b, (7, 5))
    got = jax.jit(matmuls.weight_first)(x, kernel)
    np.testing.assert_allclose(got, x @ kernel.T, rtol=1e-6, atol=1e-6)
    half = (x.astype("bfloat16"), kernel.astype("bfloat16"))
    assert matmuls.weight_first(*half).dtype == "bfloat16"
    wide = matmuls.weight_first(*half, dtype=jnp.float32)
    np.testing.assert_allclose(wide, half[0].astype(float) @ half[1].astype(float).T, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("rows", [(1,), (16,), (17,), (3, 27)], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 33), (128, 24), (130, 512)], ids=str)
def test_products_equal_xla(rows, inputs, outputs):
    x, kernel = random(*rows, inputs), random(outputs, inputs)
    wanted = x.astype(np.float64) @ kernel.astype(np.float64).T
    got = jax.jit(kernels.product)(x, kernel)
    # Rounded sums of `inputs` numbers.
    scale = np.abs(x.astype(np.float64)) @ np.abs(kernel.astype(np.float64)).T
    assert np.abs(got - wanted).max() <= 1e-6 * scale.max()


@needs_compiler
@pytest.mark.parametrize("rows", [1, 20, 70])
@pytest.mark.parametrize(("size", "inner"), [(1, 1), (24, 6), (128, 1536), (50, 77)], ids=str)
def test_mlp_kernel_equals_xla(rows, size, inner):
    x, down = random(rows, size), random(size, inner, seed=3)
    gate, up = random(inner, size, seed=1), random(inner, size, seed=2)
    x[0] *= 1000.0  # beyond what exp can hold
    g, u = (x.astype(np.float64) @ w.astype(np.float64).T for w in (gate, up))
    with np.errstate(over="ignore"):
        hidden = silu(g) * u
    wanted = hidden @ down.astype(np.float64).T
    got = jax.jit(kernels.mlp)(x, gate, up, down)
    scale = np.abs(hidden) @ np.abs(down.astype(np.float64)).T
    assert (np.abs(got - wanted) <= 3e-6 * scale.max(1, keepdims=True) + 1e-30).all()


def paged(slots, width, size, page, lengths, recent, group, heads=2):
    """Returns random arguments of `kernels.attention`; the pages lie in any order."""
    most = max(1, -(-max(lengths) // page))
    order = np.random.default_rng(5).permutation(slots * most + 2).astype(np.int32)
    table = order[: slots * most].reshape(slots, most)
    ends = np.array(lengths, np.int32)
    firsts = np.minimum(np.arange(slots * width).reshape(slots, width) % 5, ends[:, None])
    seen = np.random.default_rng(4).random((slots, width, recent)) < 0.5
    seen[..., 0] = True
    return [
        random(slots, width, heads * group, size) * 3.0,
        random(len(order), heads, size, page),
        random(len(order), heads, page, size, seed=1),
        table,
        firsts.astype(np.int32),
        ends,
        random(slots, heads, size, recent, seed=2),
        random(slots, heads, recent, size, seed=3),
        seen,
    ]


@needs_compiler
@pytest.mark.parametrize(
    "group", [1, 3, 8, *(pytest.param(group, marks=pytest.mark.slow) for group in (2, 5))]
)
@pytest.mark.parametrize(
    ("width", "size", "page", "lengths", "recent"),
    [
        (1, 8, 4, (3,), 1),
        (2, 16, 32, (64, 7, 33), 7),
        (1, 64, 32, (96, 0, 1, 41, 32), 16),
        (2, 36, 20, (20, 3), 3),
    ],
    ids=str,
)
def test_attention_kernel_equals_xla(group, width, size, page, lengths, recent):
    given = paged(len(lengths), width, size, page, lengths, recent, group)
    q, keys, values, table, firsts, ends, recent_keys, recent_values, seen = given
    got = np.asarray(jax.jit(kernels.attention)(*given))
    with jax.enable_x64(True):
        together = lambda pages, axis: np.concatenate(np.moveaxis(pages[table], 1, 0), axis)  # noqa: E731
        blocks = [[together(keys, 3), recent_keys], [together(values, 2), recent_values]]
        wide = [[jnp.asarray(a, jnp.float64) for a in arrays] for arrays in blocks]
        at = np.arange(table.shape[1] * page)
        in_pages = (at >= firsts[..., None]) & (at < ends[:, None, None])
        visible = jnp.asarray(np.concatenate([in_pages, seen], -1))
        wanted = np.asarray(
            decode_attention.gathered_attention(jnp.asarray(q, jnp.float64), *wide, visible)
        )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=3e-6)
    ends[0], seen[0, 0] = 0, False  # a free slot may see nothing
    assert (np.asarray(jax.jit(kernels.attention)(*given))[0, 0] == 0).all()


@needs_compiler
def test_positions_that_nobody_sees_are_not_read():
    given = paged(2, 1, 32, 32, (70, 7), 16, 2)
    _, keys, values, table, firsts, *_, seen = given
    firsts[:] = [[40], [0]]
    seen[..., 3:] = False
    wanted = np.asarray(jax.jit(kernels.attention)(*given))
    # Pages before the first and behind the last that is seen; whole vectors are read.
    unread = [page for page in range(len(keys)) if page not in (*table[0, 1:3], table[1, 0])]
    keys[unread] = values[unread] = np.nan
    keys[table[0, 2], ..., 16:] = values[table[0, 2], :, 16:] = np.nan
    keys[table[1, 0], ..., 16:] = values[table[1, 0], :, 16:] = np.nan
    got = jax.jit(kernels.attention)(*given)
    np.testing.assert_array_equal(got, wanted)
    assert np.isfinite(wanted).all()


@needs_compiler
def test_a_row_does_not_depend_on_others():
    x, kernel = random(40, 96), random(72, 96)
    gate, up, down = random(160, 96, seed=1), random(160, 96, seed=2), random(96, 160, seed=3)
    for function, weights in (
        (jax.jit(kernels.product), (kernel,)),
        (jax.jit(kernels.mlp), (gate, up, down)),
    ):
        whole = np.asarray(function(x, *weights))
        for rows in (slice(0, 1), slice(3, 19), slice(8, 40)):
            np.testing.assert_array_equal(function(x[rows], *weights), whole[rows])


@needs_compiler
def test_calls_at_one_time_do_not_disturb_each_other():
    function = jax.jit(kernels.mlp)
    weights = random(640, 256, seed=1), random(640, 256, seed=2), random(256, 640, seed=3)
    inputs = [random(32, 256, seed=i) for i in range(8)]
    wanted = [np.asarray(function(x, *weights)) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            got = list(threads.map(lambda x: np.asarray(function(x, *weights)), inputs))
            np.testing.assert_array_equal(got, wanted)


@pytest.fixture
def anew():
    """`is_available` as of a process that did not ask yet."""
    return kernels.is_available.__wrapped__


def test_without_a_compiler_there_are_none(anew, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert not anew()


def test_a_compiler_that_fails_is_reported(anew, monkeypatch, tmp_path, caplog):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no such option' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level("WARNING"):
        assert not anew()
    assert str(broken) in caplog.text
    assert "no such option" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_reported(anew, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", "true")
    with caplog.at_level("WARNING"):
        assert not anew()
    assert "XLA does their work" in caplog.text


@needs_compiler
def test_kernels_are_compiled_once(monkeypatch, tmp_path):
    source = tmp_path / "one.cc"  # the others compile the real one
    source.write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(kernels, "_SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    calls = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: calls.append(a) or run(*a, **k))
    first = kernels.compile_library(compiler)
    assert kernels.compile_library(compiler) == first
    assert len(calls) == 1
    assert list((tmp_path / "jaxrl_llm").iterdir()) == [first]


# Decodes with whatever `for_decoding` chooses, and prints (tokens, log-probs) of each sample.
DECODE = """
import json
import numpy as np
import tiny
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.requests import Request, SamplingParams

mesh = tiny.make_mesh()
network = tiny.NETWORK.for_decoding(mesh)
params = tiny.rollout_params(tiny.params(), mesh, tiny.NETWORK, rollout=network)
engine = Engine(network, mesh, num_slots=4, max_tokens=32, chunk_steps=8)
keys = np.arange(4, dtype=np.uint32).reshape(2, 2)
requests = [Request((3, 5, 7), keys, (SamplingParams(12), SamplingParams(20)))]
print(json.dumps([[c.tokens, c.log_probs] for c in engine.generate(params, requests)[0]]))
"""


def decoded(tmp_path, *folders: pathlib.Path):
    """Returns what `DECODE` prints where modules come from these folders first."""
    paths = [*map(str, folders), str(pathlib.Path(tiny.__file__).parent)]
    found = subprocess.run(
        [sys.executable, "-c", DECODE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(found.stdout)


@pytest.mark.slow
def test_without_the_folder_the_same_is_sampled(tmp_path):
    package = pathlib.Path(jaxrl_llm.__file__).parent
    shutil.copytree(package, tmp_path / "jaxrl_llm", ignore=shutil.ignore_patterns("cpu_kernels"))
    network = tmp_path / "jaxrl_llm/models/transformer.py"
    lines = network.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "cpu_kernels" not in line]
    assert len(lines) - len(kept) == 2  # the import and the choice
    network.write_text("".join(kept))
    # The tests' own networks name the folder once more.
    tests = tmp_path / "tiny.py"
    mine = pathlib.Path(tiny.__file__).read_text().splitlines(keepends=True)
    tests.write_text("".join(line for line in mine if "cpu_kernels" not in line))
    without, with_it = decoded(tmp_path, tmp_path), decoded(tmp_path)
    for (tokens, log_probs), (same, close) in zip(without, with_it, strict=True):
        assert tokens == same
        np.testing.assert_allclose(log_probs, close, atol=1e-5)
