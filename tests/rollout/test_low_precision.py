"""Sampling with weights, keys and values of eight bits: what is rounded, and how far that goes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from engine_work import ONE, engine_of, request, weights
from flax.traverse_util import flatten_dict, unflatten_dict
from kinds_of_layers import NETWORKS

from jaxrl_llm.config import RolloutConfig
from jaxrl_llm.models import quantization as quantization_lib
from jaxrl_llm.models.quantization import SCALES
from jaxrl_llm.models.transformer import Network
from jaxrl_llm.rollout.engine import prefill
from jaxrl_llm.rollout.engine.requests import SamplingParams
from jaxrl_llm.sampling import policy_sampler

EIGHT_BITS = ("int8", "fp8")


def test_one_step_for_each_output_by_hand():
    kernel = jnp.array([[1.0, 0.0, 127.0], [-2.0, 0.0, 63.6]])
    found = quantization_lib.quantize_layer({"q": {"kernel": kernel}}, "int8", "float32")["q"]
    # The largest number of a column is 127 steps; a column of zeros has step 1.
    np.testing.assert_allclose(found[SCALES], [2 / 127, 1.0, 1.0])
    np.testing.assert_array_equal(found["kernel"], [[64, 0, 127], [-127, 0, 64]])
    # float8 has 4 significant bits: 448 / 2 = 224 is one of its numbers, 0.51 * 448 is not.
    kernel = jnp.array([[2.0, 1.02], [1.0, -2.0]])
    found = quantization_lib.quantize_layer({"q": {"kernel": kernel}}, "fp8", "float32")["q"]
    wide = found["kernel"].astype(jnp.float32)
    np.testing.assert_array_equal(wide, [[448.0, 224.0], [224.0, -448.0]])
    # What training computes with is rounded: of bfloat16's 8 bits, 1.002 keeps none after the 1.
    kernel = jnp.array([[1.002], [0.5]])
    found = quantization_lib.quantize_layer({"q": {"kernel": kernel}}, "int8", "bfloat16")["q"]
    np.testing.assert_allclose(found[SCALES], [1 / 127])


def rolled_out(network, mesh=ONE, **settings):
    """Returns the network that decodes, and what turns trained weights into its own."""
    rollout = policy_sampler.rollout_network(RolloutConfig(**settings), network, mesh)
    return rollout, policy_sampler.resharder(network, rollout, mesh, "tensor")


def moved(mover, network, trained, mesh=ONE):
    with jax.set_mesh(mesh):
        return mover.reshard(mover.zeros(), tiny.sharded(trained, mesh, network))


def rounded_and_back(trained, quantization):
    """Returns training weights that are what rounding leaves of these."""
    found = flatten_dict(trained)
    layers = quantization_lib.quantize_layer(trained["layers"], quantization, "float32")
    for path, steps in flatten_dict(layers).items():
        if path[-1] == SCALES:
            kernel = flatten_dict(layers)[*path[:-1], "kernel"].astype(jnp.float32)
            found["layers", *path[:-1], "kernel"] = np.asarray(kernel * steps[..., None, :])
    return unflatten_dict(found)


def prompts_of(network):
    tokens = np.random.default_rng(1).integers(4, 96, (2, 16)).astype(np.int32)
    places = np.broadcast_to(np.arange(16, dtype=np.int32), (2, 16))
    routes = np.full((2, 16, 0), -1, np.int16)
    starts, lengths = np.array([0, 16]), np.array([16, 16])
    return prefill.Prompts(
        *map(jnp.asarray, (tokens, places, np.ones_like(tokens), starts, lengths, routes))
    )


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        pytest.param("windows and experts", "int8", marks=pytest.mark.slow),
        ("latents", "fp8"),
        pytest.param("sinks", "int8", marks=pytest.mark.slow),
        pytest.param("latents", "int8", marks=pytest.mark.slow),
    ],
)
def test_products_are_those_of_the_rounded_weights(name, quantization):
    """Read in pieces: there latent attention multiplies with the weight itself."""
    network = Network(NETWORKS[name])
    trained = tiny.params(network)
    rollout, mover = rolled_out(network, quantization=quantization)
    params = moved(mover, network, trained)
    dtype = quantization_lib.quantized_dtype(quantization)
    others = {p for p, a in flatten_dict(params["layers"][-1]).items() if a.dtype != dtype}
    assert {path[-2] for path in others if path[-1] == "kernel"} <= {"router"}
    assert params["embed"].dtype == jnp.float32
    plain, plain_mover = rolled_out(network)
    same = moved(plain_mover, network, rounded_and_back(trained, quantization))
    unrounded = moved(plain_mover, network, trained)

    def logits(network, params):
        read = functools.partial(prefill.prefill, network, piece_tokens=8)
        return jax.jit(read)(params, prompts_of(network)).logits

    ours, theirs = logits(rollout, params), logits(plain, same)
    # Sums of float32 in another order: the steps are multiplied in before them or after.
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert np.abs(np.asarray(theirs) - logits(plain, unrounded)).max() > 0.01


def test_keys_beyond_float8_are_its_largest():
    x = jnp.array([1e6, -1e6, 0.5, jnp.inf])
    found = quantization_lib.to_cache_dtype(x, "float8_e4m3fn").astype(jnp.float32)
    np.testing.assert_array_equal(found, [448.0, -448.0, 0.5, 448.0])
    np.testing.assert_array_equal(quantization_lib.to_cache_dtype(x, "float32"), x)


@functools.cache
def greedy_work():
    random = np.random.default_rng(0)
    return [request(random, 5 + n, [SamplingParams(24, 0.0)], n) for n in range(8)]


@functools.cache
def greedy(**settings):
    """Returns the engine's tokens [8, 24], their log-probs, and those of the unrounded policy."""
    rollout, mover = rolled_out(tiny.NETWORK, **settings)
    params = moved(mover, tiny.NETWORK, weights())
    found = engine_of(network=rollout).generate(params, greedy_work())
    rows = np.zeros((8, 64), np.int32)
    for row, r, (c,) in zip(rows, greedy_work(), found, strict=True):
        row[: len(r.tokens) + 24] = [*r.tokens, *c.tokens]
    wanted = tiny.teacher_forced(rows, jnp.ones(8), tiny.NETWORK, weights())
    at = [len(r.tokens) for r in greedy_work()]
    theirs = np.stack([row[n : n + 24] for row, n in zip(np.asarray(wanted), at, strict=True)])
    return (
        np.array([c.tokens for (c,) in found]),
        np.array([c.log_probs for (c,) in found]),
        theirs,
    )


