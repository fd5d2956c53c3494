"""What a GPU must do as a CPU does: `JAX_PLATFORMS=cuda pytest -n 0 -m gpu`."""

import dataclasses
import json
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import LIMIT, request

from jaxrl_llm.config.bridge import from_config_dict
from jaxrl_llm.models import attention
from jaxrl_llm.models.attention import AttentionScoring
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import paged_attention_gpu, paged_attention_tpu
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.paged_attention_tpu import AttentionWindow, PagedQueries
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.trainer import rl

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).parents[2]
# Heads of 64, which cuDNN takes.
SHAPE = dataclasses.replace(
    tiny.SHAPE, hidden_size=256, num_heads=4, num_kv_heads=2, head_size=64, mlp_size=512
)


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.fail(f"JAX runs on {jax.default_backend()!r}; set JAX_PLATFORMS=cuda on a GPU")


@pytest.mark.parametrize("window", [0, 96])
def test_cudnn_attends_as_xla_does(window):
    random = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(random.standard_normal((2, 512, heads, 64)), jnp.bfloat16)
        for heads in (4, 2, 2)
    )
    ids = jnp.where(jnp.arange(512) < 200, 1, 2) * jnp.ones((2, 1), jnp.int32)

    def mixed(q, k, v, kernel):
        return attention.full_attention(q, k, v, ids, kernel, window=window).astype(jnp.float32)

    def loss(q, k, v, kernel):
        return (mixed(q, k, v, kernel) ** 2).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    for ours, theirs in (
        (mixed(q, k, v, "cudnn"), mixed(q, k, v, "xla")),
        *zip(gradients(q, k, v, "cudnn"), gradients(q, k, v, "xla"), strict=True),
    ):
        ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
        # bfloat16 has 8 bits; a sum over keys has errors of that relative to its largest terms.
        assert np.abs(ours - theirs).max() <= 0.03 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("reach", "scoring", "sizes", "dtype"),
    [
        (AttentionWindow(0, 0), AttentionScoring(), (128, 128), "bfloat16"),
        (AttentionWindow(300, 0), AttentionScoring(cap=5.0), (96, 96), "bfloat16"),
        (
            AttentionWindow(0, 500),
            AttentionScoring(scale=0.1),
            (576,),
            "bfloat16",
        ),  # latents, values in keys
        (AttentionWindow(0, 0), AttentionScoring(), (64, 64), "float8_e4m3fn"),
        (AttentionWindow(0, 0), AttentionScoring(), (64, 64), "float32"),
    ],
)
def test_the_kernel_reads_pages_as_the_loop_does(reach, scoring, sizes, dtype):
    ends = np.array([1300, 0, 64, 777, 2048, 1], np.int32)
    random = np.random.default_rng(0)
    table = jnp.asarray(random.permutation(6 * 32).reshape(6, 32), jnp.int32)
    keys, *values = (
        jnp.asarray(random.standard_normal((6 * 32, 2, size, 64)), dtype) for size in sizes
    )
    compute = "float32" if dtype == "float32" else "bfloat16"
    rows = jnp.asarray(random.standard_normal((6, 2, 7, sizes[0])), compute)
    value_size = sizes[1] if values else 512
    assert paged_attention_gpu.kernel_supports([keys, *values], value_size)
    how = {"group": 7, "reach": reach, "scoring": scoring, "value_size": value_size}
    given = rows, keys, values[0] if values else None, jnp.asarray(ends), jnp.asarray(ends)
    ours, theirs = (
        jax.jit(read)(PagedQueries(*given, **how), table)
        for read in (
            paged_attention_gpu.gpu_partial_attention,
            paged_attention_tpu.loop_partial_attention,
        )
    )
    mixed, wanted = (
        np.asarray(s.weighted_values / jnp.maximum(s.weight_sum, 1e-30)) for s in (ours, theirs)
    )
    # Weights are rounded to bfloat16, which has 8 bits, or multiplied in TensorFloat-32, 11 bits.
    assert np.abs(mixed - wanted).max() <= 0.02 * np.abs(wanted).max()
    assert (mixed[1] == 0).all()


def test_log_probs_of_the_engine_are_those_of_one_pass():
    network = Network(SHAPE)
    trained, mesh = tiny.params(network), tiny.make_mesh()
    engine = Engine(network.for_decoding(mesh), mesh, num_slots=8, max_tokens=LIMIT)
    random = np.random.default_rng(0)
    work = [request(random, 5 + 4 * n, [SamplingParams(20)] * 2, n) for n in range(4)]
    found = engine.generate(tiny.rollout_params(trained, mesh, network), work)
    rows, spans = np.zeros((8, LIMIT), np.int32), []
    samples = [(r.tokens, c) for r, some in zip(work, found, strict=True) for c in some]
    for row, (prompt, c) in zip(rows, samples, strict=True):
        row[: len(prompt) + len(c.tokens)] = [*prompt, *c.tokens]
        spans.append(slice(len(prompt), len(prompt) + len(c.tokens)))
    with jax.default_matmul_precision("highest"):
        wanted = np.asarray(tiny.teacher_forced(rows, jnp.ones(8), network, trained))
    for row, span, (_, c) in zip(wanted, spans, samples, strict=True):
        # Products of float32 in TensorFloat-32 have 11 bits.
        np.testing.assert_allclose(c.log_probs, row[span], atol=0.05)


def of_tiny(**changes):
    """Returns the config of GRPO on sums of digits, changed by keys."""
    settings = runpy.run_path(str(ROOT / "configs" / "grpo_tiny.py"))["get_config"]()
    settings.metrics.console = settings.metrics.tensorboard = False
    settings.update_from_flattened_dict(changes)
    return from_config_dict(settings)


def metrics(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]


def test_grpo_learns_within_the_planned_memory(tmp_path):
    rl.train(of_tiny(), tmp_path / "run")
    steps = metrics(tmp_path / "run")
    accuracy, ratio = "val-core/arithmetic/mean@4", "perf/measured_to_planned_memory"
    accuracies = [step[accuracy] for step in steps if accuracy in step]
    assert accuracies[-1] > accuracies[0] + 0.1
    assert max(s.get("training/rollout_probs_diff_mean", 0.0) for s in steps) < 0.02
    # The plan of so small a run is mostly what it does not count; it must not be exceeded far.
    measured = [step[ratio] for step in steps if ratio in step]
    assert measured and max(measured) < 2.0


def test_host_offload_changes_nothing(tmp_path):
    short = {"trainer.num_steps": 2, "warm_start.num_steps": 4, "evaluation.before": False}
    short |= {"evaluation.after": False}
    kept = rl.train(of_tiny(**short), tmp_path / "device")
    moved = rl.train(of_tiny(**short, **{"mesh.on_host": ("optimizer",)}), tmp_path / "host")
    for ours, theirs in zip(
        jax.tree.leaves(moved.policy.params), jax.tree.leaves(kept.policy.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(moved.policy.opt_state) if a.ndim}
    assert kinds == {"pinned_host"}
