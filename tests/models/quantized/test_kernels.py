"""A quantized base computes what its dequantized copy does, and no such copy ever exists."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_llm.config import LoraConfig
from jaxrl_llm.models import lora
from jaxrl_llm.models.layers import MatmulImpl
from jaxrl_llm.models.quantized import checks, kernels

LAYERS = 8  # more than any other dim: a stack is recognized by it
SHAPE = dataclasses.replace(
    tiny.SHAPE, hidden_size=128, head_size=16, mlp_size=256, num_layers=LAYERS
)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 16)).astype(np.int32)
FORMATS = ("nf4", "int8")


def network(format, remat="none"):
    return dataclasses.replace(
        tiny.NETWORK,
        shape=SHAPE,
        lora=LoraConfig(rank=4),
        matmuls=MatmulImpl(quantization=format),
        remat=remat,
    )


@functools.cache
def weights(format):
    """A quantized base, its dequantized copy, and adapters that have learned something."""
    net = network(format)
    base = jax.jit(net.init)(jax.random.key(0))
    layers = {
        name: kernels.dequantize_layers(stack, format, "float32")
        for name, stack in base["layers"].items()
    }
    adapters = jax.jit(net.init_adapters)(jax.random.key(1))
    return base, {**base, "layers": layers}, jax.tree.map(lambda a: a + 0.01, adapters)


def loss_and_gradients(net):
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)

    def loss(adapters, base):
        params = lora.combine_params(base, adapters)
        hidden, _ = net.forward(params, TOKENS, positions, jnp.ones_like(TOKENS))
        return (hidden**3).mean()

    return jax.jit(jax.value_and_grad(loss))


@functools.cache
def program(format, remat):
    base, _, adapters = weights(format)
    return loss_and_gradients(network(format, remat)).lower(adapters, base).compile()


@pytest.mark.parametrize("format", FORMATS)
def test_a_product_is_that_with_the_dequantized_kernel(format):
    random = np.random.default_rng(1)
    weight, x = random.standard_normal((2, 128, 128)).astype(np.float32)
    kernel = kernels.QuantizedKernel(kernels.FORMATS[format].quantize(weight), format)
    plain = kernel.dequantize(jnp.float32)
    found, vjp = jax.vjp(lambda x: kernels.matmul(x, kernel), x)
    largest = float(jnp.abs(found).max())
    np.testing.assert_allclose(found, x @ plain, rtol=0, atol=1e-6 * largest)
    np.testing.assert_allclose(vjp(x)[0], x @ plain.T, rtol=0, atol=1e-6 * largest)
    assert 0.001 < np.abs(plain - weight).max() / np.abs(weight).max() < 0.2


@pytest.mark.parametrize("format", FORMATS)
def test_adapters_have_the_gradients_of_the_dequantized_base(format):
    base, plain, adapters = weights(format)
    found, gradients = program(format, "none")(adapters, base)
    wanted, plain_gradients = loss_and_gradients(network(format).unquantized)(adapters, plain)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))
        assert jnp.abs(b).max() > 0


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("format", FORMATS)
def test_no_program_has_a_stack_of_dequantized_layers(format, remat):
    # A kernel of some layer is [128 or 256, 128 or 256]; the adapters' stacks are narrower.
    stack = rf"(?:f32|bf16)\[{LAYERS},(?:128|256),(?:64|128|256)\]"
    assert not re.findall(stack, program(format, remat).as_text())
    plain = loss_and_gradients(network(format).unquantized).lower(*weights(format)[2:0:-1])
    assert re.findall(stack, plain.compile().as_text())  # of plain kernels they are seen


def test_shards_compute_the_same():
    base, _, adapters = weights("nf4")
    net = network("nf4")
    _, wanted = program("nf4", "none")(adapters, base)
    device_mesh = tiny.make_mesh(fsdp=2, tensor=2)
    with jax.set_mesh(device_mesh):
        sharded = tiny.sharded(base, device_mesh, net)
        _, found = loss_and_gradients(net)(adapters, sharded)
    down = sharded["layers"]["0"]["mlp"]["down"]["kernel"]
    assert down.addressable_shards[0].data.size == down.size // device_mesh.size
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


def test_a_merged_layer_is_the_dequantized_one_and_its_adapters():
    base, plain, adapters = weights("nf4")
    net = network("nf4")
    layers = kernels.dequantize_layers(
        lora.combine_params(base, adapters)["layers"]["0"], "nf4", "float32"
    )
    merged = lora.merge_adapters({"layers": {"0": layers}}, net.lora.scale)
    wanted = lora.merge_adapters(lora.combine_params(plain, adapters), net.lora.scale)
    jax.tree.map(np.testing.assert_array_equal, merged["layers"], wanted["layers"])
    assert jax.tree.structure(merged["layers"]) == jax.tree.structure(
        net.unquantized.abstract_params()["layers"]
    )


def test_what_blocks_do_not_divide_is_refused():
    assert checks.problem(SHAPE, "nf4", 1) == ""
    assert "mlp_size is 48" in checks.problem(tiny.SHAPE, "nf4", 1)
    assert checks.problem(tiny.SHAPE, "int8", 1) == ""
    assert "2 pipeline stages" in checks.problem(SHAPE, "int8", 2)