@pytest.mark.parametrize(
    ("settings", "agreement", "difference"),
    [
        # An error of at most 1/254 of an output's largest weight; log-probs here are of size 1.
        ({"quantization": "int8"}, 0.9, 0.02),
        # Of at most 1/16 of each weight, or of each key and value.
        ({"quantization": "fp8"}, 0.7, 0.08),
        ({"cache_dtype": "fp8"}, 0.7, 0.04),
    ],
    ids=["int8", "fp8", "fp8 cache"],
)
def test_greedy_tokens_and_log_probs_stay_near(settings, agreement, difference):
    plain = greedy()[0]
    ours, log_probs, theirs = greedy(**settings)
    same = np.cumprod(ours == plain, axis=1).mean()  # share of tokens before the first other one
    found = np.abs(log_probs - theirs).mean()
    print(f"{settings}: greedy agreement {same:.3f}, log-prob difference {found:.4f}")
    assert same >= agreement
    assert 1e-4 < found <= difference


@pytest.mark.parametrize("quantization", EIGHT_BITS)
def test_devices_round_alike_and_send_what_is_rounded(quantization):
    network = tiny.with_sizes(hidden_size=64, mlp_size=128, num_layers=1)
    mesh, trained = tiny.make_mesh(fsdp=4, tensor=2), tiny.params(network)
    # The kernels of a single CPU are transposed; here they are not.
    alone = quantization_lib.quantize_layer(
        jax.tree.map(lambda a: a[0], trained["layers"]["0"]), quantization, "float32"
    )
    _, mover = rolled_out(network, mesh, quantization=quantization)
    (layer,) = moved(mover, network, trained, mesh)["layers"]
    for path, ours in flatten_dict(alone).items():
        np.testing.assert_array_equal(np.asarray(flatten_dict(layer)[path]), ours, str(path))
    report, plain = mover.report(), rolled_out(network, mesh)[1].report()
    # CPUs send float8 as float16.
    sent, share = {"int8": ("s8", 0.5), "fp8": ("f16", 0.75)}[quantization]
    assert sent in report.dtypes
    # Of float32 a quarter, or half, but for steps, biases, norms, and the ends that stay.
    assert report.bytes_moved < share * plain.bytes_moved
